"""Linear Transformer: a feature map instead of the softmax (Katharopoulos et al., arXiv 2006.16236, eqs. 4 to 9)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from infvit.attention.factored import FactoredAttention
from infvit.attention.mechanism import Capabilities, Mask, zero_padded
from infvit.errors import ConfigError

CHUNK = 64


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1 (eq. 7), written so that small values keep their digits: exp(x) - 1 + 1 would lose them."""
    return F.relu(x) + x.clamp(max=0).exp()


def causal_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes `out_i = sum_{j <= i} (q_i . k_j) v_j` in O(N): the prefix sums of eqs. 8 and 9, a chunk at a time.

    Inside a chunk of C tokens the scores are formed, (C, C); what comes before it enters as one D x E state. That needs
    N C + (N / C) D E numbers; a state for each token would need N D E.

    Args:
        q: (B, H, N, D).
        k: (B, H, N, D).
        v: (B, H, N, E).

    Returns:
        (B, H, N, E).
    """
    tokens = q.shape[-2]
    q, k, v = (F.pad(x, (0, 0, 0, -tokens % CHUNK)).unflatten(-2, (-1, CHUNK)) for x in (q, k, v))
    states = (k.transpose(-2, -1) @ v).cumsum(-3)
    before = F.pad(states, (0, 0, 0, 0, 1, 0))[..., :-1, :, :]  # shifted, not subtracted: exact, and nothing leaks
    out = (q @ k.transpose(-2, -1)).tril() @ v + q @ before
    return out.flatten(-3, -2)[..., :tokens, :]


class LinearTransformer(FactoredAttention):
    """`phi(q_i) . sum_j phi(k_j) v_j^T / (phi(q_i) . sum_j phi(k_j) + eps)` with `phi(x) = elu(x) + 1`.

    Neither queries nor keys are scaled, as published. eps is not in the paper but in its authors' code: far negative
    queries make phi underflow, and then the quotient is 0/0 without it.

    Args:
        num_heads: heads H.
        head_dim: channels per head D.
        attn_drop: must be 0.
        device: device of parameters; there are none.
        dtype: dtype of parameters; there are none.
        eps: added to the denominator.
    """

    name = "linear_transformer"
    capabilities = Capabilities(
        padding=True,
        causal=True,
        cross=True,
        permutation_equivariant=True,
        matrix=True,
        token_map=True,
        any_length=True,
    )

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        attn_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(num_heads, head_dim, attn_drop, device, dtype)
        if not eps > 0:
            raise ConfigError(f"eps={eps} of {self.name} must be positive.")
        self.eps = eps

    def macs(self, tokens: int) -> int:
        return tokens * self.num_heads * self.head_dim * (2 * self.head_dim + 1)

    def factors(self, q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        q, k = elu_plus_one(q), zero_padded(elu_plus_one(k), mask.keys)  # phi of a zeroed key is 1
        total = q @ k.sum(-2)[..., None]
        return q / (total + self.eps), k.transpose(-2, -1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        if not mask.causal:
            return super().mix(q, k, v, mask)
        q, k = elu_plus_one(q), zero_padded(elu_plus_one(k), mask.keys)
        sums = causal_sums(q, k, torch.cat([v, torch.ones_like(v[..., :1])], -1))
        return sums[..., :-1] / (sums[..., -1:] + self.eps)

    def _matrix(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        if not mask.causal:
            return super()._matrix(q, k, mask)
        scores = (elu_plus_one(q) @ zero_padded(elu_plus_one(k), mask.keys).transpose(-2, -1)).tril()
        return zero_padded(scores / (scores.sum(-1, keepdim=True) + self.eps), mask.queries)

    def _token_map(self, q: Tensor, k: Tensor, mask: Mask, kind: str) -> Tensor:
        if not mask.causal:
            return super()._token_map(q, k, mask, kind)
        matrix = self._matrix(q, k, mask)
        return matrix[..., 0, :] if kind == "class_token" else matrix.sum(-2)

    @staticmethod
    def reference(q: Tensor, k: Tensor, v: Tensor, *, eps: float = 1e-6, **_: Any) -> Tensor:
        weights = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
        return weights @ v / (weights.sum(-1, keepdim=True) + eps)
