"""Saving, loading, copying and folding."""

import copy
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

import infvit
from infvit.attention import AttentionLayer
from infvit.errors import ConfigError

Build = Callable[..., nn.Module]
Images = Callable[..., Tensor]
OPTIONS: dict[str, Any] = {"gamma": 0.5, "gamma_trainable": False, "gamma_per_head": True, "activation": "gelu"}


def assert_equal(model: nn.Module, other: nn.Module, x: Tensor):
    with torch.no_grad():
        assert torch.equal(other.eval()(x), model(x))


def settings(model: nn.Module) -> list[tuple[Any, ...]]:
    cores = [module.core for module in model.modules() if isinstance(module, AttentionLayer)]
    return [
        (core.name, core.activation, core.decay.initial, core.decay.logit.requires_grad, core.decay.logit.shape)
        for core in cores
    ]


def test_state_dict_round_trip(name: str, build: Build, images: Images, tmp_path: Path):
    model = build(name)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other = build(name)
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert_equal(model, other, images(model))


def test_plain_timm_reads_a_checkpoint(name: str, build: Build, images: Images, tmp_path: Path):
    """As bare weights and under `state_dict` as timm's trainer writes them, with the prefixes of wrappers."""
    model = build(name)
    weights = model.state_dict()
    for number, content in enumerate(
        [weights, {"epoch": 3, "state_dict": {f"module._orig_mod.{key}": value for key, value in weights.items()}}]
    ):
        path = tmp_path / f"{number}.pth.tar"
        torch.save(content, path)
        assert_equal(model, build(name, checkpoint_path=str(path)), images(model))


def test_weights_for_another_image_size_keep_the_pooled_layer(name: str, build: Build, images: Images, tmp_path: Path):
    """Through timm's checkpoint filter, which resizes the position embedding and drops what it calls `pre_logits`."""
    model = build(name)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    side = 2 * model.patch_embed.img_size[0]
    overlay = {"file": str(tmp_path / "weights.pth"), "num_classes": 10, "input_size": (3, side // 2, side // 2)}
    larger = build(name, pretrained=True, pretrained_cfg_overlay=overlay, img_size=side)
    model.set_input_size((side, side))
    assert_equal(model, larger, images(model))


@pytest.mark.parametrize("attention", ["infsa_pure", "infsa_linear"])
@pytest.mark.parametrize("safe", [False, True])
def test_hugging_face_folder_round_trip(attention: str, safe: bool, build: Build, images: Images, tmp_path: Path):
    model = build("vit_mini", attention=attention, **OPTIONS, tie_key=True, double_proj=False)
    save_for_hf(model, str(tmp_path), safe_serialization=safe)
    other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert_equal(model, other, images(model))
    assert settings(other) == settings(model) == [(attention, "gelu", 0.5, False, (6,))] * 2


def test_hugging_face_folder_of_every_model(name: str, build: Build, images: Images, tmp_path: Path):
    model = build(name)
    save_for_hf(model, str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["architecture"] == name
    assert_equal(model, timm.create_model(f"local-dir:{tmp_path}", pretrained=True), images(model))


def test_hugging_face_folder_after_changes(mini: str, build: Build, images: Images, tmp_path: Path):
    """Folded, at another size, with another head: the folder describes the model as it is now."""
    model = infvit.reparameterize(build(mini))
    model.set_input_size((24, 40))
    model.reset_classifier(4, "avg")
    save_for_hf(model, str(tmp_path))
    other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert [key for key in other.state_dict() if "proj2" in key] == []
    assert_equal(model, other, images(model))


@pytest.mark.parametrize("options", [{}, {"activation": "gelu"}, {"activation": "abs"}], ids=str)
def test_copies(name: str, options: dict[str, Any], build: Build, images: Images):
    if options and not name.startswith("infvit"):
        options = {"qk_norm": True}
    model = build(name, **options)
    x = images(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    others = (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    )
    for other in others:
        assert_equal(model, other, x)
        assert {p.data_ptr() for p in other.parameters()}.isdisjoint(p.data_ptr() for p in model.parameters())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_folding_keeps_the_logits(name: str, dtype: torch.dtype, tolerance: float, build: Build, images: Images):
    model = build(name).to(dtype)
    width, depth = model.embed_dim, len(model.blocks)
    x = images(model)
    with torch.no_grad():
        expected = model(x)
        size = sum(p.numel() for p in model.parameters())
        assert infvit.reparameterize(model) is model
        torch.testing.assert_close(model(x), expected, rtol=0, atol=tolerance)
        for block in model.blocks:
            block.attn.proj.weight.mul_(2)
        assert not torch.allclose(model(x), expected, atol=10 * tolerance), "the folded projection must matter"
    assert [key for key in model.state_dict() if "proj2" in key] == []
    assert size - sum(p.numel() for p in model.parameters()) == depth * (width * width + width)


def test_folding_wants_a_module():
    with pytest.raises(ConfigError, match=r"torch\.nn\.Module, not int"):
        infvit.reparameterize(3)


def test_folding_twice_and_loading_into_a_folded_model(name: str, build: Build, images: Images):
    model = infvit.reparameterize(build(name))
    once = copy.deepcopy(model.state_dict())
    twice = infvit.reparameterize(model).state_dict()
    assert twice.keys() == once.keys()
    assert all(torch.equal(twice[key], once[key]) for key in once)
    other = infvit.reparameterize(build(name))
    other.load_state_dict(once)
    assert_equal(model, other, images(model))
    single = build(name, double_proj=False)
    single.load_state_dict(once)
    assert_equal(model, infvit.reparameterize(single), images(model))


def test_folding_without_biases(mini: str, build: Build, images: Images):
    model = build(mini, proj_bias=False).double()
    x = images(model)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(infvit.reparameterize(model)(x), expected, rtol=0, atol=1e-12)
    assert all(block.attn.proj.bias is None for block in model.blocks)


def test_folding_finds_layers_inside_other_modules(build: Build, images: Images):
    model = build("infvit_linear_mini")
    outer = infvit.reparameterize(nn.Sequential(nn.Identity(), model))
    assert outer[1] is model
    assert [key for key in outer.state_dict() if "proj2" in key] == []
    plain = timm.create_model("test_vit")
    before = copy.deepcopy(plain.state_dict())
    assert infvit.reparameterize(plain).state_dict().keys() == before.keys()


@pytest.mark.parametrize(
    "options", [{}, {"num_classes": 0}, {"reg_tokens": 2}, {"init_values": 0.1}, {"fc_norm": True}]
)
def test_last_mlp_sees_the_class_token_only(mini: str, options: dict[str, Any], build: Build, images: Images):
    model = build(mini, **options).double()
    x = images(model)
    tokens = []
    model.blocks[-1].mlp.register_forward_hook(lambda _, inputs, __: tokens.append(inputs[0].shape[1]))
    with torch.no_grad():
        expected, features = model(x), model.forward_features(x)
        infvit.reparameterize(model)
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(model.forward_features(x), features, rtol=0, atol=1e-12)
    count = features.shape[1]
    assert tokens == [count, count, 1, count]


@pytest.mark.parametrize("masks", [{"is_causal": True}, {"attn_mask": True}], ids=str)
def test_masks_reach_every_block_of_the_inference_form(mini: str, masks: dict[str, Any], build: Build, images: Images):
    model = build(mini).double()
    x = images(model)
    if "attn_mask" in masks:
        real = torch.rand(len(x), 1, 1, model.patch_embed.num_patches + 1) > 0.3
        real[..., 0] = True
        masks = {"attn_mask": real}
    with torch.no_grad():
        expected = model(x, **masks)
        assert not torch.allclose(model(x), expected)
        torch.testing.assert_close(infvit.reparameterize(model)(x, **masks), expected, rtol=0, atol=1e-12)


def test_pools_that_need_every_token_get_every_token(mini: str, build: Build, images: Images):
    for pool in ("avg", "map"):
        model = build(mini, global_pool=pool).double()
        x = images(model)
        with torch.no_grad():
            expected = model(x)
            torch.testing.assert_close(infvit.reparameterize(model)(x), expected, rtol=0, atol=1e-12)
