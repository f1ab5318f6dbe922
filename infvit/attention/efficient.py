"""Efficient Attention: two softmaxes, of the queries and of the keys (Shen et al., arXiv 1812.01243, eqs. 3 and 5)."""

from typing import Any

from torch import Tensor

from infvit.attention.factored import FactoredAttention, softmax_over_tokens
from infvit.attention.mechanism import Capabilities, Mask


class EfficientAttention(FactoredAttention):
    """`softmax_channels(Q) (softmax_tokens(K)^T V)`.

    Each channel of the keys is one map over all tokens (a "context"), each query a mixture of those maps. Both factors
    have rows that sum to 1, and so has their product. Neither queries nor keys are scaled, as published.
    """

    name = "efficient"
    capabilities = Capabilities(
        padding=True, cross=True, permutation_equivariant=True, matrix=True, token_map=True, any_length=True
    )

    def macs(self, tokens: int) -> int:
        return 2 * tokens * self.num_heads * self.head_dim**2

    def factors(self, q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        return q.softmax(-1), softmax_over_tokens(k.transpose(-2, -1), mask.keys)

    @staticmethod
    def reference(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        q, k = q.exp(), k.exp()
        return (q / q.sum(-1, keepdim=True)) @ (k / k.sum(-2, keepdim=True)).mT @ v
