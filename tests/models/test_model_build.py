"""From a configuration to a model: arguments, refusals, patch size and cost."""

import pytest
import timm
import torch

import infvit  # noqa: F401 - registers the models
from infvit.config import ModelConfig
from infvit.errors import ConfigError
from infvit.models.build import build_model, check_forward, count_flops, count_parameters, model_arguments, patch_size


def config(name: str = "infvit_pure_mini", **values) -> ModelConfig:
    return ModelConfig(name=name, **values)


def test_arguments_reach_the_model():
    built, inactive = build_model(
        config(gamma=0.5, gamma_trainable=False, args={"depth": 2}), 7, 1, 16, drop_path=0.2, drop=0.3
    )
    assert inactive == {}
    assert (built.num_classes, built.patch_embed.proj.in_channels, len(built.blocks)) == (7, 1, 2)
    assert built.patch_embed.img_size == (16, 16)
    assert built.head_drop.p == 0.3
    assert built.blocks[1].drop_path1.drop_prob == pytest.approx(0.2)
    logit = built.blocks[0].attn.core.decay.logit
    assert not logit.requires_grad
    assert torch.sigmoid(logit).item() == pytest.approx(0.5)
    assert built(torch.zeros(2, 1, 16, 16)).shape == (2, 7)


def test_keys_left_at_null_are_not_passed():
    assert model_arguments(config()) == {}
    assert model_arguments(config(gamma=0.5, activation="abs")) == {"gamma": 0.5, "activation": "abs"}
    assert model_arguments(config(gamma_trainable=False)) == {"gamma_trainable": False}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "resnt18"}, "unknown model 'resnt18'. Did you mean 'resnet18'"),
        ({"name": "infvit_linear_4"}, "unknown model 'infvit_linear_4'. Did you mean 'infvit_linear_4l'"),
        ({"name": "vit_mini", "gamma": 0.5}, "model vit_mini: .*softmax.*'gamma'.*Check model"),
        ({"name": "resnet18", "attention": "softmax"}, "model resnet18: .*'attention'"),
        ({"attention": "infsa_pur"}, "infsa_pur.*infsa_pure"),
        ({"activation": "relo"}, "relo.*relu"),
        ({"gamma": 0.5, "args": {"gamma": 0.4}}, "model.gamma and model.args.gamma are both set; keep one."),
        ({"args": {"num_heads": 7}}, "7"),
        ({"args": {"num_heads": 0}}, "width 96 is not divisible by num_heads=0"),
        ({"args": {"depth": "two"}}, "Check model"),
        ({"args": {"drop_pth": 1}}, "'drop_pth'"),
    ],
)
def test_refused_in_one_line(values: dict, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        build_model(ModelConfig(**{"name": "infvit_pure_mini", **values}), 10, 3, 32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "inactive"),
    [
        ("resnet18", {"img_size"}),
        ("vgg11", {"img_size", "drop_path_rate"}),
        ("vit_tiny_patch16_224", set()),
        ("mixer_s32_224", set()),
    ],
)
def test_other_models_of_timm(name: str, inactive: set[str]):
    """What a model has no use for is left out and named; what it takes must arrive."""
    with torch.device("meta"):
        built, found = build_model(config(name), 10, 3, 64, drop_path=0.1, drop=0.2)
    assert found == {argument: f"{name} takes no {argument}" for argument in inactive}
    assert built(torch.empty(2, 3, 64, 64, device="meta")).shape == (2, 10)
    assert 0.2 in {m.p for m in built.modules() if isinstance(m, torch.nn.Dropout)} or built.drop_rate == 0.2


def test_a_rate_of_zero_is_not_worth_a_note():
    assert build_model(config("vgg11"), 10)[1] == {}


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("infvit_linear_mini", 4),
        ("vit_4l", 16),
        ("vit_small_patch8_224", 8),
        ("mixer_s32_224", 32),
        ("swin_tiny_patch4_window7_224", 4),
        ("resnet18", None),
        ("pvt_v2_b0", None),  # overlapping patches of 7 at a step of 4: any size will do
    ],
)
def test_patch_size(name: str, side: int | None):
    assert patch_size(config(name)) == side


def test_patch_size_follows_the_arguments():
    assert patch_size(config(args={"patch_size": 8})) == 8


def test_flops_of_resnet18():
    """1.82 G multiply-adds at 224 px in the literature, 1.814 without the biases."""
    assert count_flops(config("resnet18"), 1000, 3, 224) == pytest.approx(2 * 1.82e9, rel=0.005)


def test_flops_of_timms_vit_count_its_attention():
    """ViT-S/16: 4.6 G multiply-adds; without the two products of attention it would be 4.24."""
    assert count_flops(config("vit_small_patch16_224"), 1000, 3, 224) == pytest.approx(2 * 4.6e9, rel=0.005)
    assert count_flops(config("cait_xxs24_224"), 1000, 3, 224) == pytest.approx(2 * 2.53e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "attention"), [("vit_mini", 2 * 65 * 65 * 96), ("infvit_pure_mini", 2 * 65 * 65 * 96)]
)
def test_flops_of_ours_by_hand(name: str, attention: int):
    n, d, depth = 65, 96, 4
    embed = 64 * (3 * 4 * 4) * d
    block = n * d * (3 * d + 2 * d + 8 * d) + attention  # qkv, two output projections, MLP, QK^T and AV
    head = d * d + d * 10  # pooled layer and classifier
    assert count_flops(config(name), 10, 3, 32) == 2 * (embed + depth * block + head)


def test_flops_grow_with_the_tokens_as_each_mechanism_promises():
    sizes = (32, 64)
    cost = {name: [count_flops(config(name), 10, 3, s) for s in sizes] for name in ("infvit_linear_mini", "vit_mini")}
    tokens = [(s // 4) ** 2 + 1 for s in sizes]
    ratio = {name: b / a / (tokens[1] / tokens[0]) for name, (a, b) in cost.items()}
    assert ratio["infvit_linear_mini"] == pytest.approx(1, abs=0.01)
    assert ratio["vit_mini"] > 1.1


def test_count_leaves_no_trace():
    before = torch.get_default_device()
    count_flops(config(), 10, 3, 32)
    assert torch.get_default_device() == before
    built, _ = build_model(config(), 10)
    assert all(p.device.type == "cpu" for p in built.parameters())
    assert count_parameters(built) == sum(p.numel() for p in timm.create_model("infvit_pure_mini").parameters())


def test_images_that_a_model_cannot_take():
    with torch.device("meta"):
        model, _ = build_model(ModelConfig(name="vgg11"), 10)
    check_forward(model, "vgg11", 3, 64)
    with pytest.raises(ConfigError, match=r"^model vgg11 cannot take images of 16 px \(.*\); set data.img_size.$"):
        check_forward(model, "vgg11", 3, 16)
