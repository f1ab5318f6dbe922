"""Linear InfSA: one pooled query, one weight per token, one output for all tokens (arXiv 2603.00175)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from infvit.attention.infsa import EPS, InfSA, get_activation
from infvit.attention.kernels.linear_pool import linear_pool
from infvit.attention.mechanism import (
    NO_MASK,
    Capabilities,
    Mask,
    Projections,
    beyond_operators,
    full_precision,
    zero_padded,
)


def normalised(weights: Tensor, dim: int) -> Tensor:
    """Divides weights by their sum along `dim`, moved away from 0 by eps in the direction of its sign.

    A signed activation lets the sum cross 0; eps must never cancel it.
    """
    total = weights.sum(dim, keepdim=True)
    return weights / torch.where(total < 0, total - EPS, total + EPS)


def pooled_query(q: Tensor) -> Tensor:
    """Computes `qbar = sum_i alpha_i q_i` with `alpha_i = ||q_i|| / (sum_t ||q_t|| + eps)`.

    Args:
        q: queries, (B, H, N, D), scaled; zero where padded, so that padded tokens are in none of the sums.

    Returns:
        The pooled query, (B, H, 1, D).
    """
    norms = torch.linalg.vector_norm(q, dim=-1)
    return normalised(norms, -1)[..., None, :] @ q


def causal_linear_matrix(q: Tensor, k: Tensor, phi: Callable[[Tensor], Tensor], mask: Mask) -> Tensor:
    """Computes the weights of every prefix: row i is what the non-causal function gives on tokens 0..i.

    Exact, and therefore quadratic in the number of tokens.

    Returns:
        Weights, (B, H, M, N): zero above the diagonal, or over all keys where the mask is not causal but `ordered`.
    """
    norms = torch.linalg.vector_norm(q, dim=-1, keepdim=True)
    pooled = (norms * q).cumsum(-2) / (norms.cumsum(-2) + EPS)
    allowed = mask.allowed(q.shape[-2], k.shape[-2], q.device)
    scores = phi(pooled @ k.transpose(-2, -1))
    if allowed is not None:
        scores = torch.where(allowed, scores, scores.new_zeros(()))
    return normalised(scores, -1)


def linear_infsa_weights(q: Tensor, k: Tensor, phi: Callable[[Tensor], Tensor], mask: Mask) -> Tensor:
    """Computes a, the weights of the keys.

    Args:
        q: queries, (B, H, M, D), scaled by 1 / sqrt(D), zero where padded.
        k: keys, (B, H, N, D), scaled by 1 / sqrt(D).
        phi: activation, elementwise.
        mask: padding; causal or ordered.

    Returns:
        Weights, (B, H, 1, N), the same for all queries; (B, H, M, N) under a causal mask or ordered queries.
    """
    if mask.causal or mask.ordered:
        return causal_linear_matrix(q, k, phi, mask)
    scores = phi(pooled_query(q) @ k.transpose(-2, -1))
    if mask.keys is not None:
        # A zeroed key scores phi(0) = 0 with all our activations; selecting does not rely on that.
        scores = torch.where(mask.keys[:, None, None, :], scores, scores.new_zeros(()))
    return normalised(scores, -1)


def linear_infsa(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask = NO_MASK, *, activation: str = "relu", dropout: float = 0.0
) -> Tensor:
    """Computes `sum_j a_j v_j` for every query; gamma is left to the caller.

    Args:
        q: queries, (B, H, M, D), not scaled.
        k: keys, (B, H, N, D), not scaled.
        v: values, (B, H, N, E).
        mask: padding; causal or ordered.
        activation: phi: relu, gelu or abs.
        dropout: probability with which a weight is dropped.

    Returns:
        The output, (B, H, M, E), in the dtype of v. Zero at padded queries. Sums are made in at least float32.
    """
    scale = q.shape[-1] ** -0.5
    q, k, values = zero_padded(q, mask.queries), zero_padded(k, mask.keys), zero_padded(v, mask.keys)
    with full_precision(v) as compute:
        q, k = q.to(compute) * scale, k.to(compute) * scale
        weights = F.dropout(linear_infsa_weights(q, k, get_activation(activation), mask), dropout)
        out = (weights @ values.to(compute)).expand(-1, -1, q.shape[-2], -1)
    return zero_padded(out.to(v.dtype), mask.queries)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which a matrix product of x is computed here: that of autocast where it is on."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.amp.is_autocast_available(device):
        return x.dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class LinearInfSA(InfSA):
    """Linear InfSA: `c = gamma * sum_j a_j v_j` for every token, `a_j` from one pooled query.

    O(N) time and O(D) state per head. In our models the key projection is tied to the query's (`ties_key`), as in the
    published ones. There `absorbed` computes the same function without projecting the keys and values of each token.

    With `fused` off, `absorbed` is a formula of torch's own operations, which can be differentiated twice.
    """

    name = "infsa_linear"
    capabilities = Capabilities(
        padding=True,
        causal=True,
        cross=True,
        permutation_equivariant=True,
        matrix=True,
        token_map=True,
        any_length=True,
    )
    token_maps = ("weights",)
    ties_key = True

    def macs(self, tokens: int) -> int:
        return 3 * tokens * self.num_heads * self.head_dim  # pooled query, scores, weighted values

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        dropout = self.attn_drop.p if self.training else 0.0
        return self.decay() * linear_infsa(q, k, v, mask, activation=self.activation, dropout=dropout)

    def _matrix(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        weights = linear_infsa_weights(q * self.scale, k * self.scale, self.phi, mask)
        return zero_padded((self.decay() * weights).expand(-1, -1, q.shape[-2], -1), mask.queries)

    def _token_map(self, q: Tensor, k: Tensor, mask: Mask, kind: str) -> Tensor:
        last = replace(mask, causal=False, ordered=False)  # of the last token, which sees all
        return linear_infsa_weights(q * self.scale, k * self.scale, self.phi, last)[..., 0, :]

    def absorbs(self, mask: Mask) -> bool:
        """Not under a mask other than padding, and not with dropout on the weights."""
        return not (mask.causal or mask.ordered) and mask.pairs is None and not (self.training and self.attn_drop.p > 0)

    def absorbed(self, x: Tensor, weights: Projections, mask: Mask) -> Tensor:
        """Computes the one output of all tokens from the tokens before their projection; equals `mix` up to rounding.

        Only two sums leave a head: the pooled query and the weighted values. A product with a projection matrix can
        therefore move out of the sum over tokens:

            scores_h = (X W_k^T qbar_h + b_k . qbar_h) / sqrt(D)      (keys tied to the queries: q_j . qbar_h)
            c_h      = gamma (W_v p_h + b_v sum_j a_hj),  p_h = sum_j a_hj x_j

        so that of all projections only the query's is applied to every token. With tied keys and `fused`, the sums are
        one operator (`kernels/linear_pool.py`); otherwise, and in graphs that leave this package, torch's own.
        """
        dtype = autocast_dtype(x)
        with full_precision(x) as compute:
            x, weight = x.to(dtype), weights.q.to(dtype)
            bias = None if weights.q_bias is None else weights.q_bias.to(dtype)
            leaves = torch.compiler.is_exporting() or torch.jit.is_tracing()
            if self.fused and weights.k is None and not leaves and not beyond_operators():
                pooled, total = linear_pool(x, weight, bias, mask.keys, self.num_heads, self.activation)
            else:
                pooled, total = self._pool(x.to(compute), F.linear(x, weight, bias).to(compute), weights, mask)
            c = torch.einsum("bhc,chd->bhd", pooled, self._split(weights.v.to(compute).T))
            if weights.v_bias is not None:
                c = c + total[..., None] * self._split(weights.v_bias.to(compute))
            return (self.decay()[:, 0] * c).flatten(1)[:, None]

    def _pool(self, x: Tensor, q: Tensor, weights: Projections, mask: Mask) -> tuple[Tensor, Tensor]:
        """Returns the pooled tokens p, (B, H, C), and the sums of their weights, (B, H)."""
        q = self._split(q)  # (B, N, H, D); the scale goes on the small tensors made from it
        if mask.keys is not None:
            q = torch.where(mask.keys[..., None, None], q, q.new_zeros(()))  # the bias made them non-zero
        norms = torch.linalg.vector_norm(q, dim=-1) * self.scale  # (B, N, H)
        pooled_query = torch.einsum("bnh,bnhd->bhd", normalised(norms, 1), q) * self.scale
        if weights.k is None:
            scores = torch.einsum("bnhd,bhd->bnh", q, pooled_query)
        else:
            scores = x @ torch.einsum("chd,bhd->bch", self._split(weights.k.to(x.dtype).T), pooled_query)
            if weights.k_bias is not None:
                scores = scores + (pooled_query * self._split(weights.k_bias.to(x.dtype))).sum(-1)[:, None]
        scores = self.phi(scores * self.scale)
        if mask.keys is not None:
            scores = torch.where(mask.keys[..., None], scores, scores.new_zeros(()))
        a = normalised(scores, 1)
        return a.transpose(1, 2) @ x, a.sum(1)

    def _split(self, x: Tensor) -> Tensor:
        """Views the last dimension as heads: (..., C) to (..., H, D)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim))

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
        q, k = q / q.shape[-1] ** 0.5, k / k.shape[-1] ** 0.5
        norms = q.square().sum(-1).sqrt()
        alpha = norms / (norms.sum(-1, keepdim=True) + 1e-6)
        pooled = (alpha[..., None] * q).sum(-2)
        scores = get_activation(activation)((pooled[..., None, :] * k).sum(-1))
        total = scores.sum(-1, keepdim=True)
        a = scores / torch.where(total >= 0, total + 1e-6, total - 1e-6)
        return gamma * (a[..., None] * v).sum(-2, keepdim=True).expand(-1, -1, q.shape[-2], -1)
