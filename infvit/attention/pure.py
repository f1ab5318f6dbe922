"""Pure InfSA: quadratic attention whose score matrix has Frobenius norm 1 (arXiv 2603.00175)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from infvit.attention.infsa import EPS, InfSA, get_activation
from infvit.attention.mechanism import Capabilities, Mask
from infvit.errors import ConfigError


def pure_infsa_matrix(q: Tensor, k: Tensor, phi: Callable[[Tensor], Tensor], mask: Mask) -> Tensor:
    """Computes A = phi(S) / (||phi(S)||_F + eps), the normalised score matrix.

    Args:
        q: queries, (B, H, M, D), scaled by 1 / sqrt(D).
        k: keys, (B, H, N, D), scaled by 1 / sqrt(D).
        phi: activation, elementwise.
        mask: excluded pairs contribute 0 to the product and to the norm. Under a causal mask row i is divided by the
            norm of the block A[:i+1, :i+1] instead, so that no later token is felt through the norm either.

    Returns:
        A, (B, H, M, N).
    """
    scores = phi(q @ k.transpose(-2, -1))
    allowed = mask.allowed(q.shape[-2], k.shape[-2], q.device)
    if allowed is not None:
        # By selection: adding -inf before phi would give NaN under GELU.
        scores = torch.where(allowed, scores, scores.new_zeros(()))
    if mask.causal:
        # (B, H, M, 1): the norm of all rows up to and including this one.
        row_norms = torch.linalg.vector_norm(scores, dim=-1, keepdim=True)
        norm = _safe_sqrt(row_norms.square().cumsum(-2))
    else:
        norm = torch.linalg.vector_norm(scores, dim=(-2, -1), keepdim=True)
    return scores / (norm + EPS)


def _safe_sqrt(x: Tensor) -> Tensor:
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


class PureInfSA(InfSA):
    """Pure InfSA: `gamma * A V` with `A = phi(Q K^T / D) / (||phi(Q K^T / D)||_F + eps)`.

    One norm over the whole M x N matrix of a head. Depth sums over hops: every layer multiplies by gamma once.
    """

    name = "infsa_pure"
    capabilities = Capabilities(
        padding=True,
        causal=True,
        pairwise=True,
        cross=True,
        permutation_equivariant=True,
        matrix=True,
        token_map=True,
        any_length=True,
    )
    token_maps = ("in_degree", "katz")

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        weights = pure_infsa_matrix(q * self.scale, k * self.scale, self.phi, mask)
        return self.decay() * (self.attn_drop(weights) @ v)

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
