"""The models of timm in the table of converted models: small, with random weights everywhere."""

from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from infvit.testing.converted import Subject

MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 32},
    "deit_tiny_patch16_224": {"img_size": 32},
    "deit_tiny_distilled_patch16_224": {"img_size": 32},
    "vit_small_patch14_reg4_dinov2": {"img_size": 28, "embed_dim": 96, "num_heads": 3},
    "vit_tiny_patch16_224 with qk_norm": {"img_size": 32, "qk_norm": True, "scale_attn_norm": True},
    "eva02_tiny_patch14_224": {"img_size": 28},
    "beit_base_patch16_224": {"img_size": 32, "embed_dim": 96, "num_heads": 3},
    "swin_tiny_patch4_window7_224": {
        "img_size": 56,
        "depths": (2,),
        "embed_dim": 24,
        "num_heads": (3,),
        "drop_path_rate": 0.0,
    },
}
BIASED = {"beit_base_patch16_224", "swin_tiny_patch4_window7_224"}  # by relative position
NAFLEX = "naflexvit_base_patch16_gap"


def build(name: str, **options: Any) -> nn.Module:
    """Returns a model of `MODELS`, or `NAFLEX`, of two layers."""
    options = {"num_classes": 5, **MODELS.get(name, {"embed_dim": 48, "num_heads": 3}), **options}
    if "depths" not in options:
        options.setdefault("depth", 2)
    model: nn.Module = timm.create_model(name.split()[0], **options)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def images(name: str) -> Tensor:
    """Returns two images for a model of `MODELS`, always the same."""
    size = MODELS[name]["img_size"]
    return torch.randn(2, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def naflex(model: nn.Module, padding: int = 0) -> Tensor:
    """Runs `NAFLEX` on an image of 2 x 3 patches, with more patches behind them that are padding."""
    patches = torch.randn(1, 6, 16 * 16 * 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    where = torch.tensor([[[y, x] for y in range(2) for x in range(3)]])
    out: Tensor = model(
        {
            "patches": F.pad(patches, (0, 0, 0, padding), value=7.0),
            "patch_coord": F.pad(where, (0, 0, 0, padding)),
            "patch_valid": F.pad(torch.ones(1, 6, dtype=torch.bool), (0, padding)),
        }
    )
    return out


def subjects() -> list[Subject]:
    """Returns the models, as `infvit.testing.converted` takes them."""
    found = []
    for name in MODELS:
        swin = name.startswith("swin")
        found.append(
            Subject(
                "timm",
                name,
                partial(build, name),
                partial(_call, name),
                head_dim=8 if swin else None,  # timm's Swin calls softmax itself
                excluded=-50.0 if swin else -1e4,  # and its masks add -100
                linear=name not in BIASED,
            )
        )
    return found


def _call(name: str, model: nn.Module) -> Tensor:
    out: Tensor = model(images(name))
    return out
