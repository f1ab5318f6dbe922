"""torchvision's shifted windows (Swin, Swin V2). Its ViT has nn.MultiheadAttention: see `infvit.convert.torch`."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2

from infvit.attention import Mechanism
from infvit.convert.call import attend, follow_dropout
from infvit.convert.site import Converted, Library, Site, library_class


def window_attention(
    core: Mechanism,
    x: Tensor,
    qkv: nn.Linear,
    proj: nn.Linear,
    bias: Tensor,
    window: list[int],
    shift: list[int],
    logit_scale: Tensor | None = None,
) -> Tensor:
    """Mixes tokens within windows of an image, shifted by half a window in every second layer.

    What torchvision's `shifted_window_attention` does, with the pairs that a shift brings together from opposite edges
    excluded, instead of lowered by 100, which only a softmax makes the same.

    Args:
        core: the mechanism.
        x: tokens, (B, height, width, C).
        qkv: projection to queries, keys and values.
        proj: output projection.
        bias: relative position bias, (1, H, W, W) for the W tokens of a window.
        window: its height and width.
        shift: by how much windows are moved down and right.
        logit_scale: logarithm of the scale of cosine attention (Swin V2), (H, 1, 1).

    Returns:
        Tokens, (B, height, width, C).
    """
    height, width = x.shape[1:3]
    below, right = (-size % step for size, step in zip((height, width), window, strict=True))
    x = F.pad(x, (0, 0, 0, right, 0, below))
    size = x.shape[1:3]
    shift = [0 if step >= full else by for full, step, by in zip(size, window, shift, strict=True)]
    x = _windows(x.roll([-by for by in shift], (1, 2)), window)
    biases: Tensor | None = qkv.bias
    if logit_scale is not None and biases is not None:
        third = biases.numel() // 3
        biases = torch.cat([biases[:third], torch.zeros_like(biases[:third]), biases[2 * third :]])
    q, k, v = F.linear(x, qkv.weight, biases).unflatten(-1, (3, core.num_heads, -1)).permute(2, 0, 3, 1, 4)
    scale = None
    if logit_scale is not None:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        scale = logit_scale.clamp(max=math.log(100.0)).exp()
    pairs = None
    if any(shift):
        regions = _regions(size, window, shift, x.device)
        pairs = (regions[:, None] == regions[:, :, None])[:, None]  # (windows, 1, W, W)
        pairs = pairs.repeat(x.shape[0] // len(pairs), 1, 1, 1)
    x = attend(core, q, k, v, scale=scale, mask=pairs, bias=bias)
    x = proj(x.transpose(1, 2).flatten(2))
    x = _image(x, size, window).roll(shift, (1, 2))
    return x[:, :height, :width].contiguous()


def _windows(x: Tensor, window: list[int]) -> Tensor:
    """Returns the windows of an image (B, height, width, C): (B times windows, W, C)."""
    x = x.unflatten(2, (-1, window[1])).unflatten(1, (-1, window[0]))
    return x.transpose(2, 3).flatten(0, 2).flatten(1, 2)


def _image(x: Tensor, size: torch.Size, window: list[int]) -> Tensor:
    """The inverse of `_windows`."""
    rows, columns = size[0] // window[0], size[1] // window[1]
    x = x.unflatten(1, window).unflatten(0, (-1, rows, columns))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _regions(size: torch.Size, window: list[int], shift: list[int], device: torch.device) -> Tensor:
    """Numbers the regions of a shifted image that were apart before the shift: (windows, W)."""
    marks = []
    for full, step, by in zip(size, window, shift, strict=True):
        position = torch.arange(full, device=device)
        marks.append((position >= full - step).long() + (position >= full - by).long())
    numbered = marks[0][:, None] * 3 + marks[1]
    return _windows(numbered[None, ..., None], window)[..., 0]


class InfSAShiftedWindowAttention(Converted, ShiftedWindowAttention):
    """torchvision's ShiftedWindowAttention whose windows are mixed by `self.infsa`."""

    def forward(self, x: Tensor) -> Tensor:
        """Mixes tokens (B, height, width, C) within windows."""
        return _shifted(self, x)


class InfSAShiftedWindowAttentionV2(Converted, ShiftedWindowAttentionV2):
    """The same for Swin V2: cosine attention with a learned scale per head."""

    def forward(self, x: Tensor) -> Tensor:
        """Mixes tokens (B, height, width, C) within windows."""
        return _shifted(self, x, self.logit_scale)


def _shifted(module: Any, x: Tensor, logit_scale: Tensor | None = None) -> Tensor:
    bias = module.get_relative_position_bias()
    follow_dropout(module.infsa, module.attention_dropout)
    out = window_attention(
        module.infsa, x, module.qkv, module.proj, bias, module.window_size, module.shift_size, logit_scale
    )
    return F.dropout(out, module.dropout, module.training)


CONVERTED: dict[type[nn.Module], type[nn.Module]] = {
    ShiftedWindowAttention: InfSAShiftedWindowAttention,
    ShiftedWindowAttentionV2: InfSAShiftedWindowAttentionV2,
}


def find(model: nn.Module) -> list[Site]:
    """Returns the windowed attention of a model."""
    return [
        Site(
            name,
            module,
            num_heads=module.num_heads,
            head_dim=module.qkv.in_features // module.num_heads,
            converted=CONVERTED[library_class(module)],
            dropout=module.attention_dropout,
            needs=frozenset({"bias", "pairwise"}),
        )
        for name, module in model.named_modules()
        if library_class(module) in CONVERTED
    ]


LIBRARY = Library("torchvision (ShiftedWindowAttention and V2)", find)
