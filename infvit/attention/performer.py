"""Performer: random features whose product estimates the softmax kernel (Choromanski et al., arXiv 2009.14794)."""

import math
from typing import Any

import torch
from torch import Tensor

from infvit.attention.factored import FactoredAttention, open_empty, softmax_over_tokens
from infvit.attention.mechanism import Capabilities, Mask
from infvit.errors import ConfigError


def orthogonal_features(num_features: int, dim: int) -> Tensor:
    """Draws directions w ~ N(0, I), orthogonal within every block of `dim` (section 2.4), from torch's generator.

    A block is a random rotation (QR of a Gaussian matrix; the signs make it uniform) whose rows get the lengths of
    independent Gaussian vectors, so that each row by itself is exactly N(0, I) and the estimate stays unbiased.

    Returns:
        (num_features, dim), float64, on the CPU.
    """
    blocks = []
    for _ in range(math.ceil(num_features / dim)):
        rotation, upper = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, device="cpu"))
        blocks.append((rotation * upper.diagonal().sign()).T)
    lengths = torch.randn(num_features, dim, dtype=torch.float64, device="cpu").norm(dim=-1, keepdim=True)
    return lengths * torch.cat(blocks)[:num_features]


class Performer(FactoredAttention):
    """FAVOR+: softmax attention with `exp(q . k / sqrt(D))` estimated by positive random features (Lemma 1).

        phi(x) = exp(w_f . x - |x|^2 / 2) / sqrt(m),  f = 1..m,   x = q / D^(1/4) or k / D^(1/4)
        out_i  = phi(q_i) . sum_j phi(k_j) v_j^T  /  phi(q_i) . sum_j phi(k_j)

    The exponentials overflow and underflow, and the published code subtracts maxima and adds a small number to every
    feature, which changes the function a little. Here the same quotient is a product of two softmaxes, which needs
    neither: of each feature over the keys, and of each query over the features,

        l_fj = w_f . k_j - |k_j|^2 / 2,   right_fj = softmax_j(l_fj),
        left_if = softmax_f(w_f . q_i + log sum_j exp(l_fj))

    The features are drawn once per layer, shared by its heads, and kept in the checkpoint: without them the weights
    mean nothing. `reset_parameters` draws new ones; nothing does so during training, so that a run that is resumed is
    the unbroken run. Not causal: the prefix sums would need a maximum that moves with the position.

    Args:
        num_heads: heads H.
        head_dim: channels per head D.
        attn_drop: must be 0.
        device: device of the features.
        dtype: dtype of the features.
        num_features: m; None takes D ln D, rounded down, and at least D.
    """

    name = "performer"
    capabilities = Capabilities(
        padding=True, cross=True, permutation_equivariant=True, matrix=True, token_map=True, any_length=True
    )
    directions: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        attn_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_features: int | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, attn_drop, device, dtype)
        self.num_features = max(head_dim, int(head_dim * math.log(head_dim))) if num_features is None else num_features
        if self.num_features < 1:
            raise ConfigError(f"num_features={num_features} of {self.name} must be at least 1.")
        self.register_buffer("directions", torch.empty(self.num_features, head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new features (also after creation on the meta device)."""
        if not self.directions.is_meta:
            self.directions.copy_(orthogonal_features(self.num_features, self.head_dim))

    def macs(self, tokens: int) -> int:
        return 4 * tokens * self.num_features * self.num_heads * self.head_dim

    def factors(self, q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        directions = self.directions.to(q.dtype) * self.head_dim**-0.25
        squares = k.square().sum(-1)[..., None, :] * (self.scale / 2)
        keys = directions @ k.transpose(-2, -1) - squares  # l, (B, H, m, N)
        opened, _ = open_empty(keys, mask.keys)
        queries = q @ directions.T + opened.logsumexp(-1)[..., None, :]  # |q|^2 cancels in the quotient
        return queries.softmax(-1), softmax_over_tokens(keys, mask.keys)

    def reference(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        def phi(x: Tensor) -> Tensor:
            x = x / x.shape[-1] ** 0.25
            positive = (x @ self.directions.mT - x.square().sum(-1, keepdim=True) / 2).exp()
            return positive / self.num_features**0.5

        weights = phi(q) @ phi(k).mT
        return weights @ v / weights.sum(-1, keepdim=True)

    def extra_repr(self) -> str:
        return f"num_features={self.num_features}"
