"""InfSAAttention: nn.MultiheadAttention with another mechanism, to build with."""

import math
from statistics import fmean
from typing import Any

import torch

from infvit.attention.infsa import path_decays
from infvit.convert.release import translate
from infvit.convert.site import build_core, check_mechanism
from infvit.convert.torch import InfSAMultiheadAttention


class InfSAAttention(InfSAMultiheadAttention):
    """Takes the place of `nn.MultiheadAttention`: same arguments, shapes, weights and names in the state dict.

    Args:
        embed_dim: channels.
        num_heads: heads; must divide `embed_dim`.
        dropout: probability with which attention weights are dropped in training.
        bias: bias on the projections.
        add_bias_kv: one more, learned, key and value.
        add_zero_attn: one more key and value of zeros.
        kdim: channels of the keys; None: `embed_dim`.
        vdim: channels of the values; None: `embed_dim`.
        batch_first: (B, N, C) instead of (N, B, C). None: no, as in torch; yes where an argument of the InfSA release
            (`variant`, `rho_init`, `rho_trainable`) is given, as there.
        device: device of the parameters.
        dtype: dtype of the parameters.
        mechanism: a registered mechanism.
        **hyperparameters: those of the mechanism (`gamma`, `gamma_trainable`, `activation`, ...), also under the names
            of the InfSA release.

    Raises:
        ConfigError: unknown mechanism or hyperparameter.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mechanism: str | None = None,
        **hyperparameters: Any,
    ) -> None:
        if isinstance(dropout, str):  # the release's third argument
            hyperparameters["variant"], dropout = dropout, 0.0
        released = {"variant", "rho_init", "rho_trainable"} & set(hyperparameters)
        args = translate({"mechanism": mechanism, **hyperparameters})
        name = args.pop("mechanism", "infsa_pure")
        cls = check_mechanism(name, args)
        if batch_first is None:
            batch_first = bool(released)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.infsa = build_core(cls, num_heads, self.head_dim, dropout, {"device": device, "dtype": dtype}, args)

    @property
    def rho(self) -> float:
        """Mean gamma, under the release's name; NaN for a mechanism without."""
        return fmean(path_decays(self) or [math.nan])
