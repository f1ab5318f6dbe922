"""cosFormer: ReLU features, re-weighted by the distance of the tokens (Qin et al., arXiv 2202.08791, eqs. 8 to 12)."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from infvit.attention.factored import FactoredAttention
from infvit.attention.mechanism import Capabilities, Mask
from infvit.errors import ConfigError


class CosFormer(FactoredAttention):
    """Weights `relu(q_i) . relu(k_j) cos(pi/2 (i - j) / L)`, divided by their sum over j.

    The cosine of a difference is a sum of two products, so that each token is turned by its own angle and the sums over
    keys are taken once for all queries. i and j count the tokens as they are given: in a vision transformer the class
    token first, then the patches row by row, so that the distance is one in reading order, not in the image. Padded
    tokens are not counted. L is the number of tokens, the larger one if queries and keys differ. It is why there is no
    causal form: a prefix has another L. Neither queries nor keys are scaled, as published; a sum below eps, as where
    ReLU leaves nothing of a query, counts as eps (the authors' code).

    Args:
        num_heads: heads H.
        head_dim: channels per head D.
        attn_drop: must be 0.
        device: device of parameters; there are none.
        dtype: dtype of parameters; there are none.
        eps: least denominator.
    """

    name = "cosformer"
    capabilities = Capabilities(padding=True, cross=True, matrix=True, token_map=True, any_length=True)

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
        return 2 * tokens * self.num_heads * self.head_dim * (2 * self.head_dim + 1)

    def factors(self, q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        (q_index, q_count), (k_index, k_count) = _positions(q, mask.queries), _positions(k, mask.keys)
        quarter = math.pi / 2 / torch.maximum(q_count, k_count)
        q, k = _turned(F.relu(q), q_index * quarter), _turned(F.relu(k), k_index * quarter)
        total = q @ k.sum(-2)[..., None]
        return q / total.clamp(min=self.eps), k.transpose(-2, -1)

    @staticmethod
    def reference(q: Tensor, k: Tensor, v: Tensor, *, eps: float = 1e-6, **_: Any) -> Tensor:
        length = max(q.shape[-2], k.shape[-2])
        distance = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
        weights = F.relu(q) @ F.relu(k).mT * torch.cos(torch.pi / 2 * distance.double() / length)
        return weights @ v / weights.sum(-1, keepdim=True).clamp(min=eps)


def _positions(x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the index of every real token among the real ones, and their number, both with trailing (N, 1) axes."""
    if real is None:
        index = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None]
        return index, torch.full_like(index[:1], x.shape[-2])
    count = real.cumsum(-1)[:, None, :, None]
    return (count - 1).to(x.dtype), count[:, :, -1:].clamp(min=1).to(x.dtype)


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    """Returns (x cos, x sin): the product of two of them carries the cosine of the difference of their angles."""
    return torch.cat([x * angle.cos(), x * angle.sin()], -1)
