"""The optimiser, built by timm."""

from typing import Any

import torch
from timm.optim import OptimInfo, create_optimizer_v2, get_optimizer_info, list_optimizers
from torch import nn

from infvit.config import RecipeConfig
from infvit.errors import ConfigError, did_you_mean


def peak_lr(recipe: RecipeConfig, batch_size: int) -> float:
    """Returns the learning rate after warm-up: scaled with the global batch unless `lr_base_batch` is null."""
    return recipe.lr if recipe.lr_base_batch is None else recipe.lr * batch_size / recipe.lr_base_batch


def build_optimizer(model: nn.Module, recipe: RecipeConfig, batch_size: int) -> torch.optim.Optimizer:
    """Builds the optimiser. Parameters of at most one dimension and those of `no_weight_decay()` get no decay.

    Raises:
        ConfigError: unknown optimiser, values it does not take, or a package it needs is missing.
    """
    info = _info(recipe)
    if info.has_betas and len(recipe.opt_betas) != info.num_betas:
        raise ConfigError(f"recipe.opt_betas={recipe.opt_betas}: {recipe.opt} takes {info.num_betas} values.")
    options: dict[str, Any] = {}
    if info.has_eps:
        options["eps"] = recipe.opt_eps
    if info.has_betas:
        options["betas"] = tuple(recipe.opt_betas)
    try:
        return create_optimizer_v2(
            model,
            opt=recipe.opt,
            lr=peak_lr(recipe, batch_size),
            weight_decay=recipe.weight_decay,
            layer_decay=recipe.layer_decay,
            **options,
        )
    except (ImportError, AssertionError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"recipe.opt={recipe.opt} cannot be built: {reason}") from error


def inactive_keys(recipe: RecipeConfig) -> dict[str, str]:
    """Returns the optimiser keys that the chosen optimiser has no use for."""
    info = _info(recipe)
    reasons = {}
    if not info.has_eps:
        reasons["opt_eps"] = f"{recipe.opt} has no epsilon"
    if not info.has_betas:
        reasons["opt_betas"] = f"{recipe.opt} has no betas"
    return reasons


def _info(recipe: RecipeConfig) -> OptimInfo:
    known = [str(name) for name in list_optimizers()]
    if recipe.opt not in known:
        raise ConfigError(f"unknown recipe.opt={recipe.opt!r}. {did_you_mean(recipe.opt, known)}")
    return get_optimizer_info(recipe.opt)
