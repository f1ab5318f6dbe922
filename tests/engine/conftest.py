"""Runs of a second or less: a model of one layer on 26 handwritten digits in class folders, 3 updates an epoch."""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from steps import build

from infvit.config import DataConfig, EngineConfig, LoggerConfig, ModelConfig, RecipeConfig, TrainConfig
from infvit.data.digits import digit_arrays
from infvit.engine import train
from infvit.engine.loop import Run

CLASSES = ("0", "1", "2")
TIMING = ("images_per_second", "data_wait", "train_seconds", "eval_seconds")
GROUPS = {"model": ModelConfig, "data": DataConfig, "recipe": RecipeConfig, "engine": EngineConfig,
          "logger": LoggerConfig}  # fmt: skip

PLAIN: dict[str, Any] = {
    "model.name": "infvit_linear_mini",
    "model.args": {"depth": 1, "embed_dim": 24, "num_heads": 2},
    "data.name": "folder",
    "data.img_size": 16,
    "data.mean": [0.5, 0.5, 0.5],
    "data.std": [0.5, 0.5, 0.5],
    "data.num_workers": 0,
    "recipe.lr": 0.01,
    "recipe.lr_base_batch": None,
    "recipe.sched_on_updates": True,
    "recipe.min_lr": 1e-4,
    "recipe.warmup_epochs": 0,
    "recipe.smoothing": 0.0,
    "recipe.drop_path": 0.0,
    "recipe.mixup": 0.0,
    "recipe.cutmix": 0.0,
    "recipe.ema_decay": 0.8,
    "recipe.repeated_aug": 1,
    "recipe.auto_augment": None,
    "recipe.color_jitter": None,
    "recipe.hflip": 0.0,
    "recipe.scale": [1.0, 1.0],
    "recipe.ratio": [1.0, 1.0],
    "recipe.reprob": 0.0,
    "recipe.crop_pct": 1.0,
    "engine.device": "cpu",
    "engine.precision": "fp32",
    "epochs": 2,
    "batch_size": 8,
}
RICH: dict[str, Any] = {
    "data.micro_batch_size": 4,
    "recipe.smoothing": 0.1,
    "recipe.drop_path": 0.3,
    "recipe.drop": 0.2,
    "recipe.mixup": 0.8,
    "recipe.cutmix": 1.0,
    "recipe.repeated_aug": 3,
    "recipe.auto_augment": "rand-m9-mstd0.5-inc1",
    "recipe.hflip": 0.5,
    "recipe.scale": [0.3, 1.0],
    "recipe.ratio": [0.75, 1.33],
    "recipe.reprob": 0.5,
    "recipe.clip_grad": 1.0,
    "model.args": {"depth": 2, "embed_dim": 24, "num_heads": 2},
}


def configuration(values: dict[str, Any]) -> TrainConfig:
    """Builds a configuration from dotted keys."""
    groups = {
        name: schema(**{k.split(".", 1)[1]: v for k, v in values.items() if k.startswith(f"{name}.")})
        for name, schema in GROUPS.items()
    }
    top = {key: value for key, value in values.items() if "." not in key}
    assert top.keys() <= {field.name for field in fields(TrainConfig)}
    return TrainConfig(**groups, **top)


@pytest.fixture(scope="session")
def digit_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders with 26 training and 11 held-out digits, 16 x 16 grey PNG."""
    root = tmp_path_factory.mktemp("digits")
    for split, name, count in (("train", "train", 26), ("val", "validation", 11)):
        images, labels = digit_arrays(split)
        chosen = [i for i, label in enumerate(labels) if str(label) in CLASSES][:count]
        for i in chosen:
            folder = root / name / str(labels[i])
            folder.mkdir(parents=True, exist_ok=True)
            pixels = Image.fromarray((images[i] * 255).round().astype("uint8"))
            pixels.resize((16, 16), Image.Resampling.NEAREST).save(folder / f"{i:04}.png")
    return root


@pytest.fixture
def tiny(tmp_path: Path, digit_folders: Path) -> Callable[..., TrainConfig]:
    """Builds a configuration: `tiny({"recipe.mixup": 0.8}, epochs=3)`; the run folder is `tmp_path / run`."""

    def build(changes: dict[str, Any] | None = None, run: str = "run", **top: Any) -> TrainConfig:
        places = {"data.root": str(digit_folders), "run_dir": str(tmp_path / run)}
        return configuration({**PLAIN, **places, **(changes or {}), **top})

    return build


@pytest.fixture
def rich(tiny: Callable[..., TrainConfig]) -> Callable[..., TrainConfig]:
    """As `tiny`, with everything random switched on and the gradient accumulated."""

    def build(changes: dict[str, Any] | None = None, run: str = "run", **top: Any) -> TrainConfig:
        return tiny({**RICH, **(changes or {})}, run, **top)

    return build


@pytest.fixture
def built() -> Callable[[TrainConfig], Run]:
    """Builds a run without starting it."""
    return build


@pytest.fixture
def load() -> Callable[[Path], dict[str, Any]]:
    """Reads a checkpoint as anybody would."""
    return lambda path: torch.load(path, map_location="cpu", weights_only=True)


@pytest.fixture
def rows() -> Callable[[Path], list[dict[str, Any]]]:
    """Reads `metrics.jsonl` strictly: NaN is not JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    def read(folder: Path) -> list[dict[str, Any]]:
        return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return read


@pytest.fixture
def outcome(load: Any, rows: Any) -> Callable[[Path], dict[str, Any]]:
    """Returns everything a run leaves that must not depend on how often it was interrupted."""

    def untimed(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in row.items() if key not in TIMING} for row in history]

    def read(folder: Path) -> dict[str, Any]:
        last, best = load(folder / "last.pt"), load(folder / "best.pt")
        for content in (last, best):
            content["history"] = untimed(content["history"])
            for name in ("config", "logger_id"):
                content.pop(name)
        return {"last": last, "best": best, "rows": untimed(rows(folder))}

    return read


@pytest.fixture
def same() -> Callable[[Any, Any], bool]:
    """Whether two trees are equal, tensors bitwise and NaN equal to NaN."""

    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(map(equal, a, b))
        return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))

    return equal


@pytest.fixture(scope="module")
def memory() -> dict[str, Any]:
    """What `straight` keeps for the tests of a module."""
    return {}


@pytest.fixture
def straight(rich: Any, outcome: Any, memory: dict[str, Any]) -> dict[str, Any]:
    """What the unbroken run leaves: 2 epochs of 3 updates, everything random switched on."""
    if not memory:
        config = rich(run="straight")
        train(config)
        memory.update(outcome(Path(str(config.run_dir))))
        assert [row["update"] for row in memory["rows"]] == [3, 6]
    return memory


@pytest.fixture
def one_damaged(tiny: Any, tmp_path: Path, digit_folders: Path) -> Callable[..., TrainConfig]:
    """26 training images of which one cannot be decoded."""
    root = tmp_path / "damaged"
    shutil.copytree(digit_folders, root)
    sorted((root / "train").rglob("*.png"))[5].write_bytes(b"no picture")
    return lambda changes=None, **top: tiny({"data.root": str(root), **(changes or {})}, **top)
