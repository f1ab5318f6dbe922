"""A reference for converted models: the unconverted one, with the formula in place of its softmax."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from infvit.attention.infsa import get_activation


class Formula:
    """While it is on, softmax attention computes InfSA by the specification, in whatever way a library asks for it.

        with Formula("infsa_pure"):
            expected = unconverted(images)            # equals converted(images)

    It knows two doors: `F.scaled_dot_product_attention`, and a softmax over the last dimension of a matrix of logits
    (Pure only: Linear needs the queries themselves). Logits at or below `excluded` take no part; a key that no query
    sees is a padded token and, where queries and keys are the same tokens, no query either; a mask that lets queries
    see earlier keys and no later ones is causal. Nothing here comes from the mechanisms it is compared with.

    Args:
        name: infsa_pure or infsa_linear.
        head_dim: channels per head; needed where a library calls softmax itself.
        gamma: path decay.
        activation: phi.
        excluded: logits at or below do not take part; Swin masks with -100.
    """

    def __init__(
        self,
        name: str,
        head_dim: int | None = None,
        gamma: float = 0.7,
        activation: str = "relu",
        excluded: float = -1e4,
    ) -> None:
        self.name, self.head_dim, self.gamma, self.excluded = name, head_dim, gamma, excluded
        self.phi = get_activation(activation)
        self.calls = 0
        self._patches = ExitStack()

    def __enter__(self) -> "Formula":
        for owner in (torch, F, Tensor):
            self._patches.enter_context(patch.object(owner, "softmax", self._softmax(owner.softmax)))
        self._patches.enter_context(patch.object(F, "scaled_dot_product_attention", self._attention))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _softmax(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def softmax(input: Tensor, dim: int, *args: Any, **kwargs: Any) -> Tensor:
            if input.ndim < 3:
                return original(input, dim, *args, **kwargs)
            assert dim in (-1, input.ndim - 1), "attention is a softmax over the last dimension"
            assert self.head_dim is not None, "give head_dim: this library calls softmax itself"
            assert self.name == "infsa_pure", "a softmax does not show the queries"
            self.calls += 1
            return self.gamma * self._pure(input / math.sqrt(self.head_dim), input > self.excluded)

        return softmax

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        assert dropout_p == 0, "compare without dropout"
        self.calls += 1
        if enable_gqa:
            times = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        dim = query.shape[-1]
        scale = dim**-0.5 if scale is None else scale
        logits = query @ key.mT * scale
        allowed = torch.ones_like(logits, dtype=torch.bool)
        if is_causal:
            allowed = allowed.tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            allowed = allowed & attn_mask
        elif attn_mask is not None:
            logits = logits + attn_mask
            allowed = allowed & (logits > self.excluded)
        if self.name == "infsa_pure":
            return self.gamma * self._pure(logits / math.sqrt(dim), allowed) @ value
        return self.gamma * self._linear(query * math.sqrt(scale), key * math.sqrt(scale), allowed, dim) @ value

    def _pure(self, scores: Tensor, allowed: Tensor) -> Tensor:
        allowed = _without_padding(allowed)
        scores = torch.where(allowed, self.phi(torch.where(allowed, scores, 0.0)), 0.0)
        if _causal(allowed):
            norm = scores.square().sum(-1, keepdim=True).cumsum(-2).sqrt()
        else:
            norm = scores.square().sum((-2, -1), keepdim=True).sqrt()
        return scores / (norm + 1e-6)

    def _linear(self, q: Tensor, k: Tensor, allowed: Tensor, dim: int) -> Tensor:
        allowed = _without_padding(allowed)
        q, k = q * dim**-0.25, k * dim**-0.25  # q carries sqrt(scale) already: together L / sqrt(D)
        rows = []
        for i in range(q.shape[-2]):
            last = i + 1 if _causal(allowed) else q.shape[-2]
            real = allowed.any(-1, keepdim=True)[..., :last, :]
            seen = torch.where(real, q[..., :last, :], 0.0)
            norms = seen.square().sum(-1, keepdim=True).sqrt()
            pooled = (norms / (norms.sum(-2, keepdim=True) + 1e-6) * seen).sum(-2, keepdim=True)
            scores = torch.where(allowed[..., i : i + 1, :], self.phi(pooled @ k.mT), 0.0)
            total = scores.sum(-1, keepdim=True)
            rows.append(scores / torch.where(total < 0, total - 1e-6, total + 1e-6))
        return torch.cat(rows, -2)


def _without_padding(allowed: Tensor) -> Tensor:
    """Takes out the queries of tokens that are no key for any query."""
    if allowed.shape[-1] != allowed.shape[-2]:
        return allowed
    return allowed & allowed.any(-2)[..., None]


def _causal(allowed: Tensor) -> bool:
    if allowed.shape[-1] != allowed.shape[-2]:
        return False
    return bool(allowed.tril(-1).any()) and not bool(allowed.triu(1).any())
