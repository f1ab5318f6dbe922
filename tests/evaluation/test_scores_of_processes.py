"""The same scores on 1, 2, 3 or 16 processes: each image is scored once, whoever does it, in whatever batches."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image

from infvit.config import DataConfig, EngineConfig, EvalConfig, ModelConfig, RecipeConfig, TrainConfig
from infvit.data.digits import digit_arrays
from infvit.engine import train
from infvit.engine.checkpoint import read
from infvit.evaluation import evaluate

pytestmark = pytest.mark.slow

Ranks = Callable[..., list[Any]]
SCHEMAS: dict[str, Any] = {"model": ModelConfig, "data": DataConfig, "recipe": RecipeConfig}


def config(checkpoint: Path, output: Path, **keys: Any) -> EvalConfig:
    places = {"checkpoint": str(checkpoint), "output": str(output)}
    return EvalConfig(**{**places, "device": "cpu", "precision": "fp32", **keys})


@pytest.fixture
def few(tmp_path: Path, run: Path) -> Callable[[int], dict[str, Any]]:
    """Data keys of a held-out split with so many digits in class folders."""

    def make(count: int) -> dict[str, Any]:
        images, labels = digit_arrays("val")
        root = tmp_path / f"few{count}"
        for label in range(10):
            (root / "train" / str(label)).mkdir(parents=True)
            Image.new("L", (16, 16)).save(root / "train" / str(label) / "x.png")
            (root / "validation" / str(label)).mkdir(parents=True)
        for i in range(count):
            pixels = Image.fromarray((images[i] * 255).round().astype("uint8"))
            pixels.save(root / "validation" / str(labels[i]) / f"{i}.png")
        return {"name": "folder", "root": str(root)}

    return make


@pytest.mark.parametrize("batch_size", [64, 7, 1])
def test_the_scores_do_not_depend_on_the_processes(run: Path, ranks: Ranks, tmp_path: Path, batch_size: int) -> None:
    """360 images: 3 processes divide them evenly, 7 do not."""
    alone = evaluate(config(run, tmp_path / "alone"))["accuracy"]
    for world_size in (1, 2, 3, 7):
        output = tmp_path / f"{world_size}-{batch_size}"
        several = config(run, output, batch_size=batch_size)
        results = ranks(world_size, lambda rank, several=several: evaluate(several)["accuracy"])
        (written,) = output.glob("*.json")
        assert json.loads(written.read_text()) == results[0]
        for result in results:
            assert result == results[0]
            assert (result["images"], result["top1"], result["top5"]) == (360, alone["top1"], alone["top5"])
            assert result["loss"] == pytest.approx(alone["loss"], rel=1e-6)


@pytest.mark.parametrize("count", [1, 2, 11])
def test_fewer_images_than_processes(
    run: Path, ranks: Ranks, tmp_path: Path, few: Callable[[int], dict[str, Any]], count: int
) -> None:
    data = few(count)
    alone = evaluate(config(run, tmp_path / "alone", data=data))["accuracy"]
    assert alone["images"] == count
    for result in ranks(4, lambda rank: evaluate(config(run, tmp_path / "four", data=data, batch_size=2))["accuracy"]):
        assert (result["images"], result["top1"], result["top5"]) == (count, alone["top1"], alone["top5"])
        assert result["loss"] == pytest.approx(alone["loss"], rel=1e-6)


def test_one_process_shows_the_table(run: Path, ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    ranks(2, lambda rank: evaluate(config(run, tmp_path / "out")))
    assert capfd.readouterr().out.count("top1") == 1


def test_a_damaged_image_of_one_process_is_named(
    run: Path, ranks: Ranks, tmp_path: Path, few: Callable[[int], dict[str, Any]]
) -> None:
    """The process that meets it says so and ends; the other does not wait for it, and writes no result."""
    data = few(11)
    damaged = sorted(Path(data["root"], "validation").rglob("*.png"))[1]
    damaged.write_bytes(b"no picture")
    first, second = ranks(2, lambda rank: evaluate(config(run, tmp_path / "out", data=data)))
    assert second.error == "DataError"
    assert damaged.name in second.message
    assert not second.shown_elsewhere
    assert first.error != "DataError"
    assert not list((tmp_path / "out").glob("*.json"))


def test_mistakes_are_told_once(run: Path, ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, lambda rank: evaluate(config(run, tmp_path, eval="nonsense")))
    assert "unknown eval=nonsense" in first.message
    assert (first.shown_elsewhere, second.shown_elsewhere) == (False, True)


def test_different_data_on_two_machines_is_refused(
    run: Path, ranks: Ranks, tmp_path: Path, few: Callable[[int], dict[str, Any]]
) -> None:
    one, other = few(11), few(10)
    results = ranks(2, lambda rank: evaluate(config(run, tmp_path / "out", data=other if rank else one)))
    assert [result.error for result in results] == ["DataError", "DataError"]
    assert "process 0: 11, process 1: 10" in results[0].message
    shutil.rmtree(other["root"])
    results = ranks(2, lambda rank: evaluate(config(run, tmp_path / "out", data=other if rank else one)))
    assert results[0].message.startswith("process 1: ")


def test_a_checkpoint_of_several_processes_is_plain(run: Path, ranks: Ranks, tmp_path: Path) -> None:
    """Written by two, it loads into plain timm with the names of the model itself."""
    stored = read(run / "last.pt")["config"]
    folder = tmp_path / "two"
    groups = {name: schema(**stored[name]) for name, schema in SCHEMAS.items()}
    values = TrainConfig(
        **groups, engine=EngineConfig(device="cpu"), epochs=1, batch_size=64, max_steps=2, run_dir=str(folder)
    )
    assert all(isinstance(result, dict) for result in ranks(2, lambda rank: train(values).metrics))
    arguments = {"num_classes": 10, "img_size": 16, "depth": 1, "embed_dim": 24, "num_heads": 2}
    model = timm.create_model("infvit_linear_mini", **arguments, checkpoint_path=str(folder / "last.pt"))
    saved = read(folder / "last.pt")["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert evaluate(config(folder, tmp_path / "out"))["accuracy"]["images"] == 360
