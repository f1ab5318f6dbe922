"""What the attention layers of a model do to given images: queries, keys, mixing matrices, maps of relevance.

Ours are asked for their projections. Of timm's layers nothing is computed anew: their fused kernel is intercepted, so
that queries and keys are those that really enter the mixing, normalised, rotated, grouped and biased as that layer
does it. Whatever cannot be read in this way is refused by name; there is never a map of nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention, AttentionRope
from timm.models.beit import Attention as BeitAttention
from timm.models.eva import EvaAttention
from timm.models.vision_transformer import ParallelScalingBlock
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from infvit.attention import NO_MASK, AttentionLayer, Mask, Mechanism, SoftmaxAttention
from infvit.convert.site import converted_core
from infvit.errors import ConfigError, DataError, did_you_mean

TIMM_LAYERS = (Attention, AttentionRope, BeitAttention, EvaAttention, ParallelScalingBlock, RelPosAttention)
"""Layers of timm with one softmax over all tokens of an image, through one call of torch's fused kernel."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What one attention layer was given in one forward pass.

    Attributes:
        name: Path of the layer in the model.
        layer: Our `AttentionLayer`, or a layer of timm's, converted or not.
        mechanism: Its mechanism; softmax for timm's own.
        q: Queries as they enter the mixing, (B, H, N, D), not scaled by 1 / sqrt(D).
        k: Keys, likewise.
        tokens: What entered the layer, (B, N, C).
        prefix: How many of the N tokens come before the patches.
        grid: Rows and columns of the patches, which are the other tokens, row by row.
        class_token: Whether the first token is a class token.
        mask: What the layer adds to its logits, and which pairs it leaves out.
    """

    name: str
    layer: nn.Module
    mechanism: Mechanism
    q: Tensor
    k: Tensor
    tokens: Tensor
    prefix: int
    grid: tuple[int, int]
    class_token: bool
    mask: Mask = NO_MASK

    @torch.no_grad()
    def matrix(self) -> Tensor:
        """Returns the mixing matrix, (B, H, N, N), in at least float32: `output = matrix @ v`.

        Raises:
            ConfigError: the mechanism has none.
        """
        return self.mechanism.matrix(self.q, self.k, self.mask)

    def kind(self, asked: str | None = None) -> str:
        """Returns the kind of token map that is meant.

        Args:
            asked: one of the mechanism's `token_maps`; None: the first of them that is possible. The row of the class
                token is not where there is none; there softmax takes the column sums.

        Raises:
            ConfigError: no such kind here.
        """
        mechanism = self.mechanism
        if not mechanism.capabilities.token_map:
            raise ConfigError(f"{self.name}: attention mechanism {mechanism.name!r} has no token map to show.")
        possible = [kind for kind in mechanism.token_maps if kind != "class_token" or self.class_token]
        if asked is None and possible:
            return possible[0]
        if asked in possible and asked is not None:
            return asked
        if asked in mechanism.token_maps:
            raise ConfigError(f"{self.name}: the model has no class token, so no token map {asked!r}; use {possible}.")
        known = did_you_mean(str(asked), mechanism.token_maps)
        raise ConfigError(f"{self.name}: {mechanism.name} has no token map {asked!r}. {known}")

    @torch.no_grad()
    def token_map(self, kind: str | None = None) -> Tensor:
        """Returns the relevance of every token, prefix tokens too, (B, H, N), in at least float32; `kind` as there.

        Raises:
            ConfigError: the mechanism has no such map.
        """
        return self.mechanism.token_map(self.q, self.k, self.mask, self.kind(kind))

    def patch_map(self, kind: str | None = None) -> Tensor:
        """Returns the relevance of every patch, (B, H, rows, columns): the token map without the prefix tokens."""
        return self.token_map(kind)[..., self.prefix :].unflatten(-1, self.grid)


def attention_calls(model: nn.Module, images: Tensor) -> list[AttentionCall]:
    """Runs a model once and returns what its attention layers were given, in order.

    The model is in evaluation mode meanwhile, and left as it was: no hook, no gradient, every module in its old mode.

    Args:
        model: any of ours, or a vision transformer of timm's; also inside `torch.compile` or DDP.
        images: (B, C, height, width), as the model takes them.

    Raises:
        ConfigError: the model has no patch grid, or attention that cannot be read. The message names it.
    """
    return observe(model, images)[1]


def observe(model: nn.Module, images: Tensor) -> tuple[Tensor, list[AttentionCall]]:
    """Returns a model's output beside its `attention_calls`, from the same pass."""
    model = _unwrapped(model)
    recorder = _Recorder(model, images)
    with torch.no_grad(), _evaluating(model), _fused(recorder.names), recorder.hooks(), recorder:
        try:
            output: Tensor = model(images)
        except AssertionError as error:  # timm's word for images of another size
            raise ConfigError(f"{type(model).__name__} does not take images {tuple(images.shape)}: {error}") from error
    missed = [name for layer, name in recorder.names.items() if all(layer is not call.layer for call in recorder.calls)]
    if missed:
        raise ConfigError(f"{missed[0]} took no part in the forward pass of {type(model).__name__}; it has no map.")
    return output, recorder.calls


@torch.no_grad()
def attention_maps(model: nn.Module, images: Tensor, kind: str | None = None) -> Tensor:
    """Returns how relevant every patch is to every attention layer and head.

    Args:
        model: any of ours, or a vision transformer of timm's.
        images: (B, C, height, width), as the model takes them.
        kind: of the map, one of the mechanism's `token_maps`. By default Linear InfSA's weights a, the column sums of
            Pure InfSA, and softmax's class-token row (its column sums where there is no class token).

    Returns:
        Maps, (L, B, H, rows, columns) for L layers; prefix tokens (class, distillation, registers) are not in them.

    Raises:
        ConfigError: there is nothing to show: no patch grid, attention that cannot be read, no such map.
        DataError: a map is not finite.
    """
    calls = attention_calls(model, images)
    maps = [call.patch_map(kind) for call in calls]
    for call, relevance in zip(calls, maps, strict=True):
        if not relevance.isfinite().all():
            raise DataError(f"the map of {call.name} is not finite: NaN or infinity in the weights or the images.")
    return _stacked(calls, maps)


@torch.no_grad()
def mixing_matrices(model: nn.Module, images: Tensor) -> Tensor:
    """Returns the mixing matrix of every attention layer and head, (L, B, H, N, N), with N prefix tokens and patches.

    Args:
        model: any of ours, or a vision transformer of timm's.
        images: (B, C, height, width), as the model takes them.

    Raises:
        ConfigError: attention that cannot be read, or a mechanism without a matrix.
    """
    calls = attention_calls(model, images)
    return _stacked(calls, [call.matrix() for call in calls])


def _stacked(calls: Sequence[AttentionCall], tensors: Sequence[Tensor]) -> Tensor:
    heads = {tensor.shape[1] for tensor in tensors}
    if len(heads) > 1:
        raise ConfigError(
            f"the layers have {sorted(heads)} heads, which do not fit in one tensor; take attention_calls."
        )
    return torch.stack(list(tensors))


def _unwrapped(model: nn.Module) -> nn.Module:
    """Returns what torch.compile or DDP wrapped."""
    while isinstance(inner := getattr(model, "_orig_mod", getattr(model, "module", None)), nn.Module):
        model = inner
    return model


class _Recorder(TorchFunctionMode):
    """Follows a forward pass: which layer is at work, and what enters torch's fused kernel meanwhile."""

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        super().__init__()
        self.model = type(model).__name__
        self.batch = len(images)
        if images.ndim != 4 or not len(images):
            raise ConfigError(f"images must be (B, C, height, width), B at least 1, not {tuple(images.shape)}.")
        self.prefix, self.grid = patch_layout(model, (images.shape[-2], images.shape[-1]))
        self.class_token = getattr(model, "cls_token", None) is not None
        known = (AttentionLayer, *TIMM_LAYERS)
        self.names: dict[nn.Module, str] = {
            m: name for name, m in model.named_modules() if isinstance(m, known) or converted_core(m) is not None
        }
        self.others = _attention_like(model)
        if not self.names:
            readable = ", ".join(_full_name(layer) for layer in TIMM_LAYERS)
            raise ConfigError(
                f"{self.model} has no attention layer that can be read (it has: {self.others}); those that can are "
                f"AttentionLayer of infvit, and of timm {readable}."
            )
        self.calls: list[AttentionCall] = []
        self.inside: nn.Module | None = None
        self.entered: list[tuple[Tensor, Tensor, Mask]] = []

    @contextmanager
    def hooks(self) -> Iterator[None]:
        handles = []
        try:
            for layer in self.names:
                handles.append(layer.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(layer.register_forward_hook(self._leave, with_kwargs=True))
                core = converted_core(layer)
                if core is not None:
                    handles.append(core.register_forward_pre_hook(self._mix))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("attn_mask") is not None or kwargs.get("is_causal"):
            raise ConfigError(f"{self.names[layer]} is called with a mask; maps are of whole images only.")
        self.inside, self.entered = layer, []

    def _mix(self, core: nn.Module, args: tuple[Any, ...]) -> None:
        """Notes what enters the mechanism of a converted layer."""
        q, k, _, mask = args
        self.entered.append((q, k, mask))

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.inside = None
        name, tokens, mask = self.names[layer], args[0].detach(), NO_MASK
        mechanism: Mechanism
        if isinstance(layer, AttentionLayer):
            mechanism = layer.core
            q, k, _ = layer.project(tokens)
        elif len(self.entered) == 1:
            q, k, mask = self.entered[0]
            mechanism = converted_core(layer) or SoftmaxAttention(q.shape[1], q.shape[-1])
        else:
            raise ConfigError(
                f"{name} ({_full_name(type(layer))}) runs the fused kernel {len(self.entered)} times, not once; it "
                "cannot be read."
            )
        length = self.prefix + self.grid[0] * self.grid[1]
        if (q.shape[0], q.shape[-2]) != (self.batch, length) or tokens.shape[:2] != (self.batch, length):
            raise ConfigError(
                f"{name} mixes {q.shape[-2]} tokens of {q.shape[0]} sequences, but {self.batch} images have "
                f"{self.prefix} + {self.grid[0]} x {self.grid[1]} tokens each: {self.model} has no map of whole images."
            )
        where = (self.prefix, self.grid, self.class_token)
        self.calls.append(AttentionCall(name, layer, mechanism, q, k, tokens, *where, mask))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._note(*args, **kwargs)
        return func(*args, **kwargs)

    def _note(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        if self.inside is not None and converted_core(self.inside) is not None:
            return  # `_mix` has seen it, whatever kernel the mechanism runs
        if self.inside is None:
            if query.shape[-2] == key.shape[-2] > 1:  # attention that pools has its own, few queries
                raise ConfigError(f"{self.model} has self-attention that cannot be read (among: {self.others}).")
            return
        if is_causal or enable_gqa or scale not in (None, query.shape[-1] ** -0.5):
            where = f"{self.names[self.inside]} ({_full_name(type(self.inside))})"
            raise ConfigError(f"{where} is causal, shares keys or has a scale of its own; it cannot be read.")
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
        self.entered.append((query, key, Mask(bias=attn_mask)))


def patch_layout(model: nn.Module, size: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    """Returns the number of prefix tokens and the patch grid for images of a height and width.

    Raises:
        ConfigError: the model has no patch grid.
    """
    model = _unwrapped(model)
    prefix = getattr(model, "num_prefix_tokens", None)
    feat_size = getattr(getattr(model, "patch_embed", None), "dynamic_feat_size", None)
    if not isinstance(prefix, int) or feat_size is None:
        raise ConfigError(
            f"{type(model).__name__} is not a vision transformer with prefix tokens and one patch grid, as timm's are; "
            "there is no map to show."
        )
    rows, columns = feat_size(size)
    return prefix, (int(rows), int(columns))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Puts every module into evaluation mode and each back into the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _fused(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Makes timm's layers take the fused kernel, which is watched; the same function up to rounding."""
    switched: list[Any] = [layer for layer in layers if getattr(layer, "fused_attn", None) is False]
    try:
        for layer in switched:
            layer.fused_attn = True
        yield
    finally:
        for layer in switched:
            layer.fused_attn = False


def _full_name(cls: type) -> str:
    return f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"


def _attention_like(model: nn.Module) -> str:
    """Names the classes of a model that look like attention."""
    found = {_full_name(type(module)) for module in model.modules() if "att" in type(module).__name__.lower()}
    return ", ".join(sorted(found)) or "nothing that is called attention"
