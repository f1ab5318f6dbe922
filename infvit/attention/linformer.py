"""Linformer: keys and values of N tokens projected to k tokens (Wang et al., arXiv 2006.04768, eq. 7)."""

from typing import Any

import torch
from torch import Tensor, nn

from infvit.attention.factored import FactoredAttention
from infvit.attention.mechanism import Capabilities, Mask
from infvit.errors import ConfigError

SHARING = ("heads", "keys_values", "none")


class Linformer(FactoredAttention):
    """`softmax(Q (E K)^T / sqrt(D)) (F V)` with learned E and F, (k, N).

    E and F belong to one number of tokens: a model with this attention takes one image size. Padded keys are in none of
    the projected ones. Sharing, as the paper names it: "heads" (headwise: one E and one F for all heads of a layer),
    "keys_values" (one matrix for both, and for all heads) or "none" (an E and an F for each head). One matrix for all
    layers, which the paper tries as well, is not offered. E and F start uniform with variance 1 / (N + k), as in the
    authors' code, so that projected tokens are not larger than tokens.

    Args:
        num_heads: heads H.
        head_dim: channels per head D.
        attn_drop: must be 0.
        device: device of the projections.
        dtype: dtype of the projections.
        num_tokens: N, with the class token; models fill it in.
        projected_tokens: k; the paper takes N / 4 or more for small losses.
        sharing: "heads", "keys_values" or "none".
    """

    name = "linformer"
    capabilities = Capabilities(padding=True, matrix=True, token_map=True)

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        attn_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_tokens: int,
        projected_tokens: int = 64,
        sharing: str = "heads",
    ) -> None:
        super().__init__(num_heads, head_dim, attn_drop, device, dtype)
        if num_tokens < 1 or projected_tokens < 1:
            raise ConfigError(f"num_tokens={num_tokens} and projected_tokens={projected_tokens} must be at least 1.")
        if sharing not in SHARING:
            raise ConfigError(f"sharing={sharing!r} of {self.name}; allowed: {', '.join(SHARING)}.")
        self.num_tokens = num_tokens
        self.projected_tokens = projected_tokens
        shape = (num_heads if sharing == "none" else 1, projected_tokens, num_tokens)
        self.key_proj = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))  # E
        self.value_proj = self.key_proj  # F
        if sharing != "keys_values":
            self.value_proj = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new projections (also after creation on the meta device)."""
        bound = (3 / (self.num_tokens + self.projected_tokens)) ** 0.5
        for projection in dict.fromkeys((self.key_proj, self.value_proj)):
            nn.init.uniform_(projection, -bound, bound)

    def macs(self, tokens: int) -> int:
        return 4 * tokens * self.projected_tokens * self.num_heads * self.head_dim

    def factors(self, q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        keys = self.key_proj.to(k.dtype) @ k  # padded keys are 0
        left = ((q * self.scale) @ keys.transpose(-2, -1)).softmax(-1)
        right = self.value_proj.to(k.dtype)[None]
        return left, right if mask.keys is None else torch.where(mask.keys[:, None, None], right, right.new_zeros(()))

    def reference(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        weights = (q @ (self.key_proj @ k).mT / q.shape[-1] ** 0.5).exp()
        return weights / weights.sum(-1, keepdim=True) @ (self.value_proj @ v)

    def extra_repr(self) -> str:
        return f"num_tokens={self.num_tokens}, projected_tokens={self.projected_tokens}"
