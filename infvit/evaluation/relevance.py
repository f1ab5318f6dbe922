"""The map of relevance that the keys of `quality` ask for."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from infvit.config import EvalConfig
from infvit.errors import ConfigError
from infvit.models.inspect import AttentionCall


def chosen_call(calls: Sequence[AttentionCall], config: EvalConfig) -> AttentionCall:
    """Returns the attention layer that `quality.block` names.

    Raises:
        ConfigError: there is no such layer.
    """
    block = config.quality.block
    if not -len(calls) <= block < len(calls):
        raise ConfigError(f"quality.block={block}: the model has {len(calls)} attention layers, from 0.")
    return calls[block]


def relevance(calls: Sequence[AttentionCall], config: EvalConfig) -> Tensor:
    """Returns the maps that `quality` asks for, (B, rows, columns) in at least float32.

    Raises:
        ConfigError: no such layer, head or kind of map.
    """
    call, heads = chosen_call(calls, config), config.quality.heads
    maps = call.patch_map(config.quality.map)
    if heads == "mean":
        return maps.mean(1)
    if heads == "max":
        return maps.amax(1)
    if int(heads) >= maps.shape[1]:
        raise ConfigError(f"quality.heads={heads}: {call.name} has {maps.shape[1]} heads, from 0.")
    return maps[:, int(heads)]


def about(calls: Sequence[AttentionCall], config: EvalConfig) -> dict[str, Any]:
    """Returns what the map is of."""
    call = chosen_call(calls, config)
    return {
        "mechanism": call.mechanism.name,
        "map": call.kind(config.quality.map),
        "layer": call.name,
        "grid": f"{call.grid[0]}x{call.grid[1]}",
        "prefix_tokens": call.prefix,
    }
