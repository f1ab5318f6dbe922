"""Scaled dot-product attention with a row softmax: the baseline (Vaswani et al., arXiv 1706.03762, eq. 1)."""

from dataclasses import replace
from typing import Any

import torch
from timm.layers import use_fused_attn
from torch import Tensor
from torch.nn import functional as F

from infvit.attention.mechanism import Capabilities, Mask, Mechanism


class SoftmaxAttention(Mechanism):
    """`softmax(Q K^T / sqrt(D)) V`, through torch's fused kernel where it is available.

    `fused` is read from timm's switch at construction and can be set afterwards; both paths give the same function.
    """

    name = "softmax"
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
    token_maps = ("class_token", "in_degree")

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        attn_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, attn_drop, device, dtype)
        self.fused = use_fused_attn()

    @property
    def upcasts(self) -> bool:
        """The fused kernel takes half precision as it is and accumulates in float32 by itself."""
        return not self.fused

    def macs(self, tokens: int) -> int:
        return 2 * tokens**2 * self.num_heads * self.head_dim

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        if not self.fused:
            return self.attn_drop(self._matrix(q, k, mask)) @ v
        dropout = self.attn_drop.p if self.training else 0.0
        graph = torch.compiler.is_exporting() or torch.jit.is_tracing()  # must hold at every length
        if mask.pairs is None and q.is_cpu and not graph and k.shape[-2] < 16:
            # Rows shorter than a SIMD register: torch's CPU kernel returns 0 for NaN (pytorch#141128) unless masked.
            mask = replace(mask, pairs=torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device))
        if mask == Mask(causal=mask.causal):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=mask.causal)
        allowed, empty = _open_empty_rows(mask, q, k)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout)
        return torch.where(empty, out.new_zeros(()), out)

    def _matrix(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        scores = (q * self.scale) @ k.transpose(-2, -1)
        if mask == Mask():
            return scores.softmax(-1)
        allowed, empty = _open_empty_rows(mask, q, k)
        weights = torch.where(allowed, scores, float("-inf")).softmax(-1)
        return torch.where(empty, weights.new_zeros(()), weights)

    def _token_map(self, q: Tensor, k: Tensor, mask: Mask, kind: str) -> Tensor:
        if kind == "class_token" and mask == Mask():
            q = q[..., :1, :]  # one row instead of all of them
        matrix = self._matrix(q, k, mask)
        return matrix[..., 0, :] if kind == "class_token" else matrix.sum(-2)

    @staticmethod
    def reference(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        weights = (q @ k.mT / q.shape[-1] ** 0.5).exp()
        return weights / weights.sum(-1, keepdim=True) @ v


class UnfusedSoftmaxAttention(SoftmaxAttention):
    """The same function with the N x N matrix in memory, whatever timm's switch says."""

    name = "softmax_unfused"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        attn_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, attn_drop, device, dtype)
        self.fused = False


def _open_empty_rows(mask: Mask, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the allowed pairs, with rows that allow no key opened wide, and those rows; their output is set to 0.

    A softmax over no key at all is 0/0; opening such a row keeps NaN out of the values and the gradients.
    """
    allowed = mask.allowed(q.shape[-2], k.shape[-2], q.device)
    assert allowed is not None
    empty = ~allowed.any(-1, keepdim=True)
    return allowed | empty, empty
