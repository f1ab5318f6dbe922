"""Wrong mechanisms for the gate, a machine that answers without measuring, and a clock that tells what it is told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infvit.attention import PureInfSA, SoftmaxAttention
from infvit.attention.mechanism import Mask
from infvit.config import EfficiencyConfig, EvalConfig
from infvit.evaluation.efficiency import run
from infvit.evaluation.efficiency.cells import Task
from infvit.reports.efficiency import to_markdown

MODELS = ["vit_mini", "infvit_pure_mini", "infvit_linear_mini"]


class Clock:
    """Seconds that pass only when someone says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Backward(torch.autograd.Function):
    """The identity, with a gradient that is a twentieth too small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return 0.95 * g


class Unscaled(SoftmaxAttention):
    """Softmax that forgets the scale of its scores."""

    name = "test_unscaled"

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v


class LastHeadWrong(PureInfSA):
    """Right in all heads but the last."""

    name = "test_last_head"

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        out = super().mix(q, k, v, mask)
        return torch.cat([out[:, :-1], 1.1 * out[:, -1:]], 1)


class WrongGradient(SoftmaxAttention):
    """The right output with the wrong gradient."""

    name = "test_wrong_gradient"

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return Backward.apply(super().mix(q, k, v, mask))


class NotANumber(SoftmaxAttention):
    """NaN in one place."""

    name = "test_nan"

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        out = super().mix(q, k, v, mask).clone()
        out[0, 0, 0, 0] = float("nan")
        return out


class OnlyLongWrong(SoftmaxAttention):
    """Right for short sequences, wrong for long ones, as a kernel with a broken last tile is."""

    name = "test_only_long"

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        out = super().mix(q, k, v, mask)
        return out if q.shape[-2] < 200 else torch.cat([out[:, :, :-1], out[:, :, -2:-1]], 2)


BROKEN = (Unscaled, LastHeadWrong, WrongGradient, NotANumber, OnlyLongWrong)


class Machine:
    """Answers tasks by rule: latency and memory by model and size, failures as listed. Keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Task] = []
        self.milliseconds: Callable[[Any], float] = lambda cell: 10.0
        self.failures: dict[tuple[str, str, int], str] = {}
        self.checks: dict[str, dict[str, Any]] = {}
        self.energy: dict[str, Any] | None = {"joules": 3.0, "source": "counter", "reason": None}

    def __call__(self, task: Task) -> dict[str, Any]:
        self.asked.append(task)
        for cell in task.cells:
            key = (task.kind, cell.model, cell.resolution)
            if key in self.failures:
                return {"failed": self.failures[key], "detail": "as listed"}
        if task.kind == "memory":
            (cell,) = task.cells
            return {"mib": cell.resolution / 8.0, "start_mib": 5.0, "method": "told", "limited": False}
        if task.kind == "check":
            right = {"state": "right", "error": 1e-7, "tolerance": 1e-4, "tokens": 10**6, "reason": None}
            return {"cells": [self.checks.get(cell.model, right) for cell in task.cells]}
        return {"cells": [{"latency": self._latency(cell), "energy": self.energy} for cell in task.cells]}

    def _latency(self, cell: Any) -> dict[str, float]:
        median = self.milliseconds(cell)
        return {"median_ms": median, "low_ms": 0.9 * median, "high_ms": 1.2 * median, "rounds": 5, "first_ms": 50.0}


def cells_of(text: str, model: str) -> list[str]:
    """Returns the cells of a model's first row."""
    return next(line for line in text.splitlines() if line.startswith(f"| {model} |")).strip("| ").split(" | ")


def measure(
    folder: Path,
    machine: Any,
    models: list[str] = MODELS,
    sizes: tuple[int, ...] = (32,),
    form: bool = True,
    **keys: Any,
) -> dict:
    """Measures on a machine that answers without measuring, and writes the tables, without figures."""
    asked = EfficiencyConfig(**{"modes": ["inference"], **keys})
    config = EvalConfig(
        eval="efficiency", models=models, resolutions=list(sizes), device="cpu", output=str(folder), efficiency=asked,
        reparameterize=form,
    )  # fmt: skip

    def tables(folder: Path) -> str:
        (folder / "efficiency.md").write_text(to_markdown(json.loads((folder / "efficiency.json").read_text())))
        return ""

    return run.efficiency(config, runner=machine, report=tables)


def row_of(result: dict, model: str, **keys: Any) -> dict:
    (row,) = [r for r in result["rows"] if r["model"] == model and all(r[k] == v for k, v in keys.items())]
    return row
