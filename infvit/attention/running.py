"""Pure InfSA of a causal sequence in pieces: the last tokens, after calls for the earlier ones.

Row i of causal Pure InfSA is divided by the norm of rows 0 to i. Of earlier calls that takes one number per head: their
sum of squares. Keys and values of earlier tokens, which caches of other models keep, do not hold it.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from infvit.attention.infsa import EPS
from infvit.attention.kernels.pure_op import pure_infsa_op
from infvit.attention.mechanism import Mask, full_precision, zero_padded
from infvit.attention.pure import PureInfSA, activated_scores, choose_path, safe_sqrt, without_overflow


class Piece(NamedTuple):
    """Output (B, H, M, E), running sums of squares (B, H, M) and, where asked for, the mixing matrix (B, H, M, N)."""

    out: Tensor
    squares: Tensor
    matrix: Tensor | None


def continue_pure(
    core: PureInfSA,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    past: Tensor | None = None,
    need_matrix: bool = False,
    groups: bool = False,
    window: int | None = None,
) -> Piece:
    """Mixes the values of the last M of N tokens of a causal sequence, or of groups that do not all see each other.

    Args:
        core: the mechanism.
        q: queries of the last M tokens, (B, H, M, D), not scaled.
        k: keys of all N tokens, (B, H, N, D), not scaled.
        v: values of all N tokens, (B, H, N, E).
        mask: padding and, as `pairs`, windows or several documents in one row, broadcastable to (B, H, M, N), which
            then hold the causal pattern too. A token that may see none before it begins a document with a norm of its
            own: the documents of one row do not feel each other.
        past: sum of squares of the rows before these, (B, H); None where there are none.
        need_matrix: return the mixing matrix.
        groups: `mask.pairs` says which tokens see which, not in an order, and whoever sees a token sees what that one
            sees. A row is divided by the norm of the rows of the tokens it sees, so that none is felt that is not seen.
        window: how many tokens, itself included, one may see at most. Behind padding that fills its window a token sees
            none before it, and begins no document.

    Returns:
        Output, sums of squares with which the next piece goes on, matrix.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    dropout = core.attn_drop.p if core.training else 0.0
    q, k, v = zero_padded(q, mask.queries), zero_padded(k, mask.keys), zero_padded(v, mask.keys)
    path = choose_path(q, v, mask, dropout)
    if core.path is not None and path != "plain":
        path = core.path
    matrix = None
    with full_precision(v) as compute:
        dtype = compute if core.upcasts or path == "plain" else v.dtype
        inputs = q.to(dtype), k.to(dtype), v.to(dtype)
        if path != "plain" and past is None and queries == keys and not need_matrix:
            out, norms = pure_infsa_op(*inputs, core.activation, True, path)
            squares = norms.square()
        else:
            inputs = q.to(compute), k.to(compute), v.to(compute)
            allowed = mask.allowed(queries, keys, q.device)
            if mask.pairs is None:
                seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
                allowed = seen if allowed is None else allowed & seen
            assert allowed is not None
            scores = activated_scores(inputs[0] * core.scale, inputs[1] * core.scale, core.phi, mask.bias, allowed)
            rows = scores.square().sum(-1)
            ordered = None if mask.pairs is None else allowed
            squares = _summed(allowed, rows) if groups else _running(rows, ordered, past, window)
            weights = scores / (without_overflow(safe_sqrt(squares))[..., None] + EPS)
            out = F.dropout(weights, dropout) @ inputs[2]
            matrix = core.decay() * weights if need_matrix else None
        out = (core.decay() * out).to(v.dtype)
    return Piece(zero_padded(out, mask.queries), squares, matrix)


def _running(rows: Tensor, allowed: Tensor | None, past: Tensor | None, window: int | None) -> Tensor:
    """Sums the squares of rows, (B, H, M), over each row and those before it in its document."""
    if allowed is None:
        return rows.cumsum(-1) + (0 if past is None else past[..., None])
    last = allowed.shape[-1] - allowed.shape[-2] - 1  # the key before the first row's own
    begins = allowed.any(-1) & ~allowed.tril(last).any(-1)
    if window is not None:  # where it begins one, a key within its window is hidden from it, but not from all
        of_others = allowed.any(-2, keepdim=True) & ~allowed
        begins = begins & of_others.tril(last).triu(last - window + 2).any(-1)
    document = begins.cumsum(-1)
    together = (document[..., :, None] == document[..., None, :]).tril()
    total = _summed(together, rows)
    return total if past is None else total + torch.where(document == 0, past[..., None], 0)


def _summed(chosen: Tensor, rows: Tensor) -> Tensor:
    """Sums, for each row, those of `rows`, (B, H, M), that are chosen, (..., M, M)."""
    return (chosen.to(rows.dtype) @ rows[..., None])[..., 0]
