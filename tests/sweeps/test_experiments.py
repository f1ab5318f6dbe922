"""Every experiment file: its header says what it does, and it trains."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from infvit.config import ModelConfig
from infvit.models.build import count_flops
from infvit.reports.published import IMAGENET

EXPERIMENTS = {path.stem: path for path in (Path(__file__).resolve().parents[2] / "configs/experiment").glob("*.yaml")}
ROWS = {f"{model}_imagenet": model for model in IMAGENET}
JOBS = {"ablation_gamma": 4, "ablation_activation": 3, "ablation_agf_k": 6, "ablation_agf_gamma": 6,
        "ablation_agf_filter": 3}  # fmt: skip
SMALL = ("model.args.depth=1", "model.args.embed_dim=24", "model.args.num_heads=2", "data.img_size=32",
         "data.num_workers=0", "batch_size=8", "max_steps=2", "engine.device=cpu")  # fmt: skip


def hours(model: str) -> float:
    """Returns the A100 hours of 300 epochs: three forward passes an image at 40 % of 312 TFLOP/s."""
    return 3 * count_flops(ModelConfig(model), 1000, 3, 224) * 1_281_167 * 300 / (0.4 * 312e12) / 3600


def test_there_is_one_for_each_published_row_and_each_ablation() -> None:
    assert EXPERIMENTS.keys() == ROWS.keys() | JOBS.keys() | {"agf_imagenet", "agf_imagenet100"}


@pytest.mark.parametrize(("name", "model"), ROWS.items())
def test_headers_say_command_accuracy_source_and_cost(name: str, model: str) -> None:
    text = EXPERIMENTS[name].read_text()
    command = f"train.py experiment={name} data.root=/path/to/imagenet\n"
    assert f"# 1 GPU:  python {command}" in text
    assert f"# 8 GPUs: torchrun --standalone --nproc-per-node=8 {command}" in text
    figures = [f"{value} %" for value in IMAGENET[model] if value is not None]
    assert re.findall(r"[\d.]+ %(?= on)", text) == figures
    assert "arXiv 2603.00175. Not run here." in text
    cost = re.search(r"Cost, an estimate: (\d+) A100 hours = 3 x ([\d.]+) GFLOPs", text)
    assert cost is not None
    assert int(cost[1]) == round(hours(model))
    assert float(cost[2]) == round(count_flops(ModelConfig(model), 1000, 3, 224) / 1e9, 1)


@pytest.mark.parametrize(("name", "jobs"), [("ablation_gamma", 4), ("ablation_activation", 3)])
def test_headers_of_ablations(name: str, jobs: int) -> None:
    text = EXPERIMENTS[name].read_text().replace("\n# ", " ")
    assert f"about {round(jobs * hours('infvit_linear_4l'))} A100 hours in all, an estimate" in text
    assert f"python train.py -m experiment={name} " in text


def test_headers_of_agf() -> None:
    cost = 3 * count_flops(ModelConfig("deit_small_agf"), 1000, 3, 224) * 300 / (0.4 * 312e12) / 3600
    for name, images, figure in (("agf_imagenet", 1_281_167, "80.3"), ("agf_imagenet100", 126_689, "81.3")):
        text = EXPERIMENTS[name].read_text()
        assert f"python train.py experiment={name} data.root=/path/to/imagenet\n" in text
        assert f"Expected: top-1 {figure} %" in text
        assert "arXiv 2505.08516. Not run here." in text
        hours = re.search(r"Cost, an estimate: ([\d.]+) A100 hours = 3 x ([\d.]+) GFLOPs", text)
        assert hours is not None
        assert float(hours[1]) == round(cost * images, 1)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Class folders with eight images a class and split."""
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("n01440764", "n01443537"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for i in range(8):
                Image.fromarray(random.integers(0, 256, (40, 48, 3), np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "images"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_two_steps(command: Callable, images: Path, tmp_path: Path, name: str) -> None:
    """With its own recipe, on images of two classes, at another size; of an ablation all jobs."""
    ended = command(f"experiment={name}", "data=folder", f"data.root={images}", "data.classes=null", *SMALL)
    assert ended.code == 0, ended.err
    files = list(tmp_path.glob("runs/**/metrics.jsonl"))
    assert len(files) == JOBS.get(name, 1)
    for file in files:
        row = json.loads(file.read_text().splitlines()[-1])
        assert row["update"] == 2
        assert np.isfinite([row["train_loss"], row["loss"]]).all()
        if name in ROWS:
            assert f"name: {ROWS[name]}\n" in (file.parent / "config.yaml").read_text()
            assert "name: deit\n" in (file.parent / "config.yaml").read_text()
