"""Fixtures over all models of the package. The large ones are built narrow and shallow; their full size is checked on
the meta device."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import nn

from infvit.models.infvit import PEERS

# Those with the mechanisms of other papers have tests of their own: test_model_peers.py, test_model_agf.py.
OTHERS = {f"vit_4l_{attention}" for attention in PEERS} | set(timm.list_models("*agf*", module="infvit"))
MODELS = [name for name in timm.list_models(module="infvit") if name not in OTHERS]
MINIS = [name for name in MODELS if name.endswith("_mini")]
SMALL: dict[str, Any] = {"depth": 2, "num_classes": 10}
NARROW: dict[str, Any] = {**SMALL, "embed_dim": 128, "img_size": 64}


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    """Each model of the package."""
    return request.param


@pytest.fixture(params=MINIS)
def mini(request: pytest.FixtureRequest) -> str:
    """The mini model of each mechanism."""
    return request.param


@pytest.fixture
def create() -> Callable[..., nn.Module]:
    """Creates a model by name, reduced in depth and (the large ones) width, in eval mode, with its initial values."""

    def create(name: str, **kwargs: Any) -> nn.Module:
        return timm.create_model(name, **{**(SMALL if name in MINIS else NARROW), **kwargs}).eval()

    return create


@pytest.fixture
def build(create: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Like `create`, with every parameter moved away from its initial value.

    Biases start at 0, norms at 1, the class token near 0, and the head of the minis at 0: a model at its start hides
    most mistakes.
    """

    def build(name: str, **kwargs: Any) -> nn.Module:
        model = create(name, **kwargs)
        if not {"checkpoint_path", "pretrained"} & kwargs.keys():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
        return model

    return build


@pytest.fixture
def images() -> Callable[..., torch.Tensor]:
    """Makes random images of the size that a model expects."""

    def images(model: nn.Module, batch: int = 2, size: tuple[int, int] | None = None) -> torch.Tensor:
        like = next(model.parameters())
        return torch.randn(batch, model.in_chans, *(size or model.patch_embed.img_size), dtype=like.dtype)

    return images
