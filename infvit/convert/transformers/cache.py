"""transformers' dynamic cache with what Pure InfSA needs beside keys and values: the running sums of squares."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from infvit.errors import ConfigError


class _RunningSquares(CacheLayerMixin):
    """A layer of a cache that also keeps, for each cached token and head, the squared norm of the rows up to it.

    One number for each token, so that the cache can be cropped to any of them; `squares` is (B, H, N).
    """

    squares: Tensor | None = None

    @classmethod
    def of(cls, layer: Any) -> "_RunningSquares":
        """Returns a layer with what another one holds: a compiled graph cannot give that one another class."""
        new = object.__new__(cls)
        for name, value in vars(layer).items():
            setattr(new, name, value)
        return new

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)  # type: ignore[misc]
        if tokens_to_remove and self.squares is not None:
            self.squares = self.squares[..., : -abs(tokens_to_remove)]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        if self.squares is not None:
            self.squares = self.squares.repeat_interleave(repeats, 0)

    def _select(self, indices: Tensor) -> None:
        if self.squares is not None:
            self.squares = self.squares[indices.to(self.squares.device)]


class PureLayer(_RunningSquares, DynamicLayer):
    """DynamicLayer with running sums of squares."""


class PureSlidingWindowLayer(_RunningSquares, DynamicSlidingWindowLayer):
    """DynamicSlidingWindowLayer with running sums of squares; those of tokens that left the window stay, too."""


KINDS: dict[type, type[_RunningSquares]] = {
    DynamicLayer: PureLayer,
    DynamicSlidingWindowLayer: PureSlidingWindowLayer,
}


def cached_layer(cache: Any, index: int | None, with_squares: bool = False) -> Any:
    """Returns the layer of a cache that a module of attention has just written its new tokens to.

    Args:
        cache: the cache.
        index: of the layer.
        with_squares: put one that has a place for running sums of squares where there is none yet.

    Raises:
        ConfigError: a cache other than `DynamicCache`, which may hold tokens elsewhere, or not as they were.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    kind = type(cache).__name__
    if type(cache) is not DynamicCache or index is None:
        what = f"cache {kind}" if isinstance(cache, Cache) else f"{kind} as a cache"
        raise ConfigError(f"converted attention does not support the {what}: use DynamicCache, or use_cache=False.")
    if cache.offloading:
        raise ConfigError(
            "converted attention does not support an offloaded cache: use DynamicCache(offloading=False)."
        )
    layer = cache.layers[index]
    if type(layer) not in KINDS and not isinstance(layer, _RunningSquares):
        raise ConfigError(
            f"converted attention does not support the cache layer {type(layer).__name__}: it supports "
            f"{', '.join(known.__name__ for known in KINDS)}; or use_cache=False."
        )
    if with_squares and type(layer) in KINDS:
        layer = cache.layers[index] = KINDS[type(layer)].of(layer)
    return layer


class _WithoutGradient(torch.autograd.Function):
    """Passes sums of squares on; a backward pass, which would leave out what they depend on, is refused."""

    @staticmethod
    def forward(ctx: Any, squares: Tensor, _: Tensor) -> Tensor:
        return squares.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise ConfigError("Pure InfSA keeps no gradients of earlier calls in a cache: train on whole sequences.")


def past_squares(layer: Any, new: int, name: str, keys: Tensor) -> Tensor | None:
    """Returns the sums of squares behind the last token before the `new` ones, (B, H); None where there is none.

    Args:
        layer: the layer of the cache, with the new tokens in it.
        new: how many these are.
        name: of the module, for the error.
        keys: those of the layer.

    Raises:
        ConfigError: the cache was filled, or cut, without keeping them.
    """
    past = layer.get_seq_length() - new
    if past == 0:
        return None
    squares = getattr(layer, "squares", None)
    if squares is None or squares.shape[-1] != past:
        raise ConfigError(
            f"the cache holds {past} earlier tokens of {name} without the sums of squares of Pure InfSA: a model "
            "that was not converted filled it, something other than its own methods changed it, or those tokens saw "
            "later ones (a prefix that is not causal). Begin with a new DynamicCache; in the last case: use_cache="
            "False."
        )
    return _WithoutGradient.apply(squares[..., -1], keys)


def keep_squares(layer: Any, squares: Tensor, past: Tensor | None) -> None:
    """Stores the sums of squares of new tokens, (B, H, M), in a layer with a place for them."""
    squares = squares.detach()
    layer.squares = squares if past is None else torch.cat([layer.squares, squares], -1)
