"""The sums over tokens of Linear InfSA with tied keys, as one custom operator: `infvit::linear_pool`.

The operator takes the tokens and the query projection and returns the pooled tokens, which are all that leaves a head:

    q_j = W x_j + b;  n_j = scale ||q_j||;  qbar = sum_j n_j scale q_j / (sum_j n_j + eps)
    s_j = scale q_j . qbar;  f_j = phi(s_j);  a_j = f_j / (sum_l f_l +- eps)
    pooled = sum_j a_j x_j;  total = sum_j a_j

Its backward is written out, so that X and q are all of size N x C that a training step keeps, and no temporary of that
size is made besides the gradients. With F = sum f +- eps, T = sum n + eps and the gradients dp, dt of the results:

    da_j = x_j . dp + dt;  df_j = (da_j - dp . pooled - dt total) / F;  ds_j = df_j phi'(s_j)
    dqbar = scale sum_j ds_j q_j;  dn_j = (scale q_j . dqbar - qbar . dqbar) / T
    dq_j = scale (ds_j qbar + (n_j / T) dqbar + dn_j q_j / ||q_j||);  dx_j = sum_h a_j dp + W^T dq_j

An operator, and not traced Python: torch.compile takes it as one node of the graph, and on CUDA the same name stands
for the Triton kernels of `linear_triton`. The functions here are torch's own operations, for every device. They work
in slices of tokens that fit into a processor's cache, and the kernels are tested against the same formula.
"""

import os
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

EPS = 1e-6
MAX_WIDTH = 2048
"""Of tokens for the Triton kernels, which hold one whole in a tile."""
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SLICE = 2**19
"""Numbers of q that are worked on at a time: 2 MB in float32."""


class Sums(NamedTuple):
    """What the forward pass leaves for the backward pass; `compute` is float32, or float64 for float64 tokens.

    Attributes:
        query: q, (B, N, C), in the dtype of the tokens; zero where padded.
        norms: n, (B, N, H), compute.
        pooled_query: qbar, (B, H, D), compute.
        scores: s before the activation, (B, N, H), compute.
    """

    query: Tensor
    norms: Tensor
    pooled_query: Tensor
    scores: Tensor


def activate(scores: Tensor, activation: str, real: Tensor | None) -> Tensor:
    """Returns f = phi(s), 0 where padded."""
    weights = {"relu": torch.relu, "gelu": F.gelu, "abs": torch.abs}[activation](scores)
    return weights if real is None else weights.masked_fill_(~real[..., None], 0)


def activate_backward(grad: Tensor, scores: Tensor, activation: str, real: Tensor | None) -> Tensor:
    """Returns ds from df; 0 where padded."""
    if activation == "relu":
        grad = torch.ops.aten.threshold_backward(grad, scores, 0)
    elif activation == "gelu":
        grad = torch.ops.aten.gelu_backward(grad, scores)
    else:
        grad = grad * scores.sgn()
    return grad if real is None else grad.masked_fill_(~real[..., None], 0)


def denominator(total: Tensor) -> Tensor:
    """Returns sums moved away from 0 by eps in the direction of their sign, so that eps never cancels one."""
    return torch.where(total < 0, total - EPS, total + EPS)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of sums over tokens: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def slices(x: Tensor) -> list[slice]:
    """Returns the slices of tokens (B, N, C) to work on one after the other."""
    step = max(1, SLICE // max(1, x.shape[0] * x.shape[2]))
    return [slice(start, start + step) for start in range(0, x.shape[1], step)]


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes `F.linear`, without a graph; float32 on CPUs with AVX2 or AVX-512 by oneDNN.

    There torch takes MKL, which on processors that are not Intel's is slower (0.86 times the speed on Zen 3), and keeps
    to AVX2 (half the speed on Zen 5). The operator that chooses oneDNN is the one that Inductor emits for frozen
    models; without it, or with `torch.backends.mkldnn.enabled = False`, the product is torch's own.
    """
    onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    usable = x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    if onednn is None or not usable or not torch.backends.mkldnn.enabled:
        return F.linear(x, weight, bias)
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return F.linear(x, weight, bias)
    return onednn(x.flatten(0, 1), weight, bias, "none", [], "").view(*x.shape[:2], -1)


def torch_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, real: Tensor | None, heads: int, activation: str
) -> tuple[Tensor, Tensor, Sums]:
    """Computes pooled tokens, their total weight and what the backward pass needs; see `linear_pool`."""
    compute = compute_dtype(x)
    scale = (x.shape[2] // heads) ** -0.5
    query = project(x, weight, bias)
    if real is not None:
        query = query.masked_fill_(~real[..., None], 0)  # the bias made them non-zero
    q = query.unflatten(-1, (heads, -1))
    norms, scores = (x.new_empty(*q.shape[:3], dtype=compute) for _ in range(2))
    pooled_query = x.new_zeros(x.shape[0], *q.shape[2:], dtype=compute)
    for part in slices(x):
        piece = q[:, part].to(compute)
        norm = torch.linalg.vector_norm(piece, dim=-1)
        norms[:, part] = norm
        pooled_query += (norm[..., None] * piece).sum(1)
    norms *= scale
    pooled_query *= scale**2
    pooled_query /= norms.sum(1)[..., None] + EPS
    for part in slices(x):
        scores[:, part] = (q[:, part] * pooled_query[:, None]).sum(-1)
    scores *= scale
    weights = activate(scores, activation, real)
    weights /= denominator(weights.sum(1, keepdim=True))
    return weights.transpose(1, 2) @ x.to(compute), weights.sum(1), Sums(query, norms, pooled_query, scores)


def torch_query_gradient(query: Tensor, norms: Tensor, pooled_query: Tensor, score_gradient: Tensor) -> Tensor:
    """Computes dq from q and ds, in two passes over q.

    Args:
        query: q, (B, N, C).
        norms: n, (B, N, H).
        pooled_query: qbar, (B, H, D).
        score_gradient: ds, (B, N, H).

    Returns:
        dq, (B, N, C), in the dtype of q.
    """
    heads, dim = pooled_query.shape[1:]
    scale = dim**-0.5
    q = query.unflatten(-1, (heads, dim))
    gradient = torch.zeros_like(pooled_query)
    for part in slices(query):
        gradient += (score_gradient[:, part, :, None] * q[:, part]).sum(1)
    gradient *= scale
    total = norms.sum(1) + EPS
    constant = (pooled_query * gradient).sum(-1)
    out = torch.empty_like(query).unflatten(-1, (heads, dim))
    for part in slices(query):
        norm, piece = norms[:, part], q[:, part].to(norms.dtype)
        turn = (scale * (piece * gradient[:, None]).sum(-1) - constant[:, None]) / total[:, None]
        turn = torch.where(norm == 0, turn.new_zeros(()), turn * scale / norm)  # times q: dn q / ||q||
        grad = piece * turn[..., None]
        grad.addcmul_(score_gradient[:, part, :, None], pooled_query[:, None])
        grad.addcmul_((norm / total[:, None])[..., None], gradient[:, None])
        out[:, part] = grad.mul_(scale)
    return out.flatten(2)


@cache
def has_triton() -> bool:
    """Whether Triton is installed; it comes with torch for CUDA and not with torch for CPUs."""
    return find_spec("triton") is not None


def triton_is_used(x: Tensor) -> bool:
    """Whether the Triton kernels compute for these tokens: half precision or float32 on CUDA or in the interpreter."""
    possible = x.is_cuda or (x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")
    return possible and x.dtype in TRITON_DTYPES and x.shape[-1] <= MAX_WIDTH and has_triton()


@torch.library.custom_op("infvit::linear_pool", mutates_args=())
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, real: Tensor | None, heads: int, activation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if triton_is_used(x):
        from infvit.attention.kernels.linear_triton import triton_forward as forward
    else:
        forward = torch_forward
    pooled, total, sums = forward(x, weight, bias, real, heads, activation)
    return pooled, total, *sums


@_forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, real: Tensor | None, heads: int, activation: str):  # type: ignore[no-untyped-def]
    batch, tokens, width = x.shape
    dtype = compute_dtype(x)
    return (
        x.new_empty(batch, heads, width, dtype=dtype),
        x.new_empty(batch, heads, dtype=dtype),
        x.new_empty(batch, tokens, width),
        x.new_empty(batch, tokens, heads, dtype=dtype),
        x.new_empty(batch, heads, width // heads, dtype=dtype),
        x.new_empty(batch, tokens, heads, dtype=dtype),
    )


@register_flop_formula(torch.ops.infvit.linear_pool)
def _flops(x: Any, weight: Any, bias: Any, real: Any, heads: int, *_: Any, **__: Any) -> int:
    """Of matrix products: the projection, pooled query and scores, and the weights of each head with the tokens."""
    batch, tokens, width = x
    return 2 * batch * tokens * width * (width + 2 + heads)


@torch.library.custom_op("infvit::linear_pool_query_gradient", mutates_args=())
def _query_gradient(query: Tensor, norms: Tensor, pooled_query: Tensor, score_gradient: Tensor) -> Tensor:
    if triton_is_used(query):
        from infvit.attention.kernels.linear_triton import triton_query_gradient as query_gradient
    else:
        query_gradient = torch_query_gradient
    return query_gradient(query, norms, pooled_query, score_gradient)


@_query_gradient.register_fake
def _(query: Tensor, norms: Tensor, pooled_query: Tensor, score_gradient: Tensor) -> Tensor:
    return torch.empty_like(query)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, bias, real, _, activation = inputs
    pooled, total, *sums = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*sums)
    ctx.save_for_backward(x, weight, real, pooled, total, *sums)
    ctx.activation, ctx.has_bias = activation, bias is not None


def _backward(ctx, pooled_gradient, total_gradient, *_):  # type: ignore[no-untyped-def]
    if torch.is_grad_enabled():  # create_graph=True: what is saved carries no graph, so the result would be wrong
        raise NotImplementedError(
            "infvit::linear_pool is differentiated once; for second derivatives and torch.func set `fused = False` "
            "on the LinearInfSA modules, or TIMM_FUSED_ATTN=0 before the model is built."
        )
    x, weight, real, pooled, total, query, norms, pooled_query, scores = ctx.saved_tensors
    if pooled_gradient is None:
        pooled_gradient = torch.zeros_like(pooled)
    weights = activate(scores, ctx.activation, real)
    weight_sum = denominator(weights.sum(1, keepdim=True))
    grad = x.to(pooled.dtype) @ pooled_gradient.transpose(1, 2)
    inner = (pooled_gradient * pooled).sum(-1)
    if total_gradient is not None:
        grad = grad + total_gradient[:, None]
        inner = inner + total_gradient * total
    grad = activate_backward((grad - inner[:, None]) / weight_sum, scores, ctx.activation, real)
    query_gradient = _query_gradient(query, norms, pooled_query, grad).flatten(0, 1)
    x_gradient = weight_gradient = bias_gradient = None
    if ctx.needs_input_grad[0]:
        x_gradient = ((weights / weight_sum) @ pooled_gradient).to(x.dtype)
        x_gradient = torch.addmm(x_gradient.flatten(0, 1), query_gradient, weight).view_as(x)
    if ctx.needs_input_grad[1]:
        weight_gradient = query_gradient.T @ x.flatten(0, 1)
    if ctx.has_bias and ctx.needs_input_grad[2]:
        bias_gradient = query_gradient.sum(0)
    return x_gradient, weight_gradient, bias_gradient, None, None, None


@register_flop_formula(torch.ops.infvit.linear_pool_query_gradient)
def _gradient_flops(query: Any, *_: Any, **__: Any) -> int:
    """The sum of ds q, and q . dqbar."""
    batch, tokens, width = query
    return 4 * batch * tokens * width


_forward.register_autograd(_backward, setup_context=_save)


def linear_pool(
    x: Tensor, weight: Tensor, bias: Tensor | None, real: Tensor | None, heads: int, activation: str
) -> tuple[Tensor, Tensor]:
    """Pools tokens by Linear InfSA with the keys tied to the queries.

    Args:
        x: tokens, (B, N, C), zero where padded.
        weight: the query projection, (C, C), in the dtype of the tokens.
        bias: its bias, (C,).
        real: True where a token is not padded, (B, N).
        heads: number of heads H.
        activation: phi: relu, gelu or abs.

    Returns:
        The pooled tokens, (B, H, C), and the sums of their weights, (B, H); in at least float32.
    """
    pooled, total, *_ = _forward(x, weight, bias, real, heads, activation)
    return pooled, total
