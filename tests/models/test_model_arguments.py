"""Attention and its hyperparameters as arguments of a model, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from infvit.attention import AttentionLayer
from infvit.errors import ConfigError

Build = Callable[..., nn.Module]
Images = Callable[..., Tensor]


def layers(model: nn.Module) -> list[AttentionLayer]:
    return [module for module in model.modules() if isinstance(module, AttentionLayer)]


def test_attention_is_an_argument(build: Build, images: Images):
    for attention in ("infsa_pure", "infsa_linear"):
        direct, named = build("vit_mini", attention=attention), build(f"infvit_{attention.split('_')[1]}_mini")
        named.load_state_dict(direct.state_dict())
        with torch.no_grad():
            x = images(direct)
            assert torch.equal(direct(x), named(x))
        assert direct.attention == attention
    assert {layer.core.name for layer in layers(build("vit_mini"))} == {"softmax"}


@pytest.mark.parametrize("mini", ["infvit_pure_mini", "infvit_linear_mini"])
def test_hyperparameters_reach_every_layer(mini: str, create: Build):
    model = create(mini, gamma=0.25, gamma_trainable=False, gamma_per_head=True, activation="abs")
    assert len(layers(model)) == 2
    for layer in layers(model):
        assert torch.equal(layer.core.decay(), torch.full((6, 1, 1), 0.25))
        assert not layer.core.decay.logit.requires_grad
        assert layer.core.phi is torch.abs
    assert [layer.core.decay().item() for layer in layers(create(mini))] == pytest.approx([0.7, 0.7])


@pytest.mark.parametrize("mini", ["infvit_pure_mini", "infvit_linear_mini"])
def test_hyperparameters_change_the_function(mini: str, build: Build, images: Images):
    model, other = build(mini, activation="abs"), build(mini)
    x = images(model)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        before = other(x)
        assert not torch.allclose(before, model(x), atol=1e-4)
        for layer in layers(other):
            layer.core.decay.logit.sub_(1)
        assert not torch.allclose(before, other(x), atol=1e-4)


def test_tied_keys_and_projections_are_arguments(build: Build):
    width = 96
    tied = build("infvit_pure_mini", tie_key=True)
    assert [layer.qkv.out_features for layer in layers(tied)] == [2 * width] * 2
    untied = build("infvit_linear_mini", tie_key=False)
    assert [layer.qkv.out_features for layer in layers(untied)] == [3 * width] * 2
    single = build("infvit_linear_mini", double_proj=False)
    assert not [key for key in single.state_dict() if "proj2" in key]


@pytest.mark.parametrize("gamma", [0.0, 1.0, -0.5, 1.5, float("nan")])
def test_gamma_outside_the_unit_interval(gamma: float, build: Build):
    for mini in ("infvit_pure_mini", "infvit_linear_mini"):
        with pytest.raises(ConfigError, match=r"gamma=.* strictly between 0 and 1"):
            build(mini, gamma=gamma)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"activation": "rleu"}, ConfigError, "'rleu'; allowed: relu"),
        ({"num_heads": 7}, ConfigError, "96 is not divisible by num_heads=7.*6, 8"),
        ({"attention": "infsa_pur"}, ConfigError, "'infsa_pur'.*'infsa_pure'"),
        ({"gama": 0.5}, TypeError, "'gama'.*'gamma'"),
        ({"embed_width": 4}, TypeError, "'embed_width'"),
        ({"block_fn": nn.Identity}, TypeError, "'block_fn'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str):
    for mini in ("infvit_pure_mini", "infvit_linear_mini"):
        with pytest.raises(error, match=message):
            timm.create_model(mini, **arguments)


def test_hyperparameters_of_another_mechanism_are_refused():
    with pytest.raises(TypeError, match=r"softmax.*'gamma'.*nothing of its own"):
        timm.create_model("vit_mini", gamma=0.5)


def test_unknown_argument_is_refused_by_every_model(name: str):
    with pytest.raises(TypeError, match="'not_an_argument'"):
        timm.create_model(name, device="meta", not_an_argument=1)


def test_default_cfg_names_real_modules(name: str):
    model = timm.create_model(name, device="meta")
    cfg = model.default_cfg
    assert model.get_submodule(cfg["first_conv"]).weight.shape[1] == cfg["input_size"][0] == 3
    assert model.get_submodule(cfg["classifier"]).weight.shape[0] == cfg["num_classes"] == model.num_classes
    assert model.patch_embed.img_size == cfg["input_size"][1:]
