"""Pure InfSA: quadratic attention whose score matrix has Frobenius norm 1 (arXiv 2603.00175)."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from infvit.attention.infsa import EPS, InfSA, get_activation
from infvit.attention.kernels.pure_op import pure_infsa_op
from infvit.attention.mechanism import NO_MASK, Capabilities, Mask, beyond_operators, full_precision, zero_padded
from infvit.errors import ConfigError

PATHS = ("plain", "tiled", "triton")
TRITON = find_spec("triton") is not None
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TRITON_CHANNELS = 128


def pure_infsa_matrix(q: Tensor, k: Tensor, phi: Callable[[Tensor], Tensor], mask: Mask) -> Tensor:
    """Computes A = phi(S) / (||phi(S)||_F + eps), the normalised score matrix.

    Args:
        q: queries, (B, H, M, D), scaled by 1 / sqrt(D).
        k: keys, (B, H, N, D), scaled by 1 / sqrt(D).
        phi: activation, elementwise.
        mask: excluded pairs contribute 0 to the product and to the norm. Under a causal mask row i is divided by the
            norm of the block A[:i+1, :i+1] instead, so that no later token is felt through the norm either; so it is
            where queries are `ordered`; and by rows up to the one that `last_rows` says where `pairs` are in order.

    Returns:
        A, (B, H, M, N).
    """
    scores = activated_scores(q, k, phi, mask.bias, mask.allowed(q.shape[-2], k.shape[-2], q.device))
    return scores / (without_overflow(_norms(scores, mask)) + EPS)


def activated_scores(
    q: Tensor, k: Tensor, phi: Callable[[Tensor], Tensor], bias: Tensor | None, allowed: Tensor | None
) -> Tensor:
    """Returns phi(S), (B, H, M, N), 0 where a pair is not allowed; q and k scaled, `bias` of the logits not."""
    scores = q @ k.transpose(-2, -1)
    if bias is not None:
        scores = scores + bias.to(scores.dtype) * q.shape[-1] ** -0.5
    scores = phi(scores)
    if allowed is None:
        return scores
    # By selection: adding -inf before phi would give NaN under GELU.
    return torch.where(allowed, scores, scores.new_zeros(()))


def _norms(scores: Tensor, mask: Mask) -> Tensor:
    """Returns the norm of the whole matrix, (B, H, 1, 1), or of all rows up to and including each, (B, H, M, 1)."""
    in_order = mask.causal or mask.ordered
    if not in_order and (mask.pairs is None or mask.pairs.shape[-2] == 1):
        return torch.linalg.vector_norm(scores, dim=(-2, -1), keepdim=True)
    running = safe_sqrt(torch.linalg.vector_norm(scores, dim=-1, keepdim=True).square().cumsum(-2))
    if in_order:
        return running
    assert mask.pairs is not None
    return running.gather(-2, last_rows(mask.pairs)[..., None].expand_as(running))


def last_rows(pairs: Tensor) -> Tensor:
    """Returns up to which row the norm of each row of a mask over pairs runs.

    A row may not feel rows that see a later key than it does. They come behind it, and are left out, where the last key
    that a row sees never lies before that of an earlier row: under causal masks, whole or of blocks of tokens, of a
    prefix and what follows, of a window, or of the last queries of a sequence. Under any other mask all rows count, and
    so they do where a square mask is symmetric: it keeps tokens apart, but is in no order.

    Args:
        pairs: allowed pairs, (..., M, N).

    Returns:
        Indices, (..., M); M - 1: all rows.
    """
    rows, keys = pairs.shape[-2:]
    index = torch.arange(max(rows, keys), dtype=torch.int32, device=pairs.device)
    ends = (pairs * (index[:keys] + 1)).amax(-1)  # 0: sees no key, and adds nothing to a norm
    this, other = ends[..., None], ends[..., None, :]
    counts = (other > 0) & (other <= this)
    in_order = ~((this > 0) & (this < other)).tril(-1).any(-1).any(-1, keepdim=True)
    if rows == keys:
        in_order = in_order & (pairs != pairs.mT).any(-1).any(-1, keepdim=True)
    # By selection: a graph cannot look at values.
    return torch.where(in_order, (counts * index[:rows]).amax(-1), rows - 1).long()


def without_overflow(norms: Tensor) -> Tensor:
    """Returns norms with NaN for infinity: divided by infinity, scores that overflowed would silently become 0."""
    return norms.masked_fill(norms.isinf(), float("nan"))


def safe_sqrt(x: Tensor) -> Tensor:
    """Square root whose gradient at 0 is 0, as that of `vector_norm` is, instead of infinite. NaN stays NaN."""
    zero = x == 0
    return torch.where(zero, x.new_ones(()), x).sqrt().masked_fill(zero, 0.0)


def katz_centrality(weights: Tensor) -> Tensor:
    """Computes Katz in-centrality, e^T ((I - W)^-1 - I): the sum of W over all paths that end in a token.

    Converges without a check for W = gamma A: its spectral radius is at most ||W||_F = gamma (under a causal mask at
    most its largest diagonal entry, no more than gamma), whatever the sign of A.

    Args:
        weights: W, (..., N, N).

    Returns:
        One value per column, (..., N).
    """
    if weights.shape[-2] != weights.shape[-1]:
        raise ConfigError(
            f"Katz centrality needs as many queries as keys, got {' and '.join(map(str, weights.shape[-2:]))}."
        )
    identity = torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device)
    ones = weights.new_ones(weights.shape[:-1])
    return torch.linalg.solve((identity - weights).mT, ones) - 1


def pure_infsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = NO_MASK,
    *,
    activation: str = "relu",
    dropout: float = 0.0,
    path: str | None = None,
) -> Tensor:
    """Computes `A V`, A being the normalised score matrix of Pure InfSA; gamma is left to the caller.

    There are three ways to the same values: `plain` makes the M x N matrix; `tiled` (PyTorch, any device) and `triton`
    (CUDA) need O(M + N) memory, forward and backward, and have no second derivative.

    Args:
        q: queries, (B, H, M, D), not scaled.
        k: keys, (B, H, N, D), not scaled.
        v: values, (B, H, N, E).
        mask: which pairs take part; see `pure_infsa_matrix` for causal ones.
        activation: phi: relu, gelu or abs.
        dropout: probability with which an entry of A is dropped.
        path: plain, tiled or triton; None takes what `choose_path` says.

    Returns:
        The output, (B, H, M, E), in the dtype of v. Zero at padded queries. Sums are made in at least float32; NaN in
        a head whose norm is beyond its range.

    Raises:
        ConfigError: unknown activation or path, a path that cannot do what is asked, or shapes that do not fit.
    """
    _check_shapes(q, k, v)
    phi, scale = get_activation(activation), q.shape[-1] ** -0.5
    if path is None:
        path = choose_path(q, v, mask, dropout)
    else:
        _check_path(path, q, v, mask, dropout)
    q, k, v = zero_padded(q, mask.queries), zero_padded(k, mask.keys), zero_padded(v, mask.keys)
    dtype = v.dtype if path == "triton" else torch.promote_types(v.dtype, torch.float32)
    inputs = q.to(dtype), k.to(dtype), v.to(dtype)
    if path == "plain":
        with full_precision(v):
            weights = pure_infsa_matrix(inputs[0] * scale, inputs[1] * scale, phi, mask)
            out = F.dropout(weights, dropout) @ inputs[2]
    else:
        out, _ = pure_infsa_op(*inputs, activation, mask.causal, path)  # phi(0) = 0: padded tokens add nothing
    return zero_padded(out.to(v.dtype), mask.queries)


def choose_path(q: Tensor, v: Tensor, mask: Mask, dropout: float) -> str:
    """Returns how `pure_infsa` computes: `plain` where only that works, else `triton` where it runs, else `tiled`."""
    if dropout > 0 or _over_pairs(mask) or beyond_operators():
        return "plain"
    if torch.jit.is_tracing() or torch.onnx.is_in_onnx_export():
        return "plain"  # a file for runtimes that do not know our operator
    fits = q.dtype in TRITON_DTYPES and max(q.shape[-1], v.shape[-1]) <= TRITON_CHANNELS
    return "triton" if fits and _runs_triton(q.device) else "tiled"


@torch.compiler.assume_constant_result
def _runs_triton(device: torch.device) -> bool:
    return TRITON and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = [tuple(x.shape) for x in (q, k, v)]
    fits = all(len(shape) == 4 and shape[:2] == shapes[0][:2] for shape in shapes)
    if not fits or k.shape[2] != v.shape[2] or q.shape[3] != k.shape[3] or q.shape[3] == 0:
        raise ConfigError(f"pure_infsa takes q (B, H, M, D), k (B, H, N, D), v (B, H, N, E), D > 0; got {shapes}.")
    if not all(x.is_floating_point() for x in (q, k, v)):
        raise ConfigError(f"pure_infsa takes floating-point tensors, not {[x.dtype for x in (q, k, v)]}.")


def _over_pairs(mask: Mask) -> bool:
    return mask.pairs is not None or mask.bias is not None or mask.ordered


def _check_path(path: str, q: Tensor, v: Tensor, mask: Mask, dropout: float) -> None:
    if path not in PATHS:
        raise ConfigError(f"unknown path {path!r}; allowed: {', '.join(PATHS)}.")
    if path == "plain":
        return
    if dropout > 0 or _over_pairs(mask):
        raise ConfigError(f"path={path!r} supports neither dropout nor masks over single pairs; use path='plain'.")
    if beyond_operators():
        raise ConfigError(f"path={path!r} has no derivatives of torch.func and no forward-mode ones; use path='plain'.")
    if path == "triton" and (q.dtype not in TRITON_DTYPES or max(q.shape[-1], v.shape[-1]) > TRITON_CHANNELS):
        raise ConfigError(f"path='triton' takes up to {TRITON_CHANNELS} channels in float32, float16 or bfloat16, not "
                          f"{max(q.shape[-1], v.shape[-1])} in {q.dtype}; use path='tiled'.")  # fmt: skip
    if path == "triton" and not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(f"path='triton' needs a CUDA device, not {q.device}; use path='tiled'.")


class PureInfSA(InfSA):
    """Pure InfSA: `gamma * A V` with `A = phi(Q K^T / D) / (||phi(Q K^T / D)||_F + eps)`.

    One norm over the whole M x N matrix of a head. Depth sums over hops: every layer multiplies by gamma once.

    `path` is None after construction and can be set to one of `pure_infsa`'s: to `plain` for second derivatives, say.
    """

    name = "infsa_pure"
    capabilities = Capabilities(
        padding=True,
        causal=True,
        pairwise=True,
        bias=True,
        cross=True,
        permutation_equivariant=True,
        matrix=True,
        token_map=True,
        any_length=True,
    )
    token_maps = ("in_degree", "katz")

    path: str | None = None

    @property
    def upcasts(self) -> bool:
        """Where the Triton kernels run, half precision goes in as it is; their sums are float32."""
        return not _runs_triton(self.decay.logit.device)

    def macs(self, tokens: int) -> int:
        return 2 * tokens**2 * self.num_heads * self.head_dim

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        dropout = self.attn_drop.p if self.training else 0.0
        return self.decay() * pure_infsa(q, k, v, mask, activation=self.activation, dropout=dropout, path=self.path)

    def _matrix(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        return self.decay() * pure_infsa_matrix(q * self.scale, k * self.scale, self.phi, mask)

    def _token_map(self, q: Tensor, k: Tensor, mask: Mask, kind: str) -> Tensor:
        if kind == "katz":
            return katz_centrality(self._matrix(q, k, mask))
        return pure_infsa_matrix(q * self.scale, k * self.scale, self.phi, mask).sum(-2)

    @staticmethod
    def reference(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        gamma: float = 0.7,
        activation: str = "relu",
        **_: Any,
    ) -> Tensor:
        scores = get_activation(activation)(q @ k.mT / q.shape[-1])
        return gamma * (scores / (scores.square().sum((-2, -1), keepdim=True).sqrt() + 1e-6)) @ v
