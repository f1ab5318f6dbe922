"""What transformers calls in place of softmax: the attention function and the mask function behind `NAME`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)
from transformers.modeling_utils import AttentionInterface

from infvit.attention import Mechanism
from infvit.attention.pure import PureInfSA
from infvit.attention.running import continue_pure
from infvit.attention.softmax import SoftmaxAttention
from infvit.convert.call import attend, attention_weights, read_call, takes_part
from infvit.convert.transformers.cache import cached_layer, keep_squares, past_squares
from infvit.errors import ConfigError

NAME = "infvit.convert.transformers"
"""`config._attn_implementation` of converted models, and what to import where transformers does not know it."""

UNSUPPORTED = {
    "softcap": "logits that are capped (softcap)",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "cu_seq_lens_q": "sequences packed by cu_seq_lens: give position_ids and no attention_mask",
    "cu_seq_lens_k": "sequences packed by cu_seq_lens: give position_ids and no attention_mask",
}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    infsa_cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes attention as the functions of transformers' `AttentionInterface` do, by the mechanism `module.infsa`.

    Args:
        module: the module of attention.
        query: (B, H, M, D).
        key: (B, H / n, N, D), those of the cache before the new ones.
        value: (B, H / n, N, E).
        attention_mask: from `mask`; or boolean (True: takes part) or additive, broadcastable to (B, H, M, N).
        scaling: factor of `query key^T`; None: 1 / sqrt(D).
        dropout: probability with which weights are dropped.
        is_causal: whether a query sees only earlier tokens; None asks the module.
        position_bias: added to the logits, broadcastable to (B, H, M, N).
        infsa_cache: the cache of the call.
        **kwargs: the rest of what the model was called with.

    Returns:
        The output, (B, M, H, E), and the mixing matrix, (B, H, M, N), where `output_attentions` asks for it.

    Raises:
        ConfigError: something that cannot be computed exactly.
    """
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    kind = type(module).__name__
    core: Mechanism | None = getattr(module, "infsa", None)
    if core is None:
        call = {"scaling": scaling, "dropout": dropout, "is_causal": causal, "position_bias": position_bias, **kwargs}
        return _softmax(module, query, key, value, attention_mask, call)
    for name, what in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ConfigError(f"{kind}: converted attention does not support {what}.")
    if dropout != (core.attn_drop.p if core.training else 0.0):
        raise ConfigError(
            f"{kind} drops weights with probability {dropout}, its mechanism with "
            f"{core.attn_drop.p if core.training else 0.0}: convert again after a change of dropout or mode."
        )
    need = bool(kwargs.get("output_attentions") or getattr(module.config, "output_attentions", False))
    if need and not core.capabilities.matrix:
        raise ConfigError(f"output_attentions: {core.name} has no mixing matrix ({kind}).")
    if key.shape[1] != query.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    call = {"scale": scaling, "bias": position_bias}
    plain = attention_mask is not None and attention_mask.ndim == 2 and attention_mask.dtype == torch.bool
    if causal or plain:
        call |= _masks(attention_mask, query, key)
        window = kwargs.get("sliding_window")
        out, weights = _causal(module, core, query, key, value, call, infsa_cache, need, window)
    elif isinstance(core, PureInfSA) and attention_mask is not None and getattr(module, "groups", False):
        q, k, pairs = read_call(core, query, key, **call, mask=attention_mask)
        out, _, weights = continue_pure(core, q, k, value, pairs, need_matrix=need, groups=True)
    else:
        call |= _masks(attention_mask, query, key, cross=getattr(module, "cross", False))
        out = attend(core, query, key, value, **call)
        weights = attention_weights(core, query, key, **call) if need else None
    return out.transpose(1, 2).contiguous(), weights


def _causal(
    module: nn.Module,
    core: Mechanism,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: dict[str, Any],
    cache: Any,
    need: bool,
    window: int | None,
) -> tuple[Tensor, Tensor | None]:
    """Mixes the last M of N tokens of a causal sequence."""
    new, tokens = q.shape[-2], k.shape[-2]
    pure = isinstance(core, PureInfSA)
    layer = None if cache is None else cached_layer(cache, getattr(module, "layer_idx", None), with_squares=pure)
    if isinstance(core, PureInfSA):
        if layer is None and new != tokens:
            raise ConfigError("Pure InfSA needs the cache with which its earlier tokens were computed: pass cache=....")
        past = None if layer is None else past_squares(layer, new, type(module).__name__, k)
        q, k, mask = read_call(core, q, k, **call)
        out, squares, weights = continue_pure(core, q, k, v, mask, past, need, window=window)
        if layer is not None:
            keep_squares(layer, squares, past)
        return out, weights
    if new != tokens and not isinstance(core, SoftmaxAttention):
        raise ConfigError(
            f"{core.name} keeps no state between calls, and keys and values do not suffice for it: use use_cache=False."
        )
    if call["mask"] is None and new == tokens:
        call["causal"] = True
    elif call["mask"] is None:
        call["mask"] = torch.ones(new, tokens, dtype=torch.bool, device=q.device).tril(tokens - new)
    else:
        call["ordered"] = True
    out = attend(core, q, k, v, **call)
    return out, attention_weights(core, q, k, **call) if need else None


def _masks(mask: Tensor | None, q: Tensor, k: Tensor, cross: bool = False) -> dict[str, Tensor | None]:
    """Reads a mask over pairs. A token that nobody sees, not even itself, is padding and counts in no norm."""
    if mask is None:
        return {"mask": None, "keys": None, "queries": None}
    batch, new, tokens = q.shape[0], q.shape[-2], k.shape[-2]
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ConfigError(f"an attention mask must be boolean or floating-point, not {mask.dtype}.")
    if mask.ndim == 2 and mask.dtype == torch.bool:  # the real tokens of a plain causal pattern
        mask = mask[:, None, None]
    mask = mask[(None,) * (4 - mask.ndim)]
    real = takes_part(mask).any(-2).any(1).expand(batch, tokens)
    queries = None if cross else real[:, tokens - new :]
    if mask.dtype == torch.bool and mask.shape[1] == mask.shape[2] == 1:  # the same keys for every query
        return {"mask": None, "keys": real, "queries": queries}
    return {"mask": mask, "keys": None, "queries": queries}


def _softmax(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Computes what a module that was left as it is computes, beside converted ones of the same model."""
    if not getattr(module, "infsa_kept", False):
        raise ConfigError(
            f"{type(module).__name__} has no mechanism, but the configuration says that the model was converted "
            f"(attn_implementation={NAME!r}). A model made from the configuration of a converted one has to be "
            "converted itself: set config._attn_implementation to 'sdpa', then infvit.convert(model). One that shares "
            "its configuration object with a model converted in place needs its own: copy.deepcopy(config)."
        )
    if call.get("output_attentions"):
        raise ConfigError(f"output_attentions: {type(module).__name__} was not converted and has none to give.")
    if mask is not None and mask.ndim == 2 and mask.dtype == torch.bool:
        new, tokens = q.shape[-2], k.shape[-2]
        mask = mask[:, None, None] & torch.ones(new, tokens, dtype=torch.bool, device=q.device).tril(tokens - new)
    return sdpa_attention_forward(module, q, k, v, mask, **call)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    use_vmap: bool = False,
    **_: Any,
) -> Tensor | None:
    """Makes the mask for `attention`, as the functions of transformers' `AttentionMaskInterface` do.

    Returns:
        Of a plain causal pattern the real tokens, (B, N), or None where all are and nothing is cached; of a
        bidirectional one the same as (B, 1, 1, N), or None; of others the allowed pairs, (B, 1, M, N).
    """
    real = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if real is not None:
        real = real[:, kv_offset : kv_offset + kv_length]
    if mask_function is bidirectional_mask_function:
        return None if real is None else real[:, None, None]
    if mask_function is causal_mask_function and kv_offset == 0 and q_offset + q_length == kv_length:
        if real is None and q_offset > 0:
            return torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
        return real
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
