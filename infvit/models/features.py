"""The tokens between the blocks of a vision transformer."""

from typing import Any

import torch
from torch import Tensor, nn

from infvit.errors import ConfigError


@torch.no_grad()
def block_tokens(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Runs a model once and returns its patch tokens, without prefix tokens: before the first block and after each.

    The model is in evaluation mode meanwhile, and left as it was.

    Args:
        model: any of ours, or one of timm's whose `blocks` pass on tokens (B, N, C).
        images: (B, C, height, width), as the model takes them.

    Returns:
        L + 1 tensors (B, N, C) for L blocks.

    Raises:
        ConfigError: the model has no such blocks, or they change the number of tokens.
    """
    kind, blocks = type(model).__name__, getattr(model, "blocks", None)
    if not isinstance(blocks, nn.Sequential | nn.ModuleList) or not len(blocks):
        raise ConfigError(f"{kind} has no `blocks` that pass on tokens, as timm's vision transformers have.")
    prefix = getattr(model, "num_prefix_tokens", 0)
    tokens: list[Tensor] = []

    def keep(value: Any) -> None:
        if not isinstance(value, Tensor) or value.ndim != 3:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(f"the blocks of {kind} pass on {found}, not tokens (B, N, C).")
        tokens.append(value[:, prefix:].detach())

    handles = [blocks[0].register_forward_pre_hook(lambda block, args: keep(args[0] if args else None))]
    handles += [block.register_forward_hook(lambda block, args, out: keep(out)) for block in blocks]
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()(images)
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training
    if len(tokens) != len(blocks) + 1:
        raise ConfigError(f"{kind} runs {len(tokens)} of its {len(blocks)} blocks; their tokens cannot be compared.")
    if len({value.shape for value in tokens}) > 1:
        shapes = sorted({tuple(value.shape[1:]) for value in tokens})
        raise ConfigError(f"the blocks of {kind} change the shape of the tokens ({shapes}); layers cannot be compared.")
    return tokens
