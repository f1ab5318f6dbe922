"""What the mechanisms have in common whose mixing matrix is a product of two thin factors and is never formed."""

import torch
from torch import Tensor

from infvit.attention.mechanism import Mask, Mechanism, zero_padded
from infvit.errors import ConfigError


class FactoredAttention(Mechanism):
    """`output = left (right v)`: O(N) in the number of tokens. A subclass computes the `factors`.

    There are no weights between pairs of tokens to drop, and so `attn_drop` must be 0.
    """

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
        if attn_drop > 0:
            raise ConfigError(f"{self.name} has no weights between pairs of tokens to drop; attn_drop must be 0.")

    def factors(self, q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """Returns `left`, (B, H, M, F), and `right`, broadcastable to (B, H, F, N), zero at padded keys.

        Args:
            q: queries, (B, H, M, D), not scaled.
            k: keys, (B, H, N, D), not scaled.
            mask: padding, if any.
        """
        raise NotImplementedError(f"{type(self).__name__}.factors is missing: `mix` multiplies them.")

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        left, right = self.factors(q, k, mask)
        return left @ (right @ v)

    def _matrix(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        left, right = self.factors(q, k, mask)
        return zero_padded(left, mask.queries) @ right

    def _token_map(self, q: Tensor, k: Tensor, mask: Mask, kind: str) -> Tensor:
        """Returns the class token's row of the matrix, or its column sums, without the other rows."""
        left, right = self.factors(q, k, mask)
        left = zero_padded(left, mask.queries)
        rows = left[..., :1, :] if kind == "class_token" else left.sum(-2, keepdim=True)
        return (rows @ right)[..., 0, :]


def open_empty(scores: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Sets scores (B, H, F, N) of padded keys to -inf, for a softmax over N; says which samples have no real key.

    A softmax over no key at all is 0/0: the scores of those samples are left as they are, and what is made of them is
    to be set to 0 (`nothing`, (B, 1, 1, 1); None without padding).
    """
    if keys is None:
        return scores, None
    real = keys[:, None, None, :]
    nothing = ~real.any(-1, keepdim=True)
    return torch.where(real | nothing, scores, float("-inf")), nothing


def softmax_over_tokens(scores: Tensor, keys: Tensor | None) -> Tensor:
    """Softmax of scores (B, H, F, N) over the real tokens; 0 at padded ones, and everywhere where none is real."""
    opened, nothing = open_empty(scores, keys)
    weights = opened.softmax(-1)
    return weights if nothing is None else torch.where(nothing, weights.new_zeros(()), weights)
