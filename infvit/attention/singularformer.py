"""Singularformer: attention among r pseudo-tokens that each head mixes from all tokens (Wu et al., IJCAI 2023, doi
10.24963/ijcai.2023/493; the authors' code, CSUBioGroup/Singularformer, in its per-head form "l2")."""

from typing import Any

import torch
from torch import Tensor

from infvit.attention.auxiliary import AuxiliaryLoss
from infvit.attention.factored import FactoredAttention, softmax_over_tokens
from infvit.attention.mechanism import Capabilities, Mask, zero_padded
from infvit.errors import ConfigError


class Decomposition(AuxiliaryLoss):
    """`mean (U^T U)^2 + mean (V^T V)^2 + mean A` over heads and off-diagonal entries (zeros on the diagonal count).

    U and V are the factors, A the attention among pseudo-tokens: it keeps their columns orthogonal and A diagonal.
    """

    def term(self, *inputs: Tensor) -> Tensor:
        """Returns the loss of each sample, from U (B, H, N, r), V^T (B, H, r, N), both 0 where padded, and A."""
        u, v, core = inputs
        squares = (u.transpose(-2, -1) @ u).square() + (v @ v.transpose(-2, -1)).square()
        off = 1 - torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
        return ((squares + core) * off).mean((-3, -2, -1))


class Singularformer(FactoredAttention):
    """`U softmax(Q~ K~^T / sqrt(D)) V~`, with `Q~, K~, V~ = W^T (Q, K, V)` and a fourth projection P of the tokens.

    U is the softmax of P over its r channels, W that over the tokens: r pseudo-tokens, and how each token reads them.
    As columns of W sum to 1, mixing tokens before the projection of queries, keys and values, as published, is the same
    as mixing what they were projected to. What a RealFormer adds there, the scores of the layer below, is left out.

    Args:
        num_heads: heads H.
        head_dim: channels per head D.
        attn_drop: must be 0.
        device: unused, there are no parameters.
        dtype: unused.
        rank: r; None takes D, as the authors' example does.
        decomposition: weight of the loss `Decomposition`; 0: none. The authors' scripts name no value.
    """

    name = "singularformer"
    capabilities = Capabilities(
        padding=True, permutation_equivariant=True, matrix=True, token_map=True, any_length=True
    )

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        attn_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        rank: int | None = None,
        decomposition: float = 1e-3,
    ) -> None:
        super().__init__(num_heads, head_dim, attn_drop, device, dtype)
        self.extra_dim = head_dim if rank is None else rank
        if self.extra_dim < 1:
            raise ConfigError(f"rank={rank} of singularformer must be at least 1.")
        self.decomposition = Decomposition(decomposition)

    def parts(self, q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
        """Returns U, (B, H, N, r), the attention among pseudo-tokens, (B, H, r, r), and W^T, (B, H, r, N)."""
        q, p = q[..., : self.head_dim], q[..., self.head_dim :]
        pseudo = softmax_over_tokens(p.transpose(-2, -1), mask.keys)
        scores = (pseudo @ q * self.scale) @ (pseudo @ k).transpose(-2, -1)
        return p.softmax(-1), scores.softmax(-1), pseudo

    def macs(self, tokens: int) -> int:
        return self.num_heads * self.head_dim * (4 * tokens * self.extra_dim + 2 * self.extra_dim**2)

    def factors(self, q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        u, core, pseudo = self.parts(q, k, mask)
        return u @ core, pseudo

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        u, core, pseudo = self.parts(q, k, mask)
        self.decomposition(zero_padded(u, mask.keys), pseudo, core)
        return u @ (core @ (pseudo @ v))

    def reference(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        q, p = q[..., : self.head_dim], q[..., self.head_dim :].exp()
        mixed_q, mixed_k, mixed_v = ((p / p.sum(-2, keepdim=True)).mT @ x for x in (q, k, v))
        weights = (mixed_q @ mixed_k.mT / q.shape[-1] ** 0.5).exp()
        return p / p.sum(-1, keepdim=True) @ (weights / weights.sum(-1, keepdim=True) @ mixed_v)

    def extra_repr(self) -> str:
        return f"rank={self.extra_dim}"
