"""The whole model against independent judges: a straight-line float64 forward, and timm's own block."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def layer_norm(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return x @ w[f"{name}.weight"].mT + w[f"{name}.bias"]


def softmax(q: Tensor, k: Tensor, v: Tensor, gamma: float) -> Tensor:
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def pure(q: Tensor, k: Tensor, v: Tensor, gamma: float) -> Tensor:
    scores = (q @ k.mT / q.shape[-1]).clamp(min=0)
    return gamma * scores / (scores.square().sum().sqrt() + 1e-6) @ v


def pooled(q: Tensor, k: Tensor, v: Tensor, gamma: float) -> Tensor:
    q, k = q / q.shape[-1] ** 0.5, k / k.shape[-1] ** 0.5
    norms = q.square().sum(-1).sqrt()
    centre = (norms / (norms.sum() + 1e-6)) @ q
    weights = (k @ centre).clamp(min=0)
    context = gamma * (weights / (weights.sum() + 1e-6)) @ v
    return torch.stack([context] * q.shape[0])


def straight_line(w: dict[str, Tensor], image: Tensor, patch: int, depth: int, heads: int, mix: Callable) -> Tensor:
    """One image (C, H, W) to its logits, from the state dict alone; heads one by one."""
    patches = F.unfold(image[None], patch, stride=patch)[0].T
    tokens = patches @ w["patch_embed.proj.weight"].flatten(1).T + w["patch_embed.proj.bias"]
    x = torch.cat([w["cls_token"][0], tokens]) + w["pos_embed"][0]
    for i in range(depth):
        block = f"blocks.{i}"
        qkv = linear(layer_norm(x, w, f"{block}.norm1"), w, f"{block}.attn.qkv")
        width = x.shape[-1]
        q, v = qkv[:, :width], qkv[:, -width:]
        k = qkv[:, width : 2 * width] if qkv.shape[-1] == 3 * width else q
        logit = w.get(f"{block}.attn.core.decay.logit")
        gamma = None if logit is None else 1 / (1 + math.exp(-logit.item()))
        size = width // heads
        parts = [slice(h * size, (h + 1) * size) for h in range(heads)]
        mixed = torch.cat([mix(q[:, p], k[:, p], v[:, p], gamma) for p in parts], dim=-1)
        x = x + linear(linear(mixed, w, f"{block}.attn.proj"), w, f"{block}.attn.proj2")
        hidden = linear(layer_norm(x, w, f"{block}.norm2"), w, f"{block}.mlp.fc1")
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        x = x + linear(hidden, w, f"{block}.mlp.fc2")
    token = layer_norm(x, w, "norm")[0]
    return linear(linear(token, w, "pooler").tanh(), w, "head")


def shaken(model: nn.Module) -> nn.Module:
    """Moves every parameter away from its initial value: biases start at 0, norms at 1, the class token near 0."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    ("name", "mix"), [("vit_mini", softmax), ("infvit_pure_mini", pure), ("infvit_linear_mini", pooled)]
)
def test_model_equals_a_straight_line_forward(name: str, mix: Callable):
    model = timm.create_model(name, embed_dim=24, num_heads=3, depth=3, img_size=(12, 8), num_classes=5)
    model = shaken(model.double().eval())
    images = torch.randn(4, 3, 12, 8, dtype=torch.float64)
    with torch.no_grad():
        logits = model(images)
        expected = torch.stack([straight_line(model.state_dict(), i, 4, 3, 3, mix) for i in images])
    assert expected.std(0).min() > 1e-3, "the images must matter"
    torch.testing.assert_close(logits, expected, rtol=1e-11, atol=1e-12)


def test_untied_linear_model_equals_a_straight_line_forward():
    model = timm.create_model(
        "infvit_linear_mini", tie_key=False, embed_dim=24, num_heads=3, depth=2, img_size=8, num_classes=5
    )
    model = shaken(model.double().eval())
    assert model.blocks[0].attn.qkv.out_features == 3 * 24
    images = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        expected = torch.stack([straight_line(model.state_dict(), i, 4, 2, 3, pooled) for i in images])
        torch.testing.assert_close(model(images), expected, rtol=1e-11, atol=1e-12)


DEIT: dict[str, Any] = {"img_size": 32, "patch_size": 16, "embed_dim": 192, "num_heads": 3, "depth": 2}


def test_softmax_blocks_equal_timms_own_block_with_deit_weights():
    """A DeiT state dict loads as it is: only the pooled layer has no counterpart."""
    theirs = shaken(timm.create_model("deit_tiny_patch16_224", img_size=32, depth=2).double().eval())
    ours = timm.create_model("vit_mini", **DEIT, num_classes=1000, double_proj=False).double().eval()
    result = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert sorted(result.missing_keys) == ["pooler.bias", "pooler.weight"]
    assert result.unexpected_keys == []
    x = torch.randn(2, 5, 192, dtype=torch.float64)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        for mine, block in zip(ours.blocks, theirs.blocks, strict=True):
            torch.testing.assert_close(mine(x), block(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours.forward_features(images), theirs.forward_features(images))


@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": True},
        {"scale_attn_norm": True, "scale_mlp_norm": True},
        {"qkv_bias": False, "proj_bias": False},
        {"init_values": 0.1},
    ],
    ids=lambda o: next(iter(o)),
)
def test_options_of_timms_block_reach_ours(options: dict[str, Any]):
    """Same names, same shapes, same function, for every option that timm hands to a block."""
    theirs = shaken(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, **options).double().eval())
    ours = timm.create_model("vit_mini", **{**DEIT, "depth": 1}, double_proj=False, num_classes=1000, **options)
    ours = ours.double().eval()
    assert ours.load_state_dict(theirs.state_dict(), strict=False).unexpected_keys == []
    assert ours.blocks.state_dict().keys() == theirs.blocks.state_dict().keys()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours.forward_features(images), theirs.forward_features(images))
