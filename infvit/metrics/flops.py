"""Floating-point operations, 1 MAC = 2 FLOPs: counted by torch, by a formula, and what the counter did not see."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from infvit.attention import NO_MASK, AttentionLayer
from infvit.models import InfViT


@dataclass(frozen=True)
class FlopCount:
    """What torch's counter found.

    Attributes:
        total: FLOPs of matrix products and convolutions; elementwise operations do not count.
        missed: operations that the counter has no formula for, though they may hold products. If there are any, `total`
            is too small.
    """

    total: int
    missed: tuple[str, ...]


class _Missed(TorchDispatchMode):
    """Collects operations that torch's counter passes over: fused attention, and those of other libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func._overloadpacket
        foreign = func.namespace not in ("aten", "prim", "prims", "profiler")
        if packet not in flop_registry and (foreign or "attention" in str(packet)):
            self.names[str(packet)] = None
        return func(*args, **(kwargs or {}))


def count(work: Callable[[], object]) -> FlopCount:
    """Counts the FLOPs of some work, backward passes included. On meta tensors it costs no memory and no time."""
    missed = _Missed()
    with FlopCounterMode(display=False) as counter, missed:
        work()
    return FlopCount(counter.get_total_flops(), tuple(missed.names))


def formula(model: nn.Module) -> int | None:
    """Returns the FLOPs of one forward pass of one image by arithmetic on the model's sizes.

    Per block: query, key and value projections, mixing, output projections, MLP. Linear InfSA is counted in its
    absorbed form: only the queries are projected per token, values and outputs once per head or image.

    Args:
        model: any; whether it has its form for inference is seen.

    Returns:
        None for models and mechanisms without a formula here.
    """
    if not isinstance(model, InfViT) or model.global_pool != "token":
        return None
    patches, width = model.patch_embed.num_patches, model.embed_dim
    tokens = patches + model.num_prefix_tokens
    macs = patches * model.patch_embed.proj.weight.numel()
    blocks: Any = model.blocks
    for block in blocks:
        attention = _attention(block.attn, tokens, width)
        if attention is None:
            return None
        read = 1 if model.class_token_only and block is blocks[-1] else tokens
        macs += attention + read * (block.mlp.fc1.weight.numel() + block.mlp.fc2.weight.numel())
    for layer in (model.pooler, model.head):
        macs += layer.weight.numel() if isinstance(layer, nn.Linear) else 0
    return 2 * macs


def _attention(layer: AttentionLayer, n: int, d: int) -> int | None:
    """Returns the multiply-accumulates of an attention layer on n tokens of width d."""
    projections = 2 if isinstance(layer.proj2, nn.Linear) else 1
    if layer.core.absorbs(NO_MASK):
        if layer.core.name != "infsa_linear":
            return None
        # pooled query n d; scores n d, or through an absorbed key projection; p mixes whole tokens once per head
        heads = layer.num_heads
        scores = n * d if layer.tie_key else d * d + heads * n * d
        return n * d * d + n * d + scores + heads * n * d + d * d + projections * d * d
    mixing = layer.core.macs(n)
    if mixing is None:
        return None
    extra = 0 if layer.extra is None else layer.extra.weight.numel()
    return (layer.qkv.weight.numel() + extra) * n + mixing + projections * n * d * d
