"""The health of heads in the metrics of a run: right, the same on several processes, and without any influence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torchvision.transforms.functional import to_tensor

from infvit.config import TrainConfig
from infvit.data import build_source, eval_transform
from infvit.data.loader import EvalDataset
from infvit.engine import loop, train
from infvit.engine.health import first_images, layer_health
from infvit.errors import DataError

Config = Callable[..., TrainConfig]
NAMES = ("dead_heads", "dead_rows", "spectral_radius")
CPU = torch.device("cpu")


def model_of(name: str, **arguments: Any) -> torch.nn.Module:
    return timm.create_model(name, num_classes=3, img_size=16, embed_dim=24, num_heads=2, **{"depth": 2, **arguments})


@pytest.mark.parametrize("name", ["infvit_pure_mini", "infvit_linear_mini"])
def test_by_hand(name: str) -> None:
    model, images = model_of(name, drop_path_rate=0.5), torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight.mul_(3)
        model.blocks[1].attn.qkv.weight[:12] = 0
        model.blocks[1].attn.qkv.bias[:12] = 0  # head 0 of the last layer scores 0 everywhere
    model.train()
    found = layer_health(model, images, CPU)
    assert model.training
    assert model.blocks[0].drop_path1.training
    inputs: list[torch.Tensor] = []
    for block in model.blocks:
        block.attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        model.eval()(images)
    assert tuple(found) == NAMES
    for layer, x in enumerate(inputs):
        m = model.blocks[layer].attn.matrix(x).detach().double().numpy()
        assert found["dead_heads"][layer] == pytest.approx((m == 0).all((-1, -2)).mean())
        assert found["dead_rows"][layer] == pytest.approx((m == 0).all(-1).mean())
        radius = np.abs(np.linalg.eigvals(m)).max(-1).mean()
        assert found["spectral_radius"][layer] == pytest.approx(radius, rel=1e-4)
    assert found["dead_heads"] == [0.0, 0.5]
    assert found["dead_rows"][1] >= 0.5


def test_reads_only() -> None:
    """No hook, gradient or random number is left behind, also after an error."""
    model, images = model_of("infvit_pure_mini", proj_drop_rate=0.5), torch.randn(2, 3, 16, 16)
    before = torch.get_rng_state()
    layer_health(model.train(), images, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(Exception, match="channels"):
        layer_health(model, images[:, :1], CPU)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_other_attention_and_too_many_tokens_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randn(2, 3, 16, 16)
    assert layer_health(model_of("vit_mini"), images, CPU) == {}
    assert layer_health(model_of("infvit_pure_mini"), torch.empty(0), CPU) == {}
    monkeypatch.setattr("infvit.engine.health.TOKENS", 17)
    assert layer_health(model_of("infvit_pure_mini"), images, CPU)
    monkeypatch.setattr("infvit.engine.health.TOKENS", 16)
    assert layer_health(model_of("infvit_pure_mini"), images, CPU) == {}


def test_a_run_is_the_same_with_and_without(
    rich: Config, rows: Any, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout, stochastic depth and all: not a bit of the weights differs."""
    train(rich(run="with"))
    monkeypatch.setattr(loop, "layer_health", lambda *args: {})
    train(rich(run="without"))
    folders = [Path(str(rich(run=run).run_dir)) for run in ("with", "without")]
    one, other = (load(folder / "last.pt")["state_dict"] for folder in folders)
    assert all(torch.equal(one[name], other[name]) for name in one)
    first, second = (rows(folder) for folder in folders)
    assert all(len(row[name]) == 2 for row in first for name in NAMES)
    assert not any(name in row for row in second for name in NAMES)
    assert [row["loss"] for row in first] == [row["loss"] for row in second]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_several_processes_write_what_one_does(parallel: str, rich: Config, rows: Any, ranks: Any) -> None:
    """Of the same weights, at the very start: one update of a rate too small to show."""
    changes = {
        "recipe.lr": 1e-9,
        "recipe.ema_decay": None,
        "engine.parallel": parallel,
        "model.name": "infvit_pure_mini",
    }
    alone, config = (rich(changes, max_steps=1, run=run) for run in ("alone", "several"))
    train(alone)
    ranks(2, lambda rank: train(config).metrics)
    (one,), (several,) = (rows(Path(str(c.run_dir))) for c in (alone, config))
    for name in NAMES:
        assert several[name] == pytest.approx(one[name], rel=1e-4)
    assert max(one["spectral_radius"]) > 0


def test_the_images_are_the_first_held_out_ones(tiny: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(loop, "layer_health", lambda model, images, *rest: seen.append(images) or {})
    config = tiny()
    train(config)
    source = build_source(config.data, "val")
    transform = eval_transform(config.recipe.crop_pct, config.recipe.interpolation, config.data, 16, "center")
    expected = torch.stack([transform(source.image(index)) for index in range(4)])
    assert len(seen) == 2
    assert all(torch.equal(images, expected) for images in seen)


def test_damaged_images_are_left_out() -> None:
    class Source:
        def __len__(self) -> int:
            return 3

        def image(self, index: int) -> Image.Image:
            if index == 1:
                raise DataError("1 is damaged")
            return Image.new("L", (2, 2), 85 * index)

        def target(self, index: int) -> int:
            return 0

    found = first_images(EvalDataset(Source(), to_tensor))
    assert found[:, 0, 0, 0].tolist() == pytest.approx([0, 2 / 3])
