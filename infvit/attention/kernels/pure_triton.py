"""Pure InfSA as Triton kernels: the scores live in registers and never reach memory.

Three kernels: the output, the gradient of q (one program per tile of queries), the gradients of k and v (one per tile
of keys). Every sum is made by one program in a fixed order, without atomics, so that results repeat bit by bit. All
accumulators are float32. Rows beyond the end are loaded as 0, and phi(0) = 0, so that they contribute to nothing.

Half precision: bfloat16 has float32's range and its factors are only rounded. The range of float16 is too small for
scores and for gradients divided by a norm over thousands of tokens; there each row of a factor is divided by its
largest magnitude before rounding, and the product multiplied by it afterwards (`_dot`).

With TRITON_INTERPRET=1 in the environment the kernels run on the CPU, as in tests/kernels.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"
# The arguments of a kernel are addresses and numbers; Triton has no types for them.

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LAUNCH = {"num_warps": 4, "num_stages": 2}


@triton.jit
def _load(x, head, heads, rows, channels, stride_batch, stride_head, stride_row, num_rows, num_channels):
    """Loads a tile (rows, channels) of one head of one sample; 0 beyond the ends."""
    start = x + (head // heads) * stride_batch + (head % heads) * stride_head
    inside = (rows < num_rows)[:, None] & (channels < num_channels)[None, :]
    return tl.load(start + rows.to(tl.int64)[:, None] * stride_row + channels[None, :], mask=inside, other=0.0)


@triton.jit
def _store(x, tile, head, rows, channels, num_rows, num_channels):
    """Stores a tile (rows, channels) of one head into contiguous memory."""
    inside = (rows < num_rows)[:, None] & (channels < num_channels)[None, :]
    where = (head * num_rows + rows.to(tl.int64)[:, None]) * num_channels + channels[None, :]
    tl.store(x + where, tile.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _phi(scores, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        result = tl.where(scores <= 0, 0.0, scores)  # NaN stays NaN, unlike with tl.maximum
    elif ACTIVATION == "gelu":
        result = 0.5 * scores * (1 + tl.erf(scores * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "abs")
        result = tl.abs(scores)
    return result


@triton.jit
def _slope(scores, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        result = tl.where(scores <= 0, 0.0, 1.0)
    elif ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * scores * scores)
        result = 0.5 * (1 + tl.erf(scores * 0.7071067811865476)) + scores * density
    else:
        tl.static_assert(ACTIVATION == "abs")
        result = tl.where(scores > 0, 1.0, 0.0) - tl.where(scores < 0, 1.0, 0.0)
    return result


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr, FLOAT16: tl.constexpr):
    """a @ b for a float32 tile `a` and a tile `b` in the dtype of the input."""
    if FLOAT16:
        peak = tl.max(tl.abs(a), 1)[:, None]
        peak = tl.where(peak > 0, peak, 1.0)
        product = tl.dot((a / peak).to(b.dtype), b) * peak
    else:
        product = tl.dot(a.to(b.dtype), b, input_precision=PRECISION)
    return product


@triton.jit
def _forward(
    q, k, v, product, squares,
    heads, num_queries, num_keys, dim, value_dim, scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    ACTIVATION: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, FLOAT16: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """phi(S) V and the square sum of each row, for one tile of queries."""
    tiles = tl.cdiv(num_queries, ROWS)
    tile, head = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    rows = tile * ROWS + tl.arange(0, ROWS)
    d, e = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
    q_tile = _load(q, head, heads, rows, d, q_batch, q_head, q_row, num_queries, dim)
    acc = tl.zeros((ROWS, VALUE_DIM), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    end = tl.minimum(num_keys, (tile + 1) * ROWS) if CAUSAL else num_keys
    for start in range(0, end, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        k_tile = _load(k, head, heads, columns, d, k_batch, k_head, k_row, num_keys, dim)
        v_tile = _load(v, head, heads, columns, e, v_batch, v_head, v_row, num_keys, value_dim)
        phi = _phi(tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale, ACTIVATION)
        if CAUSAL:
            phi = tl.where(rows[:, None] >= columns[None, :], phi, 0.0)
        total += tl.sum(phi * phi, 1)
        acc += _dot(phi, v_tile, PRECISION, FLOAT16)
    _store(product, acc, head, rows, e, num_queries, value_dim)
    tl.store(squares + head * num_queries + rows, total, mask=rows < num_queries)


@triton.jit
def _backward_q(
    q, k, v, grad, divisor, tail, dq,
    heads, num_queries, num_keys, dim, value_dim, scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    ACTIVATION: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, FLOAT16: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of queries."""
    tiles = tl.cdiv(num_queries, ROWS)
    tile, head = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    rows = tile * ROWS + tl.arange(0, ROWS)
    d, e = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
    q_tile = _load(q, head, heads, rows, d, q_batch, q_head, q_row, num_queries, dim)
    g_tile = _load(grad, head, heads, rows, e, g_batch, g_head, g_row, num_queries, value_dim)
    div = tl.load(divisor + head * num_queries + rows, mask=rows < num_queries, other=1.0)[:, None]
    sub = tl.load(tail + head * num_queries + rows, mask=rows < num_queries, other=0.0)[:, None]
    acc = tl.zeros((ROWS, DIM), tl.float32)
    end = tl.minimum(num_keys, (tile + 1) * ROWS) if CAUSAL else num_keys
    for start in range(0, end, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        k_tile = _load(k, head, heads, columns, d, k_batch, k_head, k_row, num_keys, dim)
        v_tile = _load(v, head, heads, columns, e, v_batch, v_head, v_row, num_keys, value_dim)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
        dphi = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION) / div - sub * _phi(scores, ACTIVATION)
        dscores = dphi * _slope(scores, ACTIVATION)
        if CAUSAL:
            dscores = tl.where(rows[:, None] >= columns[None, :], dscores, 0.0)
        acc += _dot(dscores, k_tile, PRECISION, FLOAT16)
    _store(dq, acc * scale, head, rows, d, num_queries, dim)


@triton.jit
def _backward_kv(
    q, k, v, grad, divisor, tail, dk, dv,
    heads, num_queries, num_keys, dim, value_dim, scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    ACTIVATION: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, FLOAT16: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of keys and of its values."""
    tiles = tl.cdiv(num_keys, COLUMNS)
    tile, head = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    d, e = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
    k_tile = _load(k, head, heads, columns, d, k_batch, k_head, k_row, num_keys, dim)
    v_tile = _load(v, head, heads, columns, e, v_batch, v_head, v_row, num_keys, value_dim)
    acc_k = tl.zeros((COLUMNS, DIM), tl.float32)
    acc_v = tl.zeros((COLUMNS, VALUE_DIM), tl.float32)
    begin = (tile * COLUMNS // ROWS) * ROWS if CAUSAL else 0
    for start in range(begin, num_queries, ROWS):
        rows = start + tl.arange(0, ROWS)
        q_tile = _load(q, head, heads, rows, d, q_batch, q_head, q_row, num_queries, dim)
        g_tile = _load(grad, head, heads, rows, e, g_batch, g_head, g_row, num_queries, value_dim)
        div = tl.load(divisor + head * num_queries + rows, mask=rows < num_queries, other=1.0)[:, None]
        sub = tl.load(tail + head * num_queries + rows, mask=rows < num_queries, other=0.0)[:, None]
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
        phi = _phi(scores, ACTIVATION)
        dphi = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION) / div - sub * phi
        dscores = dphi * _slope(scores, ACTIVATION)
        if CAUSAL:
            phi = tl.where(rows[:, None] >= columns[None, :], phi, 0.0)
            dscores = tl.where(rows[:, None] >= columns[None, :], dscores, 0.0)
        acc_k += _dot(tl.trans(dscores), q_tile, PRECISION, FLOAT16)
        acc_v += _dot(tl.trans(phi / div), g_tile, PRECISION, FLOAT16)
    _store(dk, acc_k * scale, head, columns, d, num_keys, dim)
    _store(dv, acc_v, head, columns, e, num_keys, value_dim)


def forward(q: Tensor, k: Tensor, v: Tensor, activation: str, causal: bool) -> tuple[Tensor, Tensor]:
    """Computes `phi(S) V` and the sum of squares of each row of `phi(S)`, with `S = q k^T / D`.

    Args:
        q: queries, (B, H, M, D), D <= 128; float32, float16 or bfloat16 like k and v.
        k: keys, (B, H, N, D).
        v: values, (B, H, N, E), E <= 128.
        activation: name of phi.
        causal: phi(S) is zero above the diagonal.

    Returns:
        (B, H, M, E) and (B, H, M), both float32.
    """
    q, k, v = (_with_adjacent_channels(x) for x in (q, k, v))
    product = q.new_empty(*q.shape[:3], v.shape[-1], dtype=torch.float32)
    squares = q.new_empty(q.shape[:3], dtype=torch.float32)
    options = _options(q, v, activation, causal)
    _launch(_forward, _programs(q, options["ROWS"]), q, k, v, product, squares, *_sizes(q, k, v), **options)
    return product, squares


def backward(
    grad: Tensor, divisor: Tensor, tail: Tensor, q: Tensor, k: Tensor, v: Tensor, activation: str, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of q, k and v; with `T` as `tail`,

        dphi = grad v^T / divisor - T phi(S);  dS = dphi * phi'(S);
        dq = dS k / D;  dk = dS^T q / D;  dv = (phi(S) / divisor)^T grad.

    Args:
        grad: gradient of the output, (B, H, M, E).
        divisor: each row's norm + eps, (B, H, M), float32, contiguous.
        tail: what each row's phi(S) is subtracted with, on account of the norm, (B, H, M), float32, contiguous.
        q: as in `forward`, like all that follow.

    Returns:
        The gradients in the shapes and the dtype of q, k and v.
    """
    grad, q, k, v = (_with_adjacent_channels(x) for x in (grad, q, k, v))
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    options = _options(q, v, activation, causal)
    given, sizes = (q, k, v, grad, divisor, tail), (*_sizes(q, k, v), *grad.stride()[:3])
    _launch(_backward_q, _programs(q, options["ROWS"]), *given, dq, *sizes, **options)
    _launch(_backward_kv, _programs(k, options["COLUMNS"]), *given, dk, dv, *sizes, **options)
    return dq, dk, dv


def _with_adjacent_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int | float, ...]:
    (_, heads, queries, dim), (keys, value_dim) = q.shape, v.shape[2:]
    strides = (step for x in (q, k, v) for step in x.stride()[:3])
    return heads, queries, keys, dim, value_dim, 1 / dim, *strides


def _programs(x: Tensor, rows: int) -> int:
    return x.shape[0] * x.shape[1] * triton.cdiv(x.shape[2], rows)


def _options(q: Tensor, v: Tensor, activation: str, causal: bool) -> dict[str, Any]:
    """Returns the compile-time arguments. Tiles fit into 99 KB of shared memory, the smallest there is from 8.0 on."""
    dim, value_dim = (max(16, triton.next_power_of_2(x.shape[-1])) for x in (q, v))
    large = max(dim, value_dim) * q.element_size() > 128  # bytes of a row
    return {
        "ACTIVATION": activation,
        "CAUSAL": causal,
        "PRECISION": "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee",
        "FLOAT16": q.dtype == torch.float16,
        "ROWS": 32 if large else 64,
        "COLUMNS": 32 if large else 64,
        "DIM": dim,
        "VALUE_DIM": value_dim,
    }


def _launch(kernel: Any, programs: int, q: Tensor, *args: Any, **options: Any) -> None:
    if programs == 0:
        return
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():  # Triton launches on the current device
        kernel[(programs,)](q, *args, **options, **LAUNCH)
