"""How a mechanism gets into a forward of timm's: by the one call in it that mixes tokens.

timm's attention calls either torch's fused kernel or a softmax of logits that it made itself. While a converted module
runs timm's own forward, a function mode watches for that call and answers it with the mechanism. It works under
`torch.compile` (no graph break) and `torch.export` as in eager mode. A forward that makes no such call, or two, fails:
it would be softmax without a word.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from infvit.convert.call import attend, attention_weights, follow_dropout, read_padding
from infvit.convert.site import Converted
from infvit.errors import ConfigError


class _Watch(TorchFunctionMode):
    """Answers the calls of one forward of one module.

    Attributes:
        tokens: what the module was given.
        pairs: the pairs of tokens that take part, (number of windows, N, N); None: all.
        calls: the functions that were answered.
    """

    def __init__(self, module: "Door", tokens: Tensor, pairs: Tensor | None, calls: list[Any]) -> None:
        super().__init__()
        self.module = module
        self.tokens = tokens
        self.pairs = pairs
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.module.watched:
            self.calls.append(func)
            return self.module.answer(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class Door(Converted, nn.Module):
    """Runs timm's forward with its one call of `watched` answered by `answer`.

    Attributes:
        watched: the functions that mix tokens.
        heads_in_batch: the class mixes (B * H, ...), not (B, H, ...).
        groups: which dimension of five (B, H and windows, tokens, channels) are windows, each with its own attention.
    """

    watched: ClassVar[tuple[Any, ...]]
    heads_in_batch: ClassVar[bool] = False
    groups: ClassVar[int] = 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes what timm's class does, with the mechanism for its attention; the arguments are timm's."""
        return self._watched(None, *args, **kwargs)

    def answer(self, watch: _Watch, *args: Any, **kwargs: Any) -> Tensor:
        """Answers a watched call with those arguments."""
        raise NotImplementedError(f"{type(self).__name__}.answer is missing: every door has one.")

    def _watched(self, pairs: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        calls: list[Any] = []  # a list of its own: torch.compile does not let us read the mode afterwards
        with _Watch(self, args[0] if args else kwargs["x"], pairs, calls):
            out = super().forward(*args, **kwargs)
        if len(calls) != 1:
            raise ConfigError(
                f"{type(self).original().__name__} of this timm mixes tokens in {len(calls)} calls, not in one as in "
                "timm 1.0.31, so nothing is converted here. Leave it out (exclude=...) or install that version."
            )
        return out

    def _fold(self, x: Tensor) -> Tensor:
        """Brings queries, keys, values or logits to (B, H, M, D); windows join the batch."""
        if self.heads_in_batch:
            x = x.unflatten(0, (-1, self.infsa.num_heads))
        return x.movedim(self.groups, 1).flatten(0, 1) if x.ndim == 5 else x

    def _unfold(self, x: Tensor, like: Tensor) -> Tensor:
        """Undoes `_fold`; `like` is what was folded."""
        if self.heads_in_batch:
            like = like.unflatten(0, (-1, self.infsa.num_heads))
        if like.ndim == 5:
            x = x.unflatten(0, (-1, like.shape[self.groups])).movedim(1, self.groups)
        return x.flatten(0, 1) if self.heads_in_batch else x


class FusedDoor(Door):
    """For classes that can call torch's fused kernel; they always do, so that there is one call to watch.

    Attributes:
        mask_is_bias: the kernel's mask is a bias of the class's own, all finite.
        self_attention: queries and keys are the same tokens, so that a mask of keys says which queries are padded.
    """

    watched = (F.scaled_dot_product_attention,)
    mask_is_bias: ClassVar[bool] = False
    self_attention: ClassVar[bool] = True

    @property
    def fused_attn(self) -> bool:
        """timm's switch between its two ways to compute; what is set on the module counts again after `revert`."""
        return True

    @fused_attn.setter
    def fused_attn(self, value: bool) -> None:
        self.__dict__["fused_attn"] = value

    def answer(
        self,
        watch: _Watch,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """Answers torch's fused kernel."""
        if self.training:
            follow_dropout(self.infsa, dropout_p)  # what timm's module has now
        q, k, v = self._fold(query), self._fold(key), self._fold(value)
        call: dict[str, Any] = {"scale": scale, "causal": is_causal, "mask": attn_mask}
        if self.mask_is_bias:
            call["mask"] = None if watch.pairs is None else _for_each_image(watch.pairs, q)
            call["bias"] = None if attn_mask is None else self._fold(attn_mask)
        elif attn_mask is not None and self._only_keys(attn_mask, q, k):
            real, bias = read_padding(self.infsa, attn_mask[:, 0, 0].expand(q.shape[0], -1))
            call |= {"mask": None, "keys": real, "queries": real, "bias": bias}
        if self.infsa.extra_dim:
            extra = self.infsa.get_submodule("extra")(watch.tokens)
            q = torch.cat([q, extra.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)], -1)
        return self._unfold(attend(self.infsa, q, k, v, **call), query)

    def _only_keys(self, mask: Tensor, q: Tensor, k: Tensor) -> bool:
        same = self.self_attention and q.shape[-2] == k.shape[-2] > 1
        return same and mask.ndim == 4 and mask.shape[1:3] == (1, 1)


class SoftmaxDoor(Door):
    """For classes that call a softmax of their own logits: the mechanism gives the matrix from the logits.

    Their logits are those of queries that are 0 and a bias: `q k^T / sqrt(D) + bias = bias`.
    """

    watched = (torch.softmax, Tensor.softmax, F.softmax)

    def answer(self, watch: _Watch, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Answers a softmax over the keys."""
        bias = self._fold(logits)
        batch, heads, queries, keys = bias.shape
        zero = bias.new_zeros(1)
        q, k = (zero.expand(batch, heads, tokens, self.infsa.head_dim) for tokens in (queries, keys))
        pairs = None if watch.pairs is None else _for_each_image(watch.pairs, bias)
        return self._unfold(attention_weights(self.infsa, q, k, mask=pairs, bias=bias), logits).to(logits.dtype)


class ShiftedWindows(Door):
    """For Swin's window attention: its mask adds -100 to pairs that are no neighbours, which means to leave them out.

    Softmax gives them weight 0 in any case; another activation need not.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Computes what timm's class does; `mask` is (number of windows, N, N), not 0 where a pair takes no part."""
        return self._watched(None if mask is None else mask == 0, x)


def _for_each_image(pairs: Tensor, q: Tensor) -> Tensor:
    """Repeats pairs of windows, (windows, N, N), for each image: (B * windows, 1, N, N)."""
    return pairs.repeat(q.shape[0] // pairs.shape[0], 1, 1)[:, None]
