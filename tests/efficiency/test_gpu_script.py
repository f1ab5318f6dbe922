"""`benchmarks/gpu.py`, as far as it can be run without a GPU: its pieces on the CPU, and the table of goals."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from infvit.errors import UserError
from infvit.metrics.timing import Latency

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "benchmarks/gpu.py"
    spec = importlib.util.spec_from_file_location("gpu_benchmark", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**30))
    return module


def test_without_a_gpu_it_says_so(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 1
    assert "nothing was measured" in capsys.readouterr().err


@pytest.mark.parametrize("backward", [False, True])
def test_the_pair_runs_and_is_checked(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, backward: bool) -> None:
    monkeypatch.setattr(gpu, "interleave", lambda work, **keys: {name: call() for name, call in work.items()})
    found, checked = gpu.attention_pair(48, backward, CPU)
    assert checked.startswith("right, deviation ")
    assert checked.endswith(" at 48 tokens")
    shape = (1, 16, 48, 64)
    if backward:
        assert [g.shape for g in found["pure"] + found["flash"]] == [shape] * 6
    else:
        assert (found["pure"].shape, found["flash"].requires_grad) == (shape, False)
    assert not torch.allclose(*(t[0] if backward else t for t in found.values()), atol=1e-3)


def test_goals_of_the_attention(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def pair(tokens: int, backward: bool, device: torch.device) -> tuple[dict[str, Latency], str]:
        if tokens == 16:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if tokens == 8 and backward:
            return pair(4, False, device)[0], "wrong, deviation 3.0e-01 at 8 tokens"
        return {
            "pure": Latency(2.0, 2, 2, 5, 2),
            "flash": Latency(3.0, 3, 3, 5, 3),
        }, "right, deviation 1e-3 at 4 tokens"

    monkeypatch.setattr(gpu, "attention_pair", pair)
    goals = gpu.attention_goals(CPU, [4, 8, 16])
    assert [goal[1] for goal in goals] == [">= 1.0x"] * 3 + [">= 0.8x"] * 3
    assert goals[0][2].startswith("1.50x (2.000 ms to 3.000 ms; right")
    assert goals[4][2].startswith("no ratio: wrong")
    assert goals[5][2] == "out of memory"


def test_goals_of_the_models(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def row(model: str, batch: int, ratio: Any, joules: float | None) -> dict[str, Any]:
        speedup = {gpu.FUSED: ratio, gpu.UNFUSED: 2 * ratio}
        return {"model": model, "batch": batch, "speedup": speedup, "energy_j": joules, "energy_reason": "no NVML"}

    rows = [row(gpu.FUSED, 1, 1.0, 8.0), row(gpu.UNFUSED, 1, 1.0, 12.0), row(gpu.LINEAR, 1, 4.0, 2.0),
            row(gpu.FUSED, 8, 1.0, None), row(gpu.UNFUSED, 8, 1.0, None), row(gpu.LINEAR, 8, 4.0, None)]  # fmt: skip
    monkeypatch.setattr(gpu, "efficiency", lambda config, report: {"rows": rows})
    goals = gpu.model_goals(tmp_path)
    assert [goal[2] for goal in goals[:4]] == [
        "8.00x",
        "6.00x (12.000 J to 2.000 J)",
        "4.00x",
        "4.00x (8.000 J to 2.000 J)",
    ]
    assert goals[5][2] == "not measured: no NVML"
    rows[2]["speedup"] = {gpu.FUSED: "wrong result", gpu.UNFUSED: "wrong result"}
    (tmp_path / "efficiency.json").write_text(json.dumps({"rows": rows}))

    def refuses(config: Any, report: Any) -> None:
        raise UserError("wrong result against the reference: infvit_linear_4l")

    monkeypatch.setattr(gpu, "efficiency", refuses)
    assert [goal[2] for goal in gpu.model_goals(tmp_path)[:4]] == ["wrong result"] * 4


def test_tests_of_the_kernels(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    assert gpu.kernel_tests()[2] == "not there"
    (tmp_path / "tests/kernels").mkdir(parents=True)
    done = SimpleNamespace(stdout="....\n1 failed, 3 passed in 2.00s\n", returncode=1)
    monkeypatch.setattr(gpu.subprocess, "run", lambda command, **keys: done)
    assert gpu.kernel_tests()[2] == "1 failed, 3 passed in 2.00s"


def test_the_largest_image(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(task: Any, minutes: float) -> dict[str, Any]:
        asked.append(task.cells[0])
        return {"mib": 2048.0}

    monkeypatch.setattr(gpu, "in_a_process", answer)
    assert gpu.largest_goal()[2] == "fits, 2.0 GiB above the weights"
    assert (asked[0].model, asked[0].resolution) == ("infvit_linear_4l", 9216)
    monkeypatch.setattr(gpu, "in_a_process", lambda task, minutes: {"failed": "out of memory"})
    assert gpu.largest_goal()[2] == "out of memory"
