"""torch's own attention: nn.MultiheadAttention, and the transformer layers around it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from infvit.convert.call import attend, attention_weights, follow_dropout, in_order, read_padding, takes_part
from infvit.convert.site import Converted, Library, Site, library_class
from infvit.errors import ConfigError

NESTED = "nested_tensor_before_convert"


class InfSAMultiheadAttention(Converted, nn.MultiheadAttention):
    """nn.MultiheadAttention whose values are mixed by `self.infsa`; arguments, shapes and weights are torch's."""

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False once converted: nn.TransformerEncoderLayer asks before it runs torch's own fused softmax instead."""
        return "infsa" not in self._modules and self.__dict__["_qkv_same_embed_dim"]

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, value: bool) -> None:
        self.__dict__["_qkv_same_embed_dim"] = value

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        real_queries: Tensor | None = None,
        ordered: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes attention as `nn.MultiheadAttention.forward` does; see there for the arguments.

        It is self-attention where `query` is the very tensor `key` or `value`; then `key_padding_mask` says which
        queries are padded, too.

        Args:
            real_queries: queries that are not padded, (B, M); for cross-attention.
            ordered: no query may feel a later one: the cross-attention of a causal decoder.

        Returns:
            The output, and the mixing matrix where `need_weights` is set and the mechanism has one (before dropout).
        """
        if query.is_nested or key.is_nested or value.is_nested:
            raise ConfigError(
                "converted attention does not take nested tensors: build nn.TransformerEncoder with "
                "enable_nested_tensor=False, or convert the encoder as a whole."
            )
        self_attention = query is key or query is value
        batched = query.ndim == 3
        q, k, v = self._project(*self._batch_first(query, key, value))
        keys, bias = self._read_padding(key_padding_mask, k)
        mask = self._read_mask(attn_mask, q, k)
        if real_queries is None and self_attention:
            real_queries = keys
        if is_causal and q.shape[-2] == k.shape[-2]:
            mask = None  # torch's rule: the hint says what the mask holds
        else:
            is_causal = False
        if self.bias_k is not None or self.add_zero_attn:
            k, v, keys, mask, bias, ordered = self._append(k, v, keys, mask, bias, is_causal, ordered)
            is_causal = False
        call: dict[str, Any] = {"mask": mask, "keys": keys, "queries": real_queries, "causal": is_causal}
        call |= {"bias": bias, "ordered": ordered}
        follow_dropout(self.infsa, self.dropout)
        heads = attend(self.infsa, q, k, v, **call)
        out = self.out_proj(heads.transpose(1, 2).flatten(2))
        out = (out if self.batch_first else out.transpose(0, 1)) if batched else out[0]
        if not need_weights or not self.infsa.capabilities.matrix:
            return out, None
        weights = attention_weights(self.infsa, q, k, **call)
        weights = weights.mean(1) if average_attn_weights else weights
        return out, weights if batched else weights[0]

    def _reset_parameters(self) -> None:
        """Resets torch's own parameters; transformers calls this while it loads a model."""
        core = self._modules.pop("infsa", None)
        super()._reset_parameters()
        if core is not None:
            self._modules["infsa"] = core

    def _batch_first(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns all three as (B, N, C); those that are one tensor stay one."""
        tensors = {id(x): x for x in (query, key, value)}
        for name, x in tensors.items():
            if x.ndim not in (2, 3):
                raise ConfigError(
                    f"attention takes (N, C) or three dimensions, not a tensor of shape {tuple(x.shape)}."
                )
            if x.ndim == 2:
                tensors[name] = x[None]
            elif not self.batch_first:
                tensors[name] = x.transpose(0, 1)
        return tensors[id(query)], tensors[id(key)], tensors[id(value)]

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the heads of queries, keys and values, (B, H, N, D)."""
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key and key is value:
            q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
            return self._heads(q), self._heads(k), self._heads(v)
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = map(F.linear, (query, key, value), weights, biases)
        return self._heads(q), self._heads(k), self._heads(v)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _read_padding(self, padding: Tensor | None, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns the real keys, (B, N), and a bias on keys, (B, 1, 1, N), where a float mask has finite numbers."""
        if padding is None:
            return None, None
        padding = padding if padding.ndim == 2 else padding[None]
        if padding.shape != (k.shape[0], k.shape[-2]):
            raise ConfigError(
                f"key_padding_mask of shape {tuple(padding.shape)} for {k.shape[0]} x {k.shape[-2]} keys."
            )
        return read_padding(self.infsa, padding if padding.is_floating_point() else ~padding.bool())

    def _read_mask(self, mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Returns torch's mask as (M, N) or (B, H, M, N): added to logits, or boolean with True for "takes part"."""
        if mask is None:
            return None
        batch, heads, queries, keys = *q.shape[:3], k.shape[-2]
        if mask.shape not in [(queries, keys), (batch * heads, queries, keys)]:
            raise ConfigError(
                f"attn_mask of shape {tuple(mask.shape)}: give ({queries}, {keys}) or "
                f"({batch * heads}, {queries}, {keys})."
            )
        mask = mask if mask.ndim == 2 else mask.unflatten(0, (batch, heads))
        return mask if mask.is_floating_point() else ~mask.bool()

    def _append(
        self,
        k: Tensor,
        v: Tensor,
        keys: Tensor | None,
        mask: Tensor | None,
        bias: Tensor | None,
        causal: bool,
        ordered: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, bool]:
        """Appends the key and value of `add_bias_kv`, then those of `add_zero_attn`, which every query sees."""
        if causal:
            mask = torch.ones(k.shape[-2], k.shape[-2], dtype=torch.bool, device=k.device).tril()
        ordered = ordered or causal or (mask is not None and in_order(mask))
        added = []
        if self.bias_k is not None and self.bias_v is not None:
            added.append((self.bias_k, self.bias_v))
        if self.add_zero_attn:
            added.append((k.new_zeros(1, 1, self.embed_dim),) * 2)
        for key, value in added:
            k = torch.cat([k, self._heads(key).to(k.dtype).expand(k.shape[0], -1, -1, -1)], -2)
            v = torch.cat([v, self._heads(value).to(v.dtype).expand(v.shape[0], -1, -1, -1)], -2)
        extra = (0, len(added))
        keys = None if keys is None else F.pad(keys, extra, value=True)
        mask = None if mask is None else F.pad(mask, extra, value=not mask.is_floating_point())
        bias = None if bias is None else F.pad(bias, extra)
        return k, v, keys, mask, bias, ordered


class InfSATransformerDecoderLayer(Converted, nn.TransformerDecoderLayer):
    """nn.TransformerDecoderLayer that tells its cross-attention which targets are padded, and that they are in order.

    Both matter to a mechanism that normalises over queries; torch's layer has no need to pass them on.
    """

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Applies the layer; arguments as in `nn.TransformerDecoderLayer.forward`."""
        ordered = tgt_is_causal or (tgt_mask is not None and in_order(_allowed(tgt_mask)))
        real = None if tgt_key_padding_mask is None else _allowed(tgt_key_padding_mask)

        def cross(x: Tensor) -> Tensor:
            out, _ = self.multihead_attn(
                x,
                memory,
                memory,
                attn_mask=memory_mask,
                key_padding_mask=memory_key_padding_mask,
                is_causal=memory_is_causal,
                need_weights=False,
                real_queries=real if real is None or real.ndim == 2 else real[None],
                ordered=ordered,
            )
            return self.dropout2(out)

        x = tgt
        if self.norm_first:
            x = x + self._sa_block(self.norm1(x), tgt_mask, tgt_key_padding_mask, tgt_is_causal)
            x = x + cross(self.norm2(x))
            return x + self._ff_block(self.norm3(x))
        x = self.norm1(x + self._sa_block(x, tgt_mask, tgt_key_padding_mask, tgt_is_causal))
        x = self.norm2(x + cross(x))
        return self.norm3(x + self._ff_block(x))


def find(model: nn.Module) -> list[Site]:
    """Returns every nn.MultiheadAttention of a model; subclasses, which may compute something else, as refused."""
    sites = []
    layers = {
        id(layer.multihead_attn): library_class(layer)
        for layer in model.modules()
        if isinstance(layer, nn.TransformerDecoderLayer) and library_class(layer) is not nn.TransformerDecoderLayer
    }
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        kind = type(module)
        refusal = None
        if kind.__module__ == "infvit.convert.attention":
            refusal = "infvit's own: its mechanism is an argument (mechanism=...)"
        elif kind not in (nn.MultiheadAttention, InfSAMultiheadAttention):
            refusal = f"a subclass of nn.MultiheadAttention ({kind.__module__}), which may compute something else"
        elif id(module) in layers:
            layer = layers[id(module)]
            refusal = (
                "the cross-attention of a subclass of nn.TransformerDecoderLayer "
                f"({layer.__module__}.{layer.__name__}), which does not tell it whether targets are in order or padded"
            )
        sites.append(
            Site(
                name,
                module,
                num_heads=module.num_heads,
                head_dim=module.head_dim,
                converted=InfSAMultiheadAttention,
                dropout=module.dropout,
                needs=frozenset({"cross"} if module.bias_k is not None or module.add_zero_attn else ()),
                refusal=refusal,
            )
        )
    return sites


def settle(model: nn.Module) -> None:
    """Keeps torch's encoders from nested tensors, and makes decoder layers pass on what converted attention needs."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            converted = any(isinstance(m, InfSAMultiheadAttention) for m in module.modules())
            if converted and module.use_nested_tensor:
                module.use_nested_tensor = False
                module.__dict__[NESTED] = True
            elif not converted and module.__dict__.pop(NESTED, False):
                module.use_nested_tensor = True
        elif type(module) in (nn.TransformerDecoderLayer, InfSATransformerDecoderLayer):
            converted = isinstance(module.multihead_attn, InfSAMultiheadAttention)
            module.__class__ = InfSATransformerDecoderLayer if converted else nn.TransformerDecoderLayer


def _allowed(mask: Tensor) -> Tensor:
    """Returns where one of torch's masks, in which True and -inf exclude, lets something take part."""
    return takes_part(mask if mask.is_floating_point() else ~mask.bool())


LIBRARY = Library("torch (nn.MultiheadAttention)", find, settle)
