"""Every model through timm's model interface."""

from collections.abc import Callable

import pytest
import torch
from timm.layers import DropPath
from timm.models._manipulate import group_parameters
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn

from infvit.attention import AttentionLayer
from infvit.errors import ConfigError

Build = Callable[..., nn.Module]
Images = Callable[..., Tensor]


def layers(model: nn.Module) -> list[AttentionLayer]:
    return [module for module in model.modules() if isinstance(module, AttentionLayer)]


def test_every_parameter_gets_a_gradient(name: str, build: Build, images: Images):
    model = build(name).train()
    logits = model(images(model))
    assert logits.shape == (2, 10)
    logits.square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 0, key


def test_eval_is_deterministic_and_samples_are_independent(name: str, build: Build, images: Images):
    model = build(name, drop_rate=0.5, drop_path_rate=0.5, attn_drop_rate=0.5, proj_drop_rate=0.5)
    x = images(model, 3)
    with torch.no_grad():
        together = model(x)
        assert torch.equal(together, model(x))
        torch.testing.assert_close(together, torch.cat([model(x[i : i + 1]) for i in range(3)]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("option", ["drop_rate", "drop_path_rate", "attn_drop_rate", "proj_drop_rate", "pos_drop_rate"])
def test_dropout_acts_in_training_only(mini: str, option: str, build: Build, images: Images):
    model = build(mini, **{option: 0.5})
    x = images(model, 8)
    with torch.no_grad():
        assert torch.equal(model(x), model(x))
        model.train()
        assert not torch.equal(model(x), model(x))


def test_drop_path_grows_with_depth(name: str, build: Build):
    model = build(name, drop_path_rate=0.2, depth=3)
    rates = [getattr(block.drop_path2, "drop_prob", 0.0) for block in model.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2])
    assert isinstance(model.blocks[1].drop_path1, DropPath)


def test_num_classes_and_in_chans(name: str, build: Build, images: Images):
    model = build(name, num_classes=7, in_chans=1)
    with torch.no_grad():
        assert model(images(model)).shape == (2, 7)
    headless = build(name, num_classes=0)
    with torch.no_grad():
        x = images(headless)
        assert torch.equal(headless(x), headless.forward_head(headless.forward_features(x), pre_logits=True))


def test_non_square_img_size(name: str, build: Build, images: Images):
    patch = build(name).patch_embed.patch_size[0]
    model = build(name, img_size=(2 * patch, 3 * patch))
    assert model.pos_embed.shape[1] == 2 * 3 + 1
    with torch.no_grad():
        assert model(images(model)).shape == (2, 10)
        with pytest.raises(AssertionError, match="height"):
            model(images(model, size=(3 * patch, 2 * patch)))


def test_img_size_must_be_divisible_by_the_patch(name: str, build: Build):
    model = build(name)
    patch = model.patch_embed.patch_size[0]
    wrong = 2 * patch + patch // 2
    message = f"img_size={wrong} is not divisible by the patch size {patch}.*{2 * patch}, {3 * patch}"
    with pytest.raises(ConfigError, match=message):
        build(name, img_size=wrong)
    with pytest.raises(ConfigError, match=message):
        build(name, img_size=(2 * patch, wrong))
    with pytest.raises(ConfigError, match=message):
        type(model)(wrong, patch, embed_dim=16, depth=1, num_heads=2)
    before = model.pos_embed.clone(), model.patch_embed.img_size
    with pytest.raises(ConfigError, match=message):
        model.set_input_size((wrong, wrong))
    assert torch.equal(model.pos_embed, before[0])
    assert model.patch_embed.img_size == before[1]


def test_padded_dynamic_sizes_need_no_divisibility(mini: str, build: Build, images: Images):
    model = build(mini, img_size=30, dynamic_img_size=True, dynamic_img_pad=True)
    x = images(model, size=(30, 26))
    padded = nn.functional.pad(x, (0, 2, 0, 2))
    with torch.no_grad():
        assert torch.equal(model(x), model(padded))
        model.set_input_size((26, 30))
        assert model(x).shape == (2, 10)
    with pytest.raises(ConfigError, match="not divisible"):
        build(mini, img_size=30, dynamic_img_pad=True)


def test_set_input_size_resizes_the_position_embedding(name: str, build: Build, images: Images):
    model = build(name)
    height, width = model.patch_embed.img_size
    class_token = model.pos_embed[:, :1].clone()
    model.set_input_size((height, width))
    assert torch.equal(model.pos_embed[:, :1], class_token)
    model.set_input_size((height, 2 * width))
    rows, columns = model.patch_embed.grid_size
    assert model.pos_embed.shape[1] == 1 + rows * columns
    assert columns == 2 * rows
    assert torch.equal(model.pos_embed[:, :1], class_token)
    with torch.no_grad():
        assert model(images(model)).shape == (2, 10)


def test_dynamic_img_size_equals_a_resized_model(name: str, build: Build, images: Images):
    dynamic, fixed = build(name, dynamic_img_size=True), build(name)
    fixed.load_state_dict(dynamic.state_dict())
    patch = fixed.patch_embed.patch_size[0]
    size = (3 * patch, 5 * patch)
    fixed.set_input_size(size)
    x = images(dynamic, size=size)
    with torch.no_grad():
        torch.testing.assert_close(dynamic(x), fixed(x), rtol=1e-5, atol=1e-6)
        features, maps = dynamic.forward_intermediates(x)
    assert features.shape[1] == 3 * 5 + 1
    assert maps[-1].shape[-2:] == (3, 5)


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "token": lambda f: f[:, 0],
    "avg": lambda f: f[:, 1:].mean(1),
    "max": lambda f: f[:, 1:].amax(1),
    "avgmax": lambda f: (f[:, 1:].mean(1) + f[:, 1:].amax(1)) / 2,
    "": lambda f: f,
}


@pytest.mark.parametrize("pool", POOLS)
def test_global_pool(name: str, pool: str, build: Build, images: Images):
    model = build(name, global_pool=pool)
    with torch.no_grad():
        features = model.forward_features(images(model))
        pooled = POOLS[pool](features)
        if pool in ("avg", "max", "avgmax"):
            assert isinstance(model.norm, nn.Identity)
            pooled = model.fc_norm(pooled)
        expected = (pooled @ model.pooler.weight.T + model.pooler.bias).tanh()
        torch.testing.assert_close(model.forward_head(features, pre_logits=True), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.forward_head(features), model.head(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pool", ["map", "prr"])
def test_attention_pooling(mini: str, pool: str, build: Build, images: Images):
    model = build(mini, global_pool=pool).train()
    logits = model(images(model))
    assert logits.shape == (2, 10)
    logits.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_average_pooling_without_a_class_token(mini: str, build: Build, images: Images):
    model = build(mini, class_token=False, global_pool="avg")
    assert model.cls_token is None
    with torch.no_grad():
        features = model.forward_features(images(model))
        assert features.shape[1] == model.patch_embed.num_patches
        pooled = (model.fc_norm(features.mean(1)) @ model.pooler.weight.T + model.pooler.bias).tanh()
        torch.testing.assert_close(model.forward_head(features, pre_logits=True), pooled, rtol=1e-4, atol=1e-5)


def test_reset_classifier(name: str, build: Build, images: Images):
    model = build(name)
    x = images(model)
    with torch.no_grad():
        features = model.forward_features(x)
        hidden = model.forward_head(features, pre_logits=True)
        torch.testing.assert_close(model(x), model.get_classifier()(hidden))
        model.reset_classifier(0)
        assert torch.equal(model(x), hidden)
        model.reset_classifier(7)
        assert model.num_classes == 7
        torch.testing.assert_close(model(x), model.get_classifier()(hidden))
        model.reset_classifier(5, "avg")
        averaged = (features[:, 1:].mean(1) @ model.pooler.weight.T + model.pooler.bias).tanh()
        torch.testing.assert_close(model.forward_head(features, pre_logits=True), averaged, rtol=1e-4, atol=1e-5)
        assert model(x).shape == (2, 5)


def test_intermediates(name: str, build: Build, images: Images):
    model = build(name, depth=3)
    x = images(model)
    with torch.no_grad():
        final, maps = model.forward_intermediates(x, norm=True)
        torch.testing.assert_close(final, model.forward_features(x))
        assert len(maps) == 3
        assert torch.equal(maps[-1].flatten(2).mT, final[:, 1:])
        early = model.forward_intermediates(x, indices=[0], stop_early=True, norm=True, intermediates_only=True)
        assert torch.equal(early[0], maps[0])
        assert not torch.equal(maps[0], maps[1])


def test_features_only(name: str, build: Build, images: Images):
    whole = build(name, depth=3)
    features = build(name, depth=3, features_only=True, out_indices=(0, 1))
    left = {key.removeprefix("model."): p for key, p in features.named_parameters()}
    assert not [key for key in left if key.startswith(("pooler", "head", "fc_norm", "norm", "blocks.2"))]
    result = whole.load_state_dict(left, strict=False)
    assert result.unexpected_keys == []
    x = images(whole)
    maps = features(x)
    with torch.no_grad():
        expected = whole.forward_intermediates(x, indices=[0, 1], intermediates_only=True)
    for feature, wanted, width in zip(maps, expected, features.feature_info.channels(), strict=True):
        torch.testing.assert_close(feature, wanted)
        assert feature.shape[1] == width
    sum(feature.sum() for feature in maps).backward()
    assert [key for key, p in features.named_parameters() if p.grad is None] == []


def test_pruning_takes_the_pooled_layer_with_the_head(name: str, build: Build, images: Images):
    model = build(name, depth=3)
    x = images(model)
    with torch.no_grad():
        features, _ = model.forward_intermediates(x)
        kept = build(name, depth=3)
        kept.load_state_dict(model.state_dict())
        assert kept.prune_intermediate_layers([2], prune_head=False) == [2]
        assert torch.equal(kept(x), model(x))
        model.prune_intermediate_layers([2])
        assert not [key for key in model.state_dict() if key.startswith(("pooler", "head"))]
        assert torch.equal(model(x), features), "without its head the model returns its tokens"


def no_decay_names(model: nn.Module) -> set[str]:
    """Biases, norms, path decay, position embedding and class token: by name, not by shape."""
    ends = (".bias", "norm.weight", "norm1.weight", "norm2.weight", "decay.logit")
    names = {name for name, _ in model.named_parameters() if name.endswith(ends)}
    return names | {"pos_embed", "cls_token"}


def test_weight_decay_groups(name: str, build: Build):
    model = build(name)
    names = {id(p): n for n, p in model.named_parameters()}
    assert {"pos_embed", "cls_token"} <= model.no_weight_decay() & set(names.values())
    groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    decay = {group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in groups}
    assert decay == {0.0: no_decay_names(model), 0.05: set(names.values()) - no_decay_names(model)}
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    decayed = {names[id(p)] for group in optimizer.param_groups for p in group["params"] if group["weight_decay"]}
    assert decayed == decay[0.05]


def test_layer_decay_groups(name: str, build: Build):
    """Stem, block 0, ..., last block with the final norm, head with the pooled layer."""
    depth = 3
    model = build(name, depth=depth)
    names = {id(p): n for n, p in model.named_parameters()}
    groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5)
    scale = {names[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(names) == len(scale)

    def expected(key: str) -> float:
        if key.startswith(("head.", "pooler.")):
            return 1.0
        if key.startswith("norm."):
            return 0.5
        if key.startswith("blocks."):
            return 0.5 ** (depth - int(key.split(".")[1]))
        assert key.startswith(("cls_token", "pos_embed", "patch_embed.")), key
        return 0.5 ** (depth + 1)

    assert scale == {key: expected(key) for key in scale}
    decayed = {names[id(p)] for group in groups for p in group["params"] if group["weight_decay"]}
    assert decayed == set(names.values()) - no_decay_names(model)
    coarse = group_parameters(model, model.group_matcher(coarse=True), reverse=True)
    assert coarse["pooler.weight"] == coarse["head.weight"] == max(coarse.values())


def test_gradient_checkpointing_changes_nothing(name: str, build: Build, images: Images):
    model = build(name).train()
    x = images(model)
    results = []
    for enabled in (False, True):
        model.set_grad_checkpointing(enabled)
        model.zero_grad()
        calls = []
        handle = model.blocks[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        logits = model(x)
        logits.square().sum().backward()
        handle.remove()
        results.append((len(calls), logits.detach(), [p.grad.clone() for p in model.parameters()]))
    assert [result[0] for result in results] == [1, 2], "checkpointing runs a block twice"
    torch.testing.assert_close(results[1][1:], results[0][1:])


def test_causal_flag_reaches_every_block(name: str, build: Build, images: Images):
    """The class token comes first: under a causal mask it sees no patch."""
    model = build(name)
    with torch.no_grad():
        first, second = (model.forward_features(images(model), is_causal=True)[:, 0] for _ in range(2))
        assert torch.equal(first, second)
        assert not torch.equal(first, model.forward_features(images(model))[:, 0])
