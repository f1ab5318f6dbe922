"""Pure InfSA as one custom operator with a backward pass of its own: one node for `compile`, `export`, checkpointing.

With `n` the norm of phi(S), `d = n + eps`, `out = phi(S) V / d` and `c = <dout, out>`, summed over the channels of a
row and, without a causal mask, over all rows of the head:

    dphi = dout V^T / d - T phi(S),  T = c / (d n), and 0 where n = 0

Under a causal mask `n` and `d` belong to a row, and `T` of row j is the sum of `c / (d n)` over the rows i >= j. Saved
for the backward pass are q, k, v, the output and `n`; the scores are computed again, tile by tile.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from infvit.attention.infsa import EPS
from infvit.attention.kernels import pure_tiled
from infvit.attention.mechanism import full_precision

SECOND_DERIVATIVE = (
    "Pure InfSA without the score matrix has no second derivative. Use the plain form: path='plain' of `pure_infsa`, "
    "or `module.path = 'plain'` on every PureInfSA of a model."
)


@torch.library.custom_op("infvit::pure_infsa", mutates_args=())
def pure_infsa_op(q: Tensor, k: Tensor, v: Tensor, activation: str, causal: bool, path: str) -> tuple[Tensor, Tensor]:
    """Computes Pure InfSA without gamma, and the norms that its backward pass needs.

    Args:
        q: queries, (B, H, M, D), not scaled, zero where padded.
        k: keys, (B, H, N, D), not scaled, zero where padded.
        v: values, (B, H, N, E), zero where padded.
        activation: relu, gelu or abs.
        causal: row i is normalised by the block of rows 0..i and has no entries above the diagonal.
        path: tiled or triton.

    Returns:
        The output, (B, H, M, E), in the dtype of v, and the norms, (B, H, 1) or causal (B, H, M).
    """
    with full_precision(v):
        if path == "triton":
            from infvit.attention.kernels import pure_triton  # Triton is not installed everywhere

            product, squares = pure_triton.forward(q, k, v, activation, causal)
        else:
            flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
            product, squares = pure_tiled.forward(flat_q, flat_k, flat_v, activation, causal)
            product, squares = (x.unflatten(0, q.shape[:2]) for x in (product, squares))
        norm = (squares.cumsum(-1) if causal else squares.sum(-1, keepdim=True)).sqrt_()
        norm.masked_fill_(norm.isinf(), float("nan"))  # not a silent 0 where the sum of squares overflows
        return product.div_((norm + EPS)[..., None]).to(v.dtype), norm


@pure_infsa_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, activation: str, causal: bool, path: str) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = v.new_empty(*q.shape[:3], v.shape[-1])
    return out, q.new_empty(*q.shape[:2], q.shape[2] if causal else 1, dtype=dtype)


@torch.library.custom_op("infvit::pure_infsa_backward", mutates_args=())
def pure_infsa_backward_op(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, norm: Tensor, activation: str, causal: bool, path: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of q, k and v from that of the output; see the top of this file."""
    divisor = norm + EPS
    correlation = (grad.to(norm.dtype) * out).sum(-1)
    if not causal:
        correlation = correlation.sum(-1, keepdim=True)
    tail = torch.where(norm == 0, 0, correlation / norm / divisor)
    if causal:
        tail = tail.flip(-1).cumsum(-1).flip(-1)
    rows = q.shape[:3]
    if path == "triton":
        from infvit.attention.kernels import pure_triton

        divisor, tail = (x.expand(rows).contiguous() for x in (divisor, tail))
        return pure_triton.backward(grad, divisor, tail, q, k, v, activation, causal)
    grad, tail = (grad / divisor[..., None]).contiguous(), tail.expand(rows)
    grad, tail, flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (grad, tail, q, k, v))
    dq, dk, dv = pure_tiled.backward(grad, tail, flat_q, flat_k, flat_v, activation, causal)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


@pure_infsa_backward_op.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, norm: Tensor, activation: str, causal: bool, path: str
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = pure_infsa_backward_op(grad, *ctx.saved_tensors, *ctx.options)
    return (*grads, None, None, None)


def _refuse(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(SECOND_DERIVATIVE)


pure_infsa_op.register_autograd(_backward, setup_context=_save)
pure_infsa_backward_op.register_autograd(_refuse)


# Like torch's own formulas for attention: causal counts as full.
@register_flop_formula(torch.ops.infvit.pure_infsa)
def _(q_shape: tuple[int, ...], k_shape: tuple[int, ...], v_shape: tuple[int, ...], *_: Any, **__: Any) -> int:
    batch, heads, queries, dim = q_shape
    return 2 * batch * heads * queries * k_shape[2] * (dim + v_shape[3])


@register_flop_formula(torch.ops.infvit.pure_infsa_backward)
def _(
    _grad: Any, q_shape: tuple[int, ...], k_shape: tuple[int, ...], v_shape: tuple[int, ...], *_: Any, **__: Any
) -> int:
    batch, heads, queries, dim = q_shape  # scores again, two gradients of dim channels; two of value_dim
    return 2 * batch * heads * queries * k_shape[2] * (3 * dim + 2 * v_shape[3])
