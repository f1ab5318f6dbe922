"""`recipe=deit` value by value against the table of the specification, which is written out here by hand."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from infvit.config import RecipeConfig

RECIPES = Path(__file__).resolve().parents[2] / "configs" / "recipe"

# Section 4 of the specification: DeiT-B without distillation.
DEIT = {
    "opt": "adamw",
    "opt_eps": 1e-8,
    "opt_betas": [0.9, 0.999],
    "weight_decay": 0.05,
    "layer_decay": None,
    "clip_grad": None,  # no gradient clipping
    "lr": 5e-4,  # times batch / 512
    "lr_base_batch": 512,
    "sched": "cosine",
    "sched_on_updates": False,
    "min_lr": 1e-5,
    "warmup_epochs": 5,
    "warmup_lr": 1e-6,
    "smoothing": 0.1,
    "drop_path": 0.1,
    "drop": 0.0,
    "mixup": 0.8,
    "cutmix": 1.0,
    "mixup_prob": 1.0,
    "mixup_switch_prob": 0.5,
    "ema_decay": 0.99996,
    "repeated_aug": 3,
    "auto_augment": "rand-m9-mstd0.5-inc1",
    "color_jitter": 0.3,
    "hflip": 0.5,
    "scale": [0.08, 1.0],
    "ratio": [3 / 4, 4 / 3],
    "interpolation": "bicubic",
    "resize": "torch",  # who computes that filter: ours to choose
    "reprob": 0.25,
    "remode": "pixel",
    "recount": 1,
    "crop_pct": 0.875,
}


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((RECIPES / f"{name}.yaml").read_text())


@pytest.mark.parametrize("key", DEIT)
def test_deit_is_the_table(key: str):
    value = read("deit")["recipe"][key]
    assert value == DEIT[key]
    assert type(value) is type(DEIT[key])


def test_deit_length_and_batch():
    tree = read("deit")
    assert (tree["epochs"], tree["batch_size"]) == (300, 1024)
    assert tree.keys() == {"epochs", "batch_size", "recipe"}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_hides_nothing_in_code(path: Path):
    """Every field is written down in the file, so that no default of the code decides."""
    assert read(path.stem)["recipe"].keys() == {f.name for f in fields(RecipeConfig)}
    assert read(path.stem)["recipe"]["name"] == path.stem
    assert path.read_text().startswith("# @package _global_\n")


def test_the_table_is_complete():
    assert DEIT.keys() | {"name"} == {f.name for f in fields(RecipeConfig)}
