"""Triton kernels of `infvit::linear_pool`: what `torch_forward` and `torch_query_gradient` compute, in fewer passes.

Forward, two kernels: the query projection with the norms and the norm-weighted sum of its output as its epilogue, then
scores and pooled tokens in one pass over X. The second takes the scores from X and the H vectors W_h^T qbar_h and never
reads q: q_j . qbar_h = x_j . (W_h^T qbar_h) + b_h . qbar_h. Backward, two kernels over q; products with whole matrices
are left to torch. Every sum over tokens is taken in parts, one a program, which torch adds up in a fixed order: no
atomics, the same bits at every call. Sums are float32.

Tiles need powers of two: a head of D channels takes `LANES` >= D lanes, and channels are padded to `CHANNELS` >= C.
f and W_h^T qbar_h are divided by their largest entry (per tile and per head) before they enter a product in half
precision, so that neither overflows.

Not yet run on a GPU, tile sizes not tuned: docs/performance.md says what was checked.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from infvit.attention.kernels.linear_pool import EPS, Sums, denominator

ACTIVATION = {"relu": 0, "gelu": 1, "abs": 2}


@triton.jit
def _query_kernel(
    x, weight, bias, real, query, norms, pooled, totals, tokens, width, dim, heads, tiles,
    HAS_BIAS: tl.constexpr, HAS_REAL: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr,
    STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q = X W^T + b of a tile of tokens and heads, ||q||, and the tile's sums of ||q|| q and of ||q||."""
    tile, group, image = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    lane = tl.arange(0, HEADS * LANES)
    head, channel = group * HEADS + lane // LANES, lane % LANES
    used = (head < heads) & (channel < dim)
    row = head * dim + channel
    at = image * tokens + token
    result = tl.zeros((TOKENS, HEADS * LANES), dtype=tl.float32)
    for start in range(0, width, STEP):
        column = start + tl.arange(0, STEP)
        known = column < width
        xs = tl.load(x + at[:, None] * width + column[None, :], mask=inside[:, None] & known[None, :], other=0.0)
        ws = tl.load(weight + row[None, :] * width + column[:, None], mask=used[None, :] & known[:, None], other=0.0)
        result = tl.dot(xs, ws, result, input_precision=PRECISION)
    if HAS_BIAS:
        result += tl.load(bias + row, mask=used, other=0.0).to(tl.float32)[None, :]
    keep = inside
    if HAS_REAL:
        keep = keep & (tl.load(real + at, mask=inside, other=0) != 0)
    rounded = tl.where(keep[:, None] & used[None, :], result, 0.0).to(query.dtype.element_ty)
    tl.store(query + at[:, None] * width + row[None, :], rounded, mask=inside[:, None] & used[None, :])
    q = tl.reshape(rounded.to(tl.float32), (TOKENS, HEADS, LANES))
    norm = tl.sqrt(tl.sum(q * q, 2))
    heads_here = group * HEADS + tl.arange(0, HEADS)
    tl.store(norms + at[:, None] * heads + heads_here[None, :], norm,
             mask=inside[:, None] & (heads_here < heads)[None, :])  # fmt: skip
    part = (image * tiles + tile) * heads + heads_here
    tl.store(totals + part, tl.sum(norm, 0), mask=heads_here < heads)
    channels = tl.arange(0, LANES)
    tl.store(pooled + part[:, None] * dim + channels[None, :], tl.sum(q * norm[:, :, None], 0),
             mask=(heads_here < heads)[:, None] & (channels < dim)[None, :])  # fmt: skip


@triton.jit
def _phi(s, ACTIVATION: tl.constexpr):
    if ACTIVATION == 0:
        f = tl.where(s < 0, 0.0, s)  # not `maximum`, which may hide NaN
    elif ACTIVATION == 1:
        f = 0.5 * s * (1.0 + tl.erf(s * 0.7071067811865476))
    else:
        f = tl.abs(s)
    return f


@triton.jit
def _pool_kernel(
    x, vectors, sizes, shifts, real, scores, pooled, totals, tokens, width, heads, parts, tiles_a_part,
    HAS_REAL: tl.constexpr, ACTIVATION: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    CHANNELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """s = X u + shift, f = phi(s), and the part's sums of f x and of f: each tile of X is loaded once."""
    group, part, image = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = group * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, CHANNELS)
    known, known_head = channel < width, head < heads
    us = tl.load(vectors + (image * heads + head)[None, :] * width + channel[:, None],
                 mask=known_head[None, :] & known[:, None], other=0.0)  # fmt: skip
    size = tl.load(sizes + image * heads + head, mask=known_head, other=0.0)
    shift = tl.load(shifts + image * heads + head, mask=known_head, other=0.0)
    result = tl.zeros((HEADS, CHANNELS), dtype=tl.float32)
    total = tl.zeros((HEADS,), dtype=tl.float32)
    for tile in range(part * tiles_a_part, (part + 1) * tiles_a_part):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        inside = token < tokens
        at = image * tokens + token
        xs = tl.load(x + at[:, None] * width + channel[None, :], mask=inside[:, None] & known[None, :], other=0.0)
        s = tl.dot(xs, us, input_precision=PRECISION) * size[None, :] + shift[None, :]
        keep = inside
        if HAS_REAL:
            keep = keep & (tl.load(real + at, mask=inside, other=0) != 0)
        s = tl.where(keep[:, None], s, 0.0)
        tl.store(scores + at[:, None] * heads + head[None, :], s, mask=inside[:, None] & known_head[None, :])
        f = tl.where(keep[:, None], _phi(s, ACTIVATION), 0.0)
        total += tl.sum(f, 0)
        largest = tl.max(tl.abs(f), 0)
        largest = tl.where(largest > 0, largest, 1.0)  # of zeros, and of NaN, which stays in f
        f = (f / largest[None, :]).to(xs.dtype)
        result += tl.dot(tl.trans(f), xs, input_precision=PRECISION) * largest[:, None]
    at_part = (image * parts + part) * heads + head
    tl.store(totals + at_part, total, mask=known_head)
    tl.store(pooled + at_part[:, None] * width + channel[None, :], result, mask=known_head[:, None] & known[None, :])


@triton.jit
def _pooled_gradient_kernel(
    query, gradients, pooled, tokens, width, dim, heads, parts, tiles_a_part,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The part's sum of ds q over its tokens."""
    group, part, image = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, channel = group * HEADS + tl.arange(0, HEADS), tl.arange(0, LANES)
    used = (head < heads)[:, None] & (channel < dim)[None, :]
    row = head[:, None] * dim + channel[None, :]
    result = tl.zeros((HEADS, LANES), dtype=tl.float32)
    for tile in range(part * tiles_a_part, (part + 1) * tiles_a_part):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        inside = token < tokens
        at = image * tokens + token
        q = tl.load(query + at[:, None, None] * width + row[None], mask=inside[:, None, None] & used[None], other=0.0)
        ds = tl.load(gradients + at[:, None] * heads + head[None, :],
                     mask=inside[:, None] & (head < heads)[None, :], other=0.0)  # fmt: skip
        result += tl.sum(ds[:, :, None] * q.to(tl.float32), 0)
    tl.store(pooled + (image * parts + part) * heads * dim + row, result, mask=used)


@triton.jit
def _query_gradient_kernel(
    query, norms, pooled_query, gradients, pooled_gradient, constants, sums, out, tokens, width, dim, heads, scale,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """dq = scale (ds qbar + (n / T) dqbar + dn q / ||q||) with dn = (scale q . dqbar - qbar . dqbar) / T."""
    tile, group, image = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, channel = group * HEADS + tl.arange(0, HEADS), tl.arange(0, LANES)
    known = head < heads
    used = known[:, None] & (channel < dim)[None, :]
    row = head[:, None] * dim + channel[None, :]
    small = image * heads + head
    qbar = tl.load(pooled_query + image * width + row, mask=used, other=0.0)
    dqbar = tl.load(pooled_gradient + image * width + row, mask=used, other=0.0)
    constant = tl.load(constants + small, mask=known, other=0.0)
    total = tl.load(sums + small, mask=known, other=1.0)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    at = image * tokens + token
    here, where = inside[:, None] & known[None, :], at[:, None] * heads + head[None, :]
    ds, norm = tl.load(gradients + where, mask=here, other=0.0), tl.load(norms + where, mask=here, other=0.0)
    place, mask = at[:, None, None] * width + row[None], inside[:, None, None] & used[None]
    q = tl.load(query + place, mask=mask, other=0.0).to(tl.float32)
    turn = (scale * tl.sum(q * dqbar[None], 2) - constant[None, :]) / total[None, :]
    turn = tl.where(norm == 0, 0.0, turn * scale / tl.where(norm == 0, 1.0, norm))
    dq = ds[:, :, None] * qbar[None] + (norm / total[None, :])[:, :, None] * dqbar[None] + turn[:, :, None] * q
    tl.store(out + place, (scale * dq).to(out.dtype.element_ty), mask=mask)


def _precision(x: Tensor) -> str:
    """Returns how float32 matrices are multiplied: as torch is told to. Half precision ignores it."""
    return "tf32" if x.is_cuda and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _parts(tokens: int, tile: int, programs: int) -> tuple[int, int]:
    """Returns into how many parts tokens are cut, and how many tiles a part has; about 512 programs in all."""
    tiles = triton.cdiv(tokens, tile)
    parts = max(1, min(tiles, 512 // max(1, programs)))
    tiles_a_part = triton.cdiv(tiles, parts)
    return triton.cdiv(tiles, tiles_a_part), tiles_a_part


def _head_tile(heads: int, dim: int) -> dict[str, int]:
    """Returns lanes of a head and heads of a tile; in all 16 lanes, which a product needs, to 128, or one head's."""
    lanes = triton.next_power_of_2(dim)
    return {"HEADS": max(1, 16 // lanes, min(triton.next_power_of_2(heads), 128 // lanes)), "LANES": lanes}


def triton_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, real: Tensor | None, heads: int, activation: str
) -> tuple[Tensor, Tensor, Sums]:
    """As `linear_pool.torch_forward`."""
    batch, tokens, width = x.shape
    dim = width // heads
    scale = dim**-0.5
    x, weight = x.contiguous(), weight.contiguous()
    mask = x if real is None else real.contiguous()

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return x.new_empty(shape, dtype=dtype)

    options: dict[str, Any] = {"HAS_REAL": real is not None, "PRECISION": _precision(x)}
    tile = _head_tile(heads, dim)
    rows, step = 128, 64 if x.element_size() == 2 else 32
    tiles = triton.cdiv(tokens, rows)
    query, norms = empty(batch, tokens, width, dtype=x.dtype), empty(batch, tokens, heads)
    sums, totals = empty(batch, tiles, heads, dim), empty(batch, tiles, heads)
    _query_kernel[(tiles, triton.cdiv(heads, tile["HEADS"]), batch)](
        x, weight, x if bias is None else bias, mask, query, norms, sums, totals, tokens, width, dim, heads, tiles,
        HAS_BIAS=bias is not None, TOKENS=rows, STEP=step, num_warps=8, **tile, **options,
    )  # fmt: skip
    norms *= scale
    pooled_query = scale**2 * sums.sum(1) / (scale * totals.sum(1) + EPS)[..., None]

    by_head = weight.float().unflatten(0, (heads, dim))
    vectors = scale * torch.einsum("bhd,hdc->bhc", pooled_query, by_head).contiguous()
    sizes = vectors.abs().amax(-1)
    sizes = (
        torch.where(sizes > 0, sizes, torch.ones_like(sizes)) if x.dtype != torch.float32 else torch.ones_like(sizes)
    )
    shifts = torch.zeros_like(sizes) if bias is None else scale * (pooled_query * bias.float().view(heads, dim)).sum(-1)
    group = 16  # the least that a product takes; more, or tiles in flight, overfill the shared memory at width 1024
    groups = triton.cdiv(heads, group)
    block = 32 if x.element_size() == 2 else 16
    parts, tiles_a_part = _parts(tokens, block, batch * groups)
    scores, sums, totals = empty(batch, tokens, heads), empty(batch, parts, heads, width), empty(batch, parts, heads)
    _pool_kernel[(groups, parts, batch)](
        x, (vectors / sizes[..., None]).to(x.dtype), sizes, shifts, mask, scores, sums, totals, tokens, width, heads,
        parts, tiles_a_part, ACTIVATION=ACTIVATION[activation], TOKENS=block, HEADS=group,
        CHANNELS=max(16, triton.next_power_of_2(width)), num_warps=8, num_stages=1, **options,
    )  # fmt: skip
    divisor = denominator(totals.sum(1))
    return sums.sum(1) / divisor[..., None], totals.sum(1) / divisor, Sums(query, norms, pooled_query, scores)


def triton_query_gradient(query: Tensor, norms: Tensor, pooled_query: Tensor, score_gradient: Tensor) -> Tensor:
    """As `linear_pool.torch_query_gradient`."""
    batch, tokens, width = query.shape
    heads, dim = pooled_query.shape[1:]
    scale = dim**-0.5
    query, norms, score_gradient = query.contiguous(), norms.contiguous(), score_gradient.contiguous()
    tile = _head_tile(heads, dim)
    groups = triton.cdiv(heads, tile["HEADS"])
    parts, tiles_a_part = _parts(tokens, 32, batch * groups)
    sums = query.new_empty(batch, parts, heads, dim, dtype=torch.float32)
    _pooled_gradient_kernel[(groups, parts, batch)](
        query, score_gradient, sums, tokens, width, dim, heads, parts, tiles_a_part, TOKENS=32, **tile
    )
    gradient = scale * sums.sum(1)
    out = torch.empty_like(query)
    _query_gradient_kernel[(triton.cdiv(tokens, 32), groups, batch)](
        query, norms, pooled_query.contiguous(), score_gradient, gradient, (pooled_query * gradient).sum(-1),
        norms.sum(1) + EPS, out, tokens, width, dim, heads, scale, TOKENS=32, **tile,
    )  # fmt: skip
    return out
