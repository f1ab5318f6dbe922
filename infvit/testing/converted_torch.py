"""The models of torch and torchvision in the table of converted models: small, of random weights."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer, swin_transformer

from infvit.testing.converted import Subject

WIDTH, HEADS, TOKENS, REAL = 16, 2, 7, 5


def subjects() -> list[Subject]:
    """Returns them."""
    sizes: dict[str, Any] = {"dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
    return [
        _sequences("MultiheadAttention", lambda: _Attention(), False),
        _sequences("TransformerEncoder", lambda: _Encoder(sizes), True),
        _sequences("TransformerDecoder", lambda: _Decoder(sizes), True),
        _sequences("a hand-written block", lambda: _Block(), True),
        _images("vit_b_16", lambda: VisionTransformer(32, 8, 2, HEADS, WIDTH, 32, num_classes=5)),
        _images("swin_t", partial(swin, ""), head_dim=8, excluded=-50.0, linear=False),
        _images("swin_v2_t", partial(swin, "V2"), head_dim=8, excluded=-50.0, linear=False),
    ]


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.attn(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=False)[0]
        return out


class _Block(_Attention):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, padding: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = x + super().forward(self.norm(x), padding, mask)
        return x + self.mlp(x).relu()


class _Encoder(nn.Module):
    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, **sizes), 2)

    def forward(self, x: Tensor, padding: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.layers(x, mask=mask, src_key_padding_mask=padding)
        return out


class _Decoder(nn.Module):
    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, **sizes), 2)

    def forward(self, x: Tensor, padding: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        memory = torch.linspace(-1, 1, 3 * WIDTH, dtype=x.dtype).view(1, 3, WIDTH).sin().expand(len(x), -1, -1)
        out: Tensor = self.layers(x, memory, tgt_mask=mask, tgt_key_padding_mask=padding)
        return out


def _sequences(name: str, build: Callable[[], nn.Module], causal: bool) -> Subject:
    def call(model: nn.Module) -> Tensor:
        out: Tensor = model(_random(2, TOKENS, WIDTH))
        return out

    def earlier(model: nn.Module) -> tuple[Tensor, Tensor]:
        x, mask = _random(2, TOKENS, WIDTH), nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=torch.float64)
        later = torch.cat([x[:, :REAL], 10 * x[:, REAL:]], 1)
        return model(x, mask=mask)[:, :REAL], model(later, mask=mask)[:, :REAL]

    def padded(model: nn.Module) -> tuple[Tensor, Tensor]:
        x = _random(2, TOKENS, WIDTH)
        padding = torch.arange(TOKENS).expand(2, -1) >= REAL
        return model(x[:, :REAL]), model(x, padding=padding)[:, :REAL]

    return Subject("torch", name, partial(_filled, build), call, causal=earlier if causal else None, padding=padded)


def _images(name: str, build: Callable[[], nn.Module], **options: Any) -> Subject:
    def call(model: nn.Module) -> Tensor:
        out: Tensor = model(_random(2, 3, 32, 32))
        return out

    return Subject("torchvision", name, partial(_filled, build), call, **options)


def swin(version: str) -> nn.Module:
    """Returns a small Swin Transformer of torchvision; the version is "" or "V2"."""
    return swin_transformer.SwinTransformer(
        [4, 4],
        8,
        [2, 2],
        [1, 2],
        [4, 4],
        num_classes=5,
        stochastic_depth_prob=0.0,
        block=getattr(swin_transformer, f"SwinTransformerBlock{version}"),
        downsample_layer=getattr(swin_transformer, f"PatchMerging{version}"),
    )


def _filled(build: Callable[[], nn.Module]) -> nn.Module:
    """Fills all weights with random numbers: those that start at 0 would hide what they are multiplied with."""
    model = build()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
