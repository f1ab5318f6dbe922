"""Pure InfSA tile by tile in PyTorch: O(N) memory on any device.

The scores are made in tiles that fit a core's cache; each is used and then overwritten by the next. There is no row
softmax, so `phi(S) V` and the squares of the norm are plain sums over tiles and nothing is rescaled on the way. What is
left is the time of the matrix products: two forward, five backward.

Notation: L heads of all samples, M queries, N keys, D channels of q and k, E of v.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


def second_level_cache() -> int:
    """Returns the bytes of a core's second-level cache; 1 MB where the system does not say (other than Linux)."""
    try:
        return 1024 * int(Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip().removesuffix("K"))
    except (OSError, ValueError):
        return 2**20


# By measurement on Zen 5 (1 MB of second-level cache a core) and Zen 3 (512 KB), see docs/performance.md: scores of
# twice that size. Larger caches were not measured.
SCORES = max(2**17, min(second_level_cache() // 2, 2**19))  # scores that are worked on at a time, per thread
TILE = (1024, SCORES // 1024)  # queries, keys: long sequences are cut into equal parts of about this size
WIDTH = 16  # keys of a tile are a multiple: products whose rows begin anywhere in memory are some 4 % slower
SCORES_OFF_CPU = 2**24


@dataclass(frozen=True)
class Activation:
    """An activation that works in given memory.

    Attributes:
        phi: `phi(scores, out=...)`.
        times_slope: `times_slope(gradient, scores)` multiplies by phi'(scores) in place; may overwrite the scores.
        in_place: phi(phi(x)) = phi(x) and phi'(phi(x)) = phi'(x), so that phi may overwrite scores of a slope to come.
    """

    phi: Callable[..., Tensor]
    times_slope: Callable[[Tensor, Tensor], Tensor]
    in_place: bool = False


ACTIVATIONS = {
    "relu": Activation(
        lambda scores, out: torch.clamp_min(scores, 0, out=out),  # NaN stays NaN
        lambda grad, scores: torch.ops.aten.threshold_backward.grad_input(grad, scores, 0, grad_input=grad),
        in_place=True,
    ),
    "gelu": Activation(
        torch.ops.aten.gelu.out,
        lambda grad, scores: torch.ops.aten.gelu_backward.grad_input(grad, scores, grad_input=grad),
    ),
    "abs": Activation(torch.abs, lambda grad, scores: grad.mul_(scores.sign_())),
}


def forward(q: Tensor, k: Tensor, v: Tensor, activation: str, causal: bool) -> tuple[Tensor, Tensor]:
    """Computes `phi(S) V` and the sum of squares of each row of `phi(S)`, with `S = q k^T / D`.

    Args:
        q: queries, (L, M, D), float32 or float64 like all others.
        k: keys, (L, N, D).
        v: values, (L, N, E).
        activation: name of phi.
        causal: phi(S) is zero above the diagonal.

    Returns:
        (L, M, E) and (L, M).
    """
    phi, scale = ACTIVATIONS[activation].phi, 1 / q.shape[-1]
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    squares = q.new_zeros(q.shape[:2])
    heads, rows, columns = tiles(q, k)
    if not columns:
        return out.zero_(), squares
    memory = _memory(q, heads, rows, columns)
    for h in heads:
        pairs = [(j.start, k[h, j].mT, v[h, j]) for j in columns]
        for i in rows:
            tile_q, target, norms = q[h, i], out[h, i], []
            product = target if target.is_contiguous() else target.new_empty(target.shape)  # bmm is slow otherwise
            for start, tile_k, tile_v in pairs:
                if causal and start >= i.stop:
                    break
                scores = _scores(memory, tile_q, tile_k, scale)
                phi(scores, out=scores)
                if causal:
                    scores.tril_(i.start - start)
                norms.append(torch.linalg.vector_norm(scores, dim=-1))
                torch.baddbmm(product, scores, tile_v, beta=int(start > 0), out=product)
            squares[h, i] = torch.stack(norms).square_().sum(0)
            if product is not target:
                target.copy_(product)
    return out, squares


def backward(
    grad: Tensor, tail: Tensor, q: Tensor, k: Tensor, v: Tensor, activation: str, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of q, k and v; with `T` as `tail`,

        dphi = grad v^T - T phi(S);  dS = dphi * phi'(S);  dq = dS k / D;  dk = dS^T q / D;  dv = phi(S)^T grad.

    Args:
        grad: gradient of the output, divided by each row's norm + eps, (L, M, E).
        tail: what each row's phi(S) is subtracted with, on account of the norm, (L, M).
        q: as in `forward`, like all that follow.

    Returns:
        The gradients in the shapes of q, k and v.
    """
    act, scale = ACTIVATIONS[activation], 1 / q.shape[-1]
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    heads, rows, columns = tiles(q, k)
    memory, memory_grad = (_memory(q, heads, rows, columns) for _ in range(2))
    memory_phi = memory if act.in_place else _memory(q, heads, rows, columns)
    for h in heads:
        sums_q = [q.new_zeros(q[h, i].shape) for i in rows]
        for j in columns:
            tile_k, tile_v = k[h, j], v[h, j]
            sum_k, sum_v = k.new_zeros(tile_k.shape), v.new_zeros(tile_v.shape)
            for i, sum_q in zip(rows, sums_q, strict=True):
                if causal and j.start >= i.stop:
                    continue
                tile_q, tile_grad = q[h, i], grad[h, i]
                scores = _scores(memory, tile_q, tile_k.mT, scale)
                phi, dphi = _tile(memory_phi, *scores.shape), _tile(memory_grad, *scores.shape)
                act.phi(scores, out=phi)
                if causal:
                    phi.tril_(i.start - j.start)
                sum_v.baddbmm_(phi.mT, tile_grad)
                torch.bmm(tile_grad, tile_v.mT, out=dphi)
                dphi.addcmul_(phi, tail[h, i, None], value=-1)
                dscores = act.times_slope(dphi, scores)
                if causal:
                    dscores.tril_(i.start - j.start)
                sum_q.baddbmm_(dscores, tile_k, alpha=scale)
                sum_k.baddbmm_(dscores.mT, tile_q, alpha=scale)
            dk[h, j], dv[h, j] = sum_k, sum_v
        for i, sum_q in zip(rows, sums_q, strict=True):
            dq[h, i] = sum_q
    return dq, dk, dv


def tiles(q: Tensor, k: Tensor) -> tuple[list[slice], list[slice], list[slice]]:
    """Cuts L heads into groups, and M queries and N keys into equal parts, so that a group of tiles fits the cache."""
    rows, columns = (
        _slices(total, -(-total // (max(1, round(total / size)) * step)) * step)
        for total, size, step in zip((q.shape[1], k.shape[1]), TILE, (1, WIDTH), strict=True)
    )
    scores = SCORES * torch.get_num_threads() if q.is_cpu else SCORES_OFF_CPU
    return _slices(q.shape[0], round(scores / (_longest(rows) * _longest(columns)))), rows, columns


def _slices(total: int, size: int) -> list[slice]:
    size = max(1, size)
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _longest(slices: list[slice]) -> int:
    return max((s.stop - s.start for s in slices), default=1)


def _memory(like: Tensor, *slices: list[slice]) -> Tensor:
    """Allocates room for the largest tile; made once, as fresh memory costs more time than the cached."""
    heads, rows, columns = map(_longest, slices)
    return like.new_empty(heads * rows * columns)


def _tile(memory: Tensor, heads: int, rows: int, columns: int) -> Tensor:
    return memory[: heads * rows * columns].view(heads, rows, columns)


def _scores(memory: Tensor, q: Tensor, k_t: Tensor, scale: float) -> Tensor:
    scores = _tile(memory, q.shape[0], q.shape[1], k_t.shape[2])
    return torch.baddbmm(scores, q, k_t, beta=0, alpha=scale, out=scores)
