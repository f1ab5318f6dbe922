"""From a library's queries, keys, values, scale and masks to a call of a mechanism."""

import math
from typing import Any

import torch
from torch import Tensor

from infvit.attention import Mask, Mechanism
from infvit.attention.factored import FactoredAttention
from infvit.attention.pure import last_rows
from infvit.errors import ConfigError

EXCLUDED = (
    -1e4
)  # An additive mask at or below this excludes; softmax gives weight 0 there, and no learned bias comes near.
SUSPICIOUS = -100.0  # Softmax gives weight 0 from here on, too; whoever hides all later keys so means to exclude them.


def attend(core: Mechanism, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Tensor:
    """Calls a mechanism as a library would call its own attention.

    Args:
        core: the mechanism.
        q: queries, (B, H, M, D), as the library has them before its scale.
        k: keys, (B, H, N, D); fewer heads, H / n, serve n heads of queries each, one after the other.
        v: values, (B, H, N, E); the same.
        **call: the arguments of `read_call`.

    Returns:
        The output, (B, H, M, E).
    """
    q, k, mask = read_call(core, q, k, **call)
    return core(q, k, repeat_heads(v, q), mask)


def follow_dropout(core: Mechanism, probability: float) -> None:
    """Lets a mechanism drop with the probability that the library's module has now; it may have changed since.

    Raises:
        ConfigError: the mechanism has no weights to drop.
    """
    if core.attn_drop.p == probability:
        return
    if isinstance(core, FactoredAttention):
        raise ConfigError(f"{core.name} has no weights between pairs of tokens to drop: set the model's dropout of "
                          f"attention weights to 0, not {probability}.")  # fmt: skip
    core.attn_drop.p = probability


def attention_weights(core: Mechanism, q: Tensor, k: Tensor, **call: Any) -> Tensor:
    """Returns the mixing matrix of the same call, (B, H, M, N)."""
    return core.matrix(*read_call(core, q, k, **call))


def read_call(
    core: Mechanism | type[Mechanism],
    q: Tensor,
    k: Tensor,
    *,
    scale: float | Tensor | None = None,
    mask: Tensor | None = None,
    keys: Tensor | None = None,
    queries: Tensor | None = None,
    causal: bool = False,
    ordered: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Mask]:
    """Returns queries, keys and mask for a mechanism whose logits are `q k^T / sqrt(D) + bias`.

    Args:
        core: the mechanism, or its class.
        q: queries, (B, H, M, D).
        k: keys, (B, H / n, N, D).
        scale: factor of `q k^T` in the library's logits, a number or broadcastable to (B, H, M, D); None: 1 / sqrt(D).
        mask: boolean (True: takes part) or added to the logits (-10,000 and less: does not take part), broadcastable to
            (B, H, M, N). Order is read from what does not take part, see `infvit.attention.pure.last_rows`.
        keys: real keys, (B, N).
        queries: real queries, (B, M).
        causal: query i sees keys 0 to i.
        ordered: no query may feel a later one, see `infvit.attention.Mask`.
        bias: finite numbers added to the logits, broadcastable to (B, H, M, N).

    Raises:
        ConfigError: a mask that the mechanism does not support, or one that hides later keys by finite numbers.
    """
    root = math.sqrt(q.shape[-1])
    if scale is not None and not (isinstance(scale, float) and math.isclose(scale * root, 1, rel_tol=1e-9)):
        q = q * (scale * root)
    k = repeat_heads(k, q)
    pairs = mask
    if mask is not None and mask.is_floating_point():
        pairs = takes_part(mask)
        _refuse_finite_order(mask, pairs)
        finite = torch.where(pairs, mask, mask.new_zeros(()))
        if core.capabilities.bias:
            bias = finite if bias is None else bias + finite
        else:
            refuse_bias(finite, core.name)
    if pairs is not None and not core.capabilities.pairwise:
        pairs, keys, queries, causal = _without_pairs(core, pairs, q, k, keys, queries, causal)
    return q, k, Mask(keys=keys, queries=queries, pairs=pairs, causal=causal, bias=bias, ordered=ordered)


def takes_part(mask: Tensor) -> Tensor:
    """Returns which entries of a mask, boolean (True: takes part) or added to the logits, take part.

    NaN does: it must be seen in the output, not hidden.
    """
    return ~(mask <= EXCLUDED) if mask.is_floating_point() else mask


def read_padding(core: Mechanism, keys: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns which keys are real, (B, N), and the bias on keys, (B, 1, 1, N), if there is any.

    Args:
        core: the mechanism.
        keys: boolean (True: real) or added to the logits, (B, N).
    """
    if not keys.is_floating_point():
        return keys, None
    real = takes_part(keys)
    bias = torch.where(real, keys, keys.new_zeros(()))[:, None, None]
    if not core.capabilities.bias:
        refuse_bias(bias, core.name)
        return real, None
    if not torch.compiler.is_compiling() and not bias.is_meta and not bias.any():
        return real, None  # -inf and 0 only, as libraries make of a boolean mask
    return real, bias


def refuse_bias(bias: Tensor, mechanism: str) -> None:
    """Raises where a bias is not zero; in a compiled graph the check is part of the graph.

    Raises:
        ConfigError: not zero. A compiled graph raises RuntimeError with the same words.
    """
    message = (
        f"attention mechanism {mechanism!r} has no logits of single pairs to add a bias to, and the model adds one "
        "that is not 0. Convert to infsa_pure, or exclude this layer."
    )
    if bias.is_meta:
        return
    if torch.compiler.is_compiling():
        torch._assert_async(~bias.any(), message)
    elif bias.any():
        raise ConfigError(message)


def in_order(mask: Tensor) -> bool:
    """Whether a mask (..., M, N), boolean (True: takes part) or additive, keeps queries from feeling later ones.

    See `infvit.attention.pure.last_rows`.

    Raises:
        ConfigError: in a compiled graph, where values cannot be looked at.
    """
    if mask.is_meta:
        return False
    if torch.compiler.is_compiling():
        raise ConfigError("a compiled model must be told whether its mask is causal: pass is_causal=True or "
                          "tgt_is_causal=True beside the mask, or no mask.")  # fmt: skip
    return bool((last_rows(takes_part(mask)) < mask.shape[-2] - 1).any())


def _refuse_finite_order(mask: Tensor, pairs: Tensor) -> None:
    """Raises where finite numbers that are as good as -inf to a softmax make a mask causal which is not otherwise."""
    if torch.compiler.is_compiling() or mask.is_meta or mask.ndim < 2 or mask.shape[-2] != mask.shape[-1]:
        return
    seen = pairs & ~(mask <= SUSPICIOUS)
    if not torch.equal(seen, pairs) and in_order(seen) and not in_order(pairs):
        raise ConfigError(
            f"the mask hides later keys by finite numbers of {SUSPICIOUS:g} and less. Those are a bias here, through "
            f"which later tokens would be felt: mask with -inf (anything from {EXCLUDED:g} down excludes) or a boolean "
            "mask."
        )


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeats the heads of grouped keys or values."""
    times = q.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def _without_pairs(
    core: Mechanism | type[Mechanism],
    pairs: Tensor,
    q: Tensor,
    k: Tensor,
    keys: Tensor | None,
    queries: Tensor | None,
    causal: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, bool]:
    """Reads a mask over pairs as one of padding, or as the causal one, for a mechanism that knows only those."""
    pairs = pairs[(None,) * (4 - pairs.ndim)]
    if pairs.shape[1] == 1 and pairs.shape[2] == 1:  # the same keys for every query
        real = pairs[:, 0, 0].expand(q.shape[0], k.shape[-2])
        return None, real if keys is None else keys & real, queries, causal
    if not torch.compiler.is_compiling() and not pairs.is_meta:
        seen = pairs.any(-2, keepdim=True).any(1, keepdim=True)
        if torch.equal(pairs, seen.expand_as(pairs)):
            return _without_pairs(core, seen, q, k, keys, queries, causal)
        if keys is None and q.shape[-2] == k.shape[-2] and torch.equal(pairs, (seen & seen.mT).expand_as(pairs)):
            real = seen[:, 0, 0].expand(q.shape[0], -1)  # padded tokens are left out as keys and as queries
            return None, real, real, causal
        if core.capabilities.causal and q.shape[-2] == k.shape[-2]:
            triangle = torch.ones(pairs.shape[-2:], dtype=torch.bool, device=pairs.device).tril()
            if torch.equal(pairs, triangle.expand_as(pairs)):
                return None, keys, queries, True
    raise ConfigError(
        f"attention mechanism {core.name!r} does not support masks over single query-key pairs (padding and causal "
        "masks aside, which must be told as such where the model is compiled: is_causal=True, or attention_mask for a "
        "language model of transformers, which may else be given several texts in one). Convert to infsa_pure."
    )
