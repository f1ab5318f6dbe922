"""The gate before every ratio: is what was timed the right function, at this very shape and precision?

An attention layer as the model holds it (absorbed, fused, a kernel of its own: whatever it does at this size) is given
random tokens. What its heads put out is compared with the mechanism's plain `reference` in float64.
"""

import inspect
import math
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infvit.attention import AttentionLayer, Mechanism, hyperparameters
from infvit.engine.device import autocast
from infvit.metrics.memory import is_out_of_memory

RIGHT, WRONG, UNCHECKED, NO_REFERENCE = "right", "wrong", "unchecked", "no reference"
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
HEADS, FEWEST_TOKENS, MOST_TOKENS = 3, 64, 16_385
SPREAD = 2.0  # of the tokens; with weights as initialised, scores of norm 1 would be so even that any weighting passes


@dataclass(frozen=True)
class Check:
    """What the comparison found.

    Attributes:
        state: right, wrong, unchecked (then no ratio either), or no reference (attention that is timm's, not ours).
        error: largest deviation, of outputs and in training also of gradients, relative to the largest true value.
        tolerance: what is allowed in this precision.
        tokens: at how many; fewer than measured where the reference would not fit into memory.
        reason: why unchecked.
    """

    state: str
    error: float | None = None
    tolerance: float | None = None
    tokens: int | None = None
    reason: str | None = None


def check_layer(
    layer: AttentionLayer | None,
    tokens: int | None,
    device: torch.device,
    precision: torch.dtype,
    training: bool,
    memory: float | None = None,
) -> Check:
    """Compares an attention layer with its mechanism's reference.

    Args:
        layer: of the model, on the CPU in float32; None where the model has none of ours.
        tokens: number N of tokens.
        device: where it is measured.
        precision: in which precision.
        training: as in training: under autocast, and the gradient of the tokens too.
        memory: bytes that the reference may take.
    """
    if layer is None or tokens is None:
        return Check(NO_REFERENCE)
    most = MOST_TOKENS if memory is None else int(min(MOST_TOKENS, math.sqrt(memory / (8 * (24 if training else 10)))))
    any_length = layer.core.capabilities.any_length
    count = min(tokens, most) if any_length else tokens
    while True:
        try:
            error = _worst(layer, count, device, precision, training)
            break
        except (RuntimeError, MemoryError) as failure:
            if not is_out_of_memory(failure):
                raise
        if not any_length or count // 2 < FEWEST_TOKENS:
            return Check(UNCHECKED, reason=f"the reference does not fit into memory at {count} tokens")
        count //= 2
    return judge(error, precision, count)


def judge(error: float, precision: torch.dtype, tokens: int | None) -> Check:
    """Returns the verdict on a deviation."""
    tolerance = TOLERANCE[precision]
    return Check(RIGHT if error <= tolerance else WRONG, error if math.isfinite(error) else None, tolerance, tokens)


def deviation(got: Tensor, true: Tensor) -> float:
    """Returns the largest deviation, relative to the largest true value; infinite where it is not a number."""
    scale = float(true.abs().max()) or 1.0
    error = float((got - true).abs().max()) / scale
    return error if math.isfinite(error) else math.inf


def _worst(layer: AttentionLayer, tokens: int, device: torch.device, precision: torch.dtype, training: bool) -> float:
    """Returns the largest relative deviation at `tokens`; infinite where the output is not finite."""
    weights = torch.float32 if training else precision
    layer = deepcopy(layer).to(device, weights).train(training)
    generator = torch.Generator().manual_seed(0)
    width = layer.num_heads * layer.head_dim
    x = (SPREAD * torch.randn(1, tokens, width, generator=generator)).to(device, weights).requires_grad_(training)
    chosen = _choose(layer)
    gradient = torch.randn(1, len(chosen), tokens, layer.head_dim, generator=generator).double()
    reference_device = device if device.type == "cuda" else torch.device("cpu")  # MPS has no float64
    with torch.set_grad_enabled(training):
        with autocast(device, precision if training else torch.float32):
            found = _heads(layer, x)[:, chosen].to(reference_device, torch.float64)
            # Both start from the same rounded q and k: where a ReLU opens, another rounding is another gradient.
            projected = layer.project(x)
        expected, slope = _reference(layer, x, projected, chosen, gradient, reference_device)
        results = [(found.detach(), expected)]
        if training:
            got = torch.autograd.grad(found, x, gradient.to(reference_device))[0]
            results.append((got.to(reference_device, torch.float64), slope))
    return max(deviation(got, true) for got, true in results)


def _choose(layer: AttentionLayer) -> list[int]:
    """Returns the first, middle and last head; all of them where learned parameters of the mechanism enter."""
    if not isinstance(inspect.getattr_static(type(layer.core), "reference"), staticmethod):
        return list(range(layer.num_heads))
    return sorted({0, layer.num_heads // 2, layer.num_heads - 1})[:HEADS]


def _heads(layer: AttentionLayer, x: Tensor) -> Tensor:
    """Returns what the heads put out, (B, H, N, D), caught where the layer hands them to its output projection."""
    caught: list[Tensor] = []
    hook = layer.norm.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
    try:
        layer(x)
    finally:
        hook.remove()
    heads = caught[0].unflatten(-1, (layer.num_heads, layer.head_dim)).transpose(1, 2)
    return heads.expand(-1, -1, x.shape[1], -1)  # Linear InfSA: one output for all tokens


def _reference(
    layer: AttentionLayer,
    x: Tensor,
    projected: tuple[Tensor, Tensor, Tensor],
    chosen: list[int],
    gradient: Tensor,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Returns the reference's heads, and the gradient that they give the tokens, in float64, head by head."""
    q, k, v = (part.to(device, torch.float64) for part in projected)
    core = deepcopy(layer.core).to(device, torch.float64)
    whole = len(chosen) == layer.num_heads > HEADS
    heads, slope = [], torch.zeros_like(x, dtype=torch.float64)
    for at in [slice(None)] if whole else [slice(i, i + 1) for i in range(len(chosen))]:
        group = chosen[at]
        out = core.reference(q[:, group], k[:, group], v[:, group], **_arguments(core))
        if x.requires_grad:
            part = gradient[:, at].to(device)
            slope += torch.autograd.grad(out, x, part, retain_graph=True)[0].double()
        heads.append(out.detach())
    return torch.cat(heads, 1), slope.to(device)


def _arguments(core: Mechanism) -> dict[str, Any]:
    """Returns the hyperparameters that a mechanism was built with, as far as it keeps them."""
    arguments = {name: getattr(core, name) for name in hyperparameters(type(core)) if hasattr(core, name)}
    decay = getattr(core, "decay", None)
    return arguments | ({"gamma": decay.initial} if decay is not None else {})
