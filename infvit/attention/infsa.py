"""What Pure and Linear InfSA share: the activation phi and the path decay gamma (arXiv 2603.00175)."""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from timm.layers import use_fused_attn
from torch import Tensor, nn
from torch.nn import functional as F

from infvit.attention.mechanism import Mechanism
from infvit.errors import ConfigError

EPS = 1e-6
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "abs": torch.abs}


def get_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Returns phi by name: relu (the paper's choice), gelu or abs.

    Raises:
        ConfigError: unknown name.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(f"unknown activation {name!r}; allowed: {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def check_gamma(gamma: Any) -> float:
    """Returns gamma if it lies in (0, 1), the range in which the sum over paths converges.

    Raises:
        ConfigError: gamma is outside (0, 1).
    """
    if not isinstance(gamma, Real) or not 0 < float(gamma) < 1:
        raise ConfigError(f"gamma={gamma} must lie strictly between 0 and 1.")
    return float(gamma)


class PathDecay(nn.Module):
    """The path decay gamma = sigmoid(logit), one per layer or one per head.

    Args:
        gamma: start value in (0, 1).
        trainable: whether the logit is learned; otherwise gamma stays what it is.
        num_heads: number of values; 1 shares one over all heads. Never 0-d: FSDP2 refuses 0-d parameters.
    """

    def __init__(
        self,
        gamma: float,
        trainable: bool,
        num_heads: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.initial = check_gamma(gamma)
        self.logit = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype), requires_grad=trainable)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets gamma back to its start value (also after creation on the meta device)."""
        nn.init.constant_(self.logit, math.log(self.initial / (1 - self.initial)))

    def forward(self) -> Tensor:
        """Returns gamma in at least float32, shape (1, 1, 1) or (H, 1, 1)."""
        return self.logit.to(torch.promote_types(self.logit.dtype, torch.float32)).sigmoid()[:, None, None]

    def extra_repr(self) -> str:
        return f"initial={self.initial}, trainable={self.logit.requires_grad}, values={self.logit.numel()}"


class InfSA(Mechanism):
    """Common constructor of Pure and Linear InfSA.

    `fused`, whether our own operators compute, is read from timm's switch (TIMM_FUSED_ATTN) at construction and can be
    set afterwards; both ways give the same function.

    Args:
        num_heads: heads H.
        head_dim: channels per head D.
        attn_drop: dropout probability on the normalised weights.
        gamma: path decay in (0, 1).
        gamma_trainable: learn gamma; False keeps the given value.
        gamma_per_head: one gamma per head instead of one per layer.
        activation: phi: relu, gelu or abs.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        attn_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        gamma: float = 0.7,
        gamma_trainable: bool = True,
        gamma_per_head: bool = False,
        activation: str = "relu",
    ) -> None:
        super().__init__(num_heads, head_dim, attn_drop, device, dtype)
        self.fused = use_fused_attn()
        self.activation = activation
        self.phi = get_activation(activation)
        self.decay = PathDecay(gamma, gamma_trainable, num_heads if gamma_per_head else 1, device, dtype)

    def extra_repr(self) -> str:
        return f"activation={self.activation}"


def path_decays(model: nn.Module) -> list[float]:
    """Returns gamma of every InfSA layer of a model, in order; the mean over heads where each head has its own."""
    return [float(module().detach().mean()) for module in model.modules() if isinstance(module, PathDecay)]
