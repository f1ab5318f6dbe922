"""InfSA as functions of queries, keys and values, for attention that you write yourself."""

from typing import Any

import torch
from torch import Tensor

from infvit.attention import (
    LinearInfSA,
    PureInfSA,
    linear_infsa,
    linear_infsa_weights,
    pure_infsa,
    pure_infsa_matrix,
)
from infvit.attention.infsa import check_gamma, get_activation
from infvit.attention.mechanism import NO_MASK, full_precision
from infvit.convert.call import read_call, repeat_heads
from infvit.convert.release import translate
from infvit.errors import ConfigError

GAMMA = 0.7


def infsa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: str = "infsa_pure",
    gamma: float | Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = False,
    *,
    activation: str = "relu",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    **names: Any,
) -> Tensor:
    """Computes InfSA where `F.scaled_dot_product_attention` computes softmax attention.

    Args:
        q: queries, (B, H, M, D), (B, M, D) or (M, D).
        k: keys, (B, H / n, N, D), each head for n of the queries, or (B, N, D) or (N, D).
        v: values, the same with any number of channels.
        mechanism: infsa_pure or infsa_linear.
        gamma: path decay, a number in (0, 1), or a tensor, not checked, that the output is multiplied by; None: 0.7.
        dropout_p: probability with which weights are dropped.
        training: whether they are.
        activation: phi: relu, gelu or abs.
        attn_mask: boolean (True: takes part) or added to the logits, broadcastable to (B, H, M, N), without B and H
            where q has none.
        is_causal: query i sees keys 0 to i.
        scale: factor of `q k^T` in the logits; None: 1 / sqrt(D).
        **names: `variant` and `rho`, as the InfSA release calls mechanism and gamma.

    Returns:
        The output, (B, H, M, E), (B, M, E) or (M, E).

    Raises:
        ConfigError: shapes that do not fit, a mask that the mechanism does not support, or an unknown argument.
    """
    mechanism, gamma = _named(names, mechanism, gamma)
    cls = _mechanism(mechanism)
    shape = q.shape[:-1]
    _check_shapes(q, k, v, attn_mask)
    if is_causal and q.shape[-2] != k.shape[-2]:
        raise ConfigError(f"is_causal needs as many queries as keys, got {q.shape[-2]} and {k.shape[-2]}.")
    if attn_mask is not None and q.ndim == 3 == attn_mask.ndim:
        attn_mask = attn_mask[:, None]
    q, k, v = (x if x.ndim == 4 else x.reshape(-1, 1, *x.shape[-2:]) for x in (q, k, v))
    q, k, mask = read_call(cls, q, k, scale=scale, mask=attn_mask, causal=is_causal)
    function = pure_infsa if cls is PureInfSA else linear_infsa
    out = function(q, k, repeat_heads(v, q), mask, activation=activation, dropout=dropout_p if training else 0.0)
    return (gamma * out.reshape(*shape, v.shape[-1])).to(v.dtype)


def pure_infsa_scores(
    q: Tensor, k: Tensor, gamma: float | Tensor | None = None, *, activation: str = "relu", **names: Any
) -> Tensor:
    """Returns `gamma A` of Pure InfSA for queries (..., M, D) and keys (..., N, D): (..., M, N)."""
    return _scores(q, k, gamma, activation, names, "infsa_pure")


def linear_infsa_scores(
    q: Tensor, k: Tensor, gamma: float | Tensor | None = None, *, activation: str = "relu", **names: Any
) -> Tensor:
    """Returns `gamma a` of Linear InfSA for queries (..., M, D) and keys (..., N, D): (..., N, 1), one per key."""
    return _scores(q, k, gamma, activation, names, "infsa_linear").mT


def _scores(
    q: Tensor, k: Tensor, gamma: float | Tensor | None, activation: str, names: dict[str, Any], mechanism: str
) -> Tensor:
    _, gamma = _named(names, mechanism, gamma)
    function = pure_infsa_matrix if mechanism == "infsa_pure" else linear_infsa_weights
    scale = q.shape[-1] ** -0.5
    if q.ndim < 2 or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise ConfigError(f"queries (..., M, D) and keys (..., N, D) are needed, not {_shapes(q, k)}.")
    lead = q.shape[:-2]
    q, k = (x.reshape(-1, 1, *x.shape[-2:]) for x in (q, k))
    with full_precision(q) as compute:
        weights = function(q.to(compute) * scale, k.to(compute) * scale, get_activation(activation), NO_MASK)
    return gamma * weights.reshape(*lead, *weights.shape[-2:])


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    """Raises where queries, keys, values and mask do not belong together."""
    heads = -3 if q.ndim == 4 else -2
    fit = q.ndim in (2, 3, 4) and q.ndim == k.ndim == v.ndim and k.shape[:-1] == v.shape[:-1]
    fit = fit and q.shape[-1] == k.shape[-1] and q.shape[:heads] == k.shape[:heads]
    if not fit or (q.ndim == 4 and q.shape[1] % k.shape[1]):
        raise ConfigError(
            "q (B, H, M, D), k (B, H / n, N, D) and v (B, H / n, N, E) are needed, each without H or without B and H, "
            f"not {_shapes(q, k, v)}."
        )
    if mask is None:
        return
    logits = (*q.shape[:-1], k.shape[-2])
    aligned = zip(reversed(mask.shape), reversed(logits), strict=False)
    if mask.ndim > len(logits) or any(size not in (1, full) for size, full in aligned):
        raise ConfigError(f"attn_mask of shape {tuple(mask.shape)} is not broadcastable to {tuple(logits)}.")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ConfigError(f"attn_mask must be boolean (True: takes part) or added to the logits, not {mask.dtype}.")


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(x.shape)) for x in tensors)


def _named(names: dict[str, Any], mechanism: str, gamma: float | Tensor | None) -> tuple[str, float | Tensor]:
    """Returns mechanism and gamma, which may come under the release's names."""
    if "variant" in names:
        mechanism = names.pop("variant")
    ours = translate({"mechanism": mechanism, "gamma": gamma, **names})
    unknown = set(ours) - {"mechanism", "gamma"}
    if unknown:
        raise ConfigError(f"InfSA as a function does not take {sorted(unknown)}.")
    gamma = ours.get("gamma", GAMMA)
    return ours["mechanism"], gamma if isinstance(gamma, Tensor) else check_gamma(gamma)


def _mechanism(name: str) -> type[PureInfSA] | type[LinearInfSA]:
    for cls in (PureInfSA, LinearInfSA):
        if cls.name == name:
            return cls
    raise ConfigError(f"unknown variant {name!r}; as functions there are infsa_pure and infsa_linear.")
