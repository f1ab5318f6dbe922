"""What a model costs by counting: parameters, FLOPs, and how they grow with the tokens."""

from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from infvit.errors import ConfigError
from infvit.evaluation.efficiency.cells import Cell
from infvit.evaluation.efficiency.subject import attention_layer, blueprint, create, token_count
from infvit.metrics import flops
from infvit.models.build import check_forward, count_parameters, unfuse

SIDES = (16, 32, 48)
"""Patches along an image's side at which the growth of the FLOPs is looked at."""


def cost(cell: Cell) -> dict[str, Any]:
    """Counts a cell's model on the meta device, for one image, along the path without fused kernels.

    Returns:
        `parameters`, `tokens`, `flops` (training: forward and backward; None where the counter missed something, or
        where the formula for one forward pass says otherwise), `flops_formula` and `flops_reason`.

    Raises:
        ConfigError: the model cannot be built, or does not take images of this size.
    """
    with torch.device("meta"):
        model = create(cell)
        check_forward(model, cell.model, blueprint(cell.model).in_chans, cell.resolution)
        facts = {"parameters": count_parameters(model), "tokens": token_count(model)}
        unfuse(model)
        formula = flops.formula(model) if cell.scope == "model" else None
        forward = _counted(model, replace(cell, mode="inference"))
        found = _counted(model, cell) if cell.mode == "training" else forward
    reason = None
    if found.missed:
        reason = f"not counted by torch: {', '.join(found.missed)}"
    elif formula is not None and forward.total != formula:
        reason = f"the counter says {forward.total}, the formula {formula} for a forward pass"
    return {**facts, "flops": None if reason else found.total, "flops_formula": formula, "flops_reason": reason}


def _counted(model: torch.nn.Module, cell: Cell) -> flops.FlopCount:
    inputs: tuple[torch.Tensor, ...]
    module: torch.nn.Module = model
    if cell.scope == "attention":
        layer, tokens = attention_layer(model), token_count(model)
        if layer is None or tokens is None:
            raise ConfigError(f"efficiency.scopes: attention: {cell.model} has none of our attention layers.")
        module = layer.core
        inputs = tuple(torch.empty(1, layer.num_heads, tokens, layer.head_dim, requires_grad=True) for _ in range(3))
    else:
        inputs = (torch.empty(1, blueprint(cell.model).in_chans, cell.resolution, cell.resolution),)

    def work() -> None:
        with torch.set_grad_enabled(cell.mode == "training"):
            out = module(*inputs)
            if cell.mode == "training":
                (out if cell.scope == "attention" else F.log_softmax(out, -1)).sum().backward()

    return flops.count(work)


def complexity(model: str, patch: int | None) -> str:
    """Returns `linear` or `quadratic` in the tokens, read off the counted FLOPs of three sizes; or `unknown`."""
    if patch is None:
        return "unknown"
    costs = [cost(Cell(model, "inference", side * patch)) for side in SIDES]
    if any(c["flops"] is None or c["tokens"] is None for c in costs):
        return "unknown"
    (n0, f0), (n1, f1), (n2, f2) = ((c["tokens"], c["flops"]) for c in costs)
    curvature = ((f2 - f1) / (n2 - n1) - (f1 - f0) / (n1 - n0)) / (n2 - n0)  # of the parabola through the three
    return "quadratic" if curvature * n2**2 > 1e-3 * f2 else "linear"
