"""InfSA as functions of queries, keys and values, for attention that you write yourself."""

from typing import Any

from torch import Tensor

from infvit.attention import (
    LinearInfSA,
    PureInfSA,
    linear_infsa,
    linear_infsa_weights,
    pure_infsa,
    pure_infsa_matrix,
)
from infvit.attention.infsa import get_activation
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
        q: queries, (B, H, M, D) or (B, M, D).
        k: keys, (B, H / n, N, D), each head for n of the queries, or (B, N, D).
        v: values, the same with any number of channels.
        mechanism: infsa_pure or infsa_linear.
        gamma: path decay, a number or a tensor that is broadcast to (B, H, M, D); None: 0.7.
        dropout_p: probability with which weights are dropped.
        training: whether they are.
        activation: phi: relu, gelu or abs.
        attn_mask: boolean (True: takes part) or added to the logits, broadcastable to (B, H, M, N).
        is_causal: query i sees keys 0 to i.
        scale: factor of `q k^T` in the logits; None: 1 / sqrt(D).
        **names: `variant` and `rho`, as the InfSA release calls mechanism and gamma.

    Returns:
        The output, (B, H, M, E) or (B, M, E).

    Raises:
        ConfigError: a mask that the mechanism does not support, or an unknown argument.
    """
    mechanism, gamma = _named(names, mechanism, gamma)
    cls = _mechanism(mechanism)
    whole = q.ndim == 4
    q, k, v = (x if whole else x[:, None] for x in (q, k, v))
    q, k, mask = read_call(cls, q, k, scale=scale, mask=attn_mask, causal=is_causal)
    if is_causal and q.shape[-2] != k.shape[-2]:
        raise ConfigError(f"is_causal needs as many queries as keys, got {q.shape[-2]} and {k.shape[-2]}.")
    function = pure_infsa if cls is PureInfSA else linear_infsa
    out = function(q, k, repeat_heads(v, q), mask, activation=activation, dropout=dropout_p if training else 0.0)
    out = (gamma * out).to(v.dtype)
    return out if whole else out[:, 0]


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
    whole = q.ndim == 4
    q, k = (x if whole else x[:, None] for x in (q, k))
    with full_precision(q) as compute:
        weights = function(q.to(compute) * scale, k.to(compute) * scale, get_activation(activation), NO_MASK)
    return gamma * (weights if whole else weights[:, 0])


def _named(names: dict[str, Any], mechanism: str, gamma: float | Tensor | None) -> tuple[str, float | Tensor]:
    """Returns mechanism and gamma, which may come under the release's names."""
    eps = names.pop("eps", 1e-6)
    if eps != 1e-6:
        raise ConfigError(f"eps={eps}: it is 1e-6, as published.")
    if "variant" in names:
        mechanism = names.pop("variant")
    ours = translate({"mechanism": mechanism, "gamma": gamma, **names})
    unknown = set(ours) - {"mechanism", "gamma"}
    if unknown:
        raise ConfigError(f"InfSA as a function does not take {sorted(unknown)}.")
    return ours["mechanism"], ours.get("gamma", GAMMA)


def _mechanism(name: str) -> type[PureInfSA] | type[LinearInfSA]:
    for cls in (PureInfSA, LinearInfSA):
        if cls.name == name:
            return cls
    raise ConfigError(f"unknown variant {name!r}; as functions there are infsa_pure and infsa_linear.")
