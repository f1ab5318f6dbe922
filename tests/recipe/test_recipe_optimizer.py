"""Groups of weight decay, layer decay and the rate at which it all starts."""

from dataclasses import replace

import pytest
import timm
import torch

import infvit  # noqa: F401 - registers the models
from infvit.config import RecipeConfig
from infvit.errors import ConfigError
from infvit.recipe import build_optimizer, peak_lr
from infvit.recipe.optimizer import inactive_keys

RECIPE = RecipeConfig()


def decay_by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}


@pytest.mark.parametrize("per_head", [False, True])
def test_weight_decay_spares_vectors_positions_class_token_and_gamma(per_head: bool):
    model = timm.create_model("infvit_pure_mini", depth=1, gamma_per_head=per_head)
    decay = decay_by_name(model, build_optimizer(model, RECIPE, 512))
    assert decay.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        free = parameter.ndim <= 1 or name in ("pos_embed", "cls_token") or name.endswith("decay.logit")
        assert decay[name] == (0.0 if free else 0.05), name
    assert decay["pos_embed"] == decay["cls_token"] == decay["blocks.0.norm1.weight"] == 0.0
    assert any(name.endswith("decay.logit") for name in decay)
    assert decay["head.weight"] == decay["patch_embed.proj.weight"] == 0.05


def test_values_reach_the_optimiser():
    recipe = replace(RECIPE, opt_eps=1e-6, opt_betas=[0.8, 0.95], weight_decay=0.3)
    optimizer = build_optimizer(torch.nn.Linear(2, 2), recipe, 1024)
    assert type(optimizer) is torch.optim.AdamW
    for group in optimizer.param_groups:
        assert (group["eps"], tuple(group["betas"]), group["lr"]) == (1e-6, (0.8, 0.95), 1e-3)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.3}


@pytest.mark.parametrize(("base", "batch", "rate"), [(512, 1024, 1e-3), (512, 64, 6.25e-5), (None, 1024, 5e-4)])
def test_rate_scales_with_the_global_batch(base: int | None, batch: int, rate: float):
    assert peak_lr(replace(RECIPE, lr_base_batch=base), batch) == pytest.approx(rate, rel=1e-12)


def test_layer_decay_scales_by_depth():
    model = timm.create_model("infvit_linear_mini", depth=2)
    optimizer = build_optimizer(model, replace(RECIPE, layer_decay=0.5), 512)
    names = {id(p): name for name, p in model.named_parameters()}
    scale = {names[id(p)]: g["lr_scale"] for g in optimizer.param_groups for p in g["params"]}
    # embedding, two blocks, and what follows: factors 0.5^3, 0.5^2, 0.5^1, 1
    assert scale["pos_embed"] == scale["patch_embed.proj.weight"] == 0.125
    assert scale["blocks.0.mlp.fc1.weight"] == 0.25
    assert scale["blocks.1.mlp.fc1.weight"] == 0.5
    assert scale["norm.weight"] == 0.5  # timm counts it to the last block
    assert scale["head.weight"] == scale["pooler.weight"] == 1.0
    decay = decay_by_name(model, optimizer)
    assert decay["pos_embed"] == decay["norm.weight"] == 0.0
    assert decay["blocks.0.mlp.fc1.weight"] == 0.05


@pytest.mark.parametrize(
    ("opt", "inactive"),
    [("sgd", {"opt_eps", "opt_betas"}), ("lion", {"opt_eps"}), ("rmsprop", {"opt_betas"}), ("adamw", set())],
)
def test_keys_that_an_optimiser_has_no_use_for(opt: str, inactive: set[str]):
    recipe = replace(RECIPE, opt=opt)
    assert inactive_keys(recipe).keys() == inactive
    assert all(opt in reason for reason in inactive_keys(recipe).values())
    group = build_optimizer(torch.nn.Linear(2, 2), recipe, 512).param_groups[0]
    assert ("betas" not in group) == ("opt_betas" in inactive)
    assert ("eps" not in group) == ("opt_eps" in inactive)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"opt": "adamv"}, "unknown recipe.opt='adamv'. Did you mean 'adam"),
        ({"opt_betas": [0.9]}, r"recipe.opt_betas=\[0.9\]: adamw takes 2 values."),
        ({"opt": "adan"}, "adan takes 3 values"),
        ({"opt": "fusedadam"}, "recipe.opt=fusedadam cannot be built: .*APEX"),
    ],
)
def test_what_cannot_be_built_is_one_clear_error(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        build_optimizer(torch.nn.Linear(2, 2), replace(RECIPE, **changes), 512)
