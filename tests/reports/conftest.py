"""Run folders written by hand: what a report shows is what stands in them."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from infvit.config import DataConfig, ModelConfig, RecipeConfig, TrainConfig
from infvit.engine.status import Status, write_status


@pytest.fixture
def run_folder() -> Callable[..., Path]:
    """Writes a run: `run_folder(path, ["seed=1"], [50.0, 60.0], "done")`; without scores it never started."""

    def write(folder: Path, overrides: list[str], top1: list[float] = (), state: str | None = "done",
              model: str = "infvit_linear_mini", data: str = "digits", error: str | None = None) -> Path:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        seed = next((int(o[5:]) for o in overrides if o.startswith("seed=")), 0)
        if top1:
            config = TrainConfig(
                ModelConfig(model), DataConfig(data), RecipeConfig(warmup_epochs=0), epochs=2, seed=seed
            )
            (folder / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
            rows: list[dict[str, Any]] = [
                {"epoch": e, "update": 10 * e, "top1": score, "loss": 1 / e, "train_loss": 2 / e, "lr": 0.1 / e}
                for e, score in enumerate(top1, start=1)
            ]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if state is not None:
            code = {"done": 0, "failed": 1, "preempted": 143}.get(state)
            write_status(folder, Status(state, overrides, code, error))
        return folder

    return write
