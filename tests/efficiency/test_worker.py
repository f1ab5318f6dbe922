"""`eval=efficiency`: the processes that measure, and the command as a whole."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Command
from efficiency_doubles import MODELS, cells_of

from infvit.errors import ConfigError
from infvit.evaluation.efficiency import run, worker
from infvit.evaluation.efficiency.cells import Cell, Settings, Task
from infvit.evaluation.efficiency.subject import Subject, prepare
from infvit.evaluation.efficiency.worker import in_a_process, perform
from infvit.models import InfViT

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
QUICK = Settings(rounds=2, warmup=0, energy_seconds=0.01, threads=1)


@pytest.mark.parametrize("scope", ["model", "attention"])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_every_kind_of_task(scope: str, mode: str) -> None:
    cells = [Cell(model, mode, 32, 2, scope) for model in (*MODELS, "vit_mini:unfused")]
    timed = perform(Task("latency", cells, QUICK))["cells"]
    assert [0 < found["latency"]["low_ms"] <= found["latency"]["high_ms"] for found in timed] == [True] * 4
    assert {found["energy"]["source"] for found in timed} <= {"unavailable", "rapl"}
    checked = perform(Task("check", cells, replace(QUICK, precision="bf16")))["cells"]
    assert [found["state"] for found in checked] == ["right"] * 4
    assert perform(Task("memory", cells[:1], QUICK))["start_mib"] > 50


def test_what_is_called() -> None:
    """Inference: folded, in its precision, without a graph. Training: the weights move, in float32."""
    inference = prepare(Cell("vit_mini", "inference", 32), CPU, torch.bfloat16)
    out = inference.call()
    assert (out.dtype, out.shape, out.requires_grad) == (torch.bfloat16, (1, 10), False)
    assert isinstance(inference.model, InfViT)
    assert isinstance(inference.model.blocks[0].attn.proj2, torch.nn.Identity)
    training = prepare(Cell("vit_mini", "training", 32, 3), CPU, torch.bfloat16)
    before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    training.call()
    assert all(p.dtype == torch.float32 and p.grad is not None for p in training.model.parameters())
    moved = [name for name, p in training.model.named_parameters() if not torch.equal(p, before[name])]
    assert "blocks.0.attn.proj2.weight" in moved
    assert isinstance(training.model.blocks[0].attn.proj2, torch.nn.Linear)
    fused = prepare(Cell("vit_mini:unfused", "inference", 32), CPU, torch.float32).model
    assert [block.attn.core.fused for block in fused.blocks] == [False] * 4


@pytest.mark.parametrize("compiled", [False, True])
def test_memory_of_a_compiled_model_is_that_of_a_later_call(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    calls = []

    class Peak(worker.PeakMemory):
        def __init__(self, device: torch.device) -> None:
            calls.append("reset")
            super().__init__(device)

    subject = Subject(lambda: calls.append("call"), torch.nn.Identity(), lambda: None)
    monkeypatch.setattr(worker, "prepare", lambda *_: subject)
    monkeypatch.setattr(worker, "PeakMemory", Peak)
    perform(Task("memory", [Cell("vit_mini", "inference", 32)], replace(QUICK, compile=compiled)))
    assert calls == (["call"] if compiled else []) + ["reset", "call"]


def test_memory_that_runs_out_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(*_: object) -> None:
        raise error

    monkeypatch.setattr(worker, "prepare", scarce)
    error: Exception = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")
    task = Task("latency", [Cell("vit_mini", "inference", 32)], QUICK)
    assert perform(task) == {"failed": "out of memory", "detail": "CUDA out of memory. Tried to allocate 9 GiB"}
    error = RuntimeError("shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="shapes"):
        perform(task)


def test_a_process_that_is_killed_or_slow_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task("memory", [Cell("vit_mini", "inference", 32)], QUICK)

    def ends(code: str) -> Callable[..., Any]:
        real = subprocess.run
        return lambda command, **keys: real([sys.executable, "-c", code, *command[3:]], **keys)

    for code, expected in (
        ("import os; os.kill(os.getpid(), 9)", {"failed": "out of memory", "detail": "the system killed the process"}),
        ("import time; time.sleep(30)", {"failed": "time limit"}),
    ):
        monkeypatch.setattr(subprocess, "run", ends(code))
        found = in_a_process(task, 0.01)
        assert found.items() >= expected.items()
        monkeypatch.undo()
    for code, kind, message in (
        ("raise SystemError('kernel is broken')", RuntimeError, "exit code 1:(.|\n)*kernel is broken"),
        ("import sys; open(sys.argv[2], 'w').write('{\"user_error\": \"set img_size\"}')", ConfigError, "set img_size"),
    ):
        monkeypatch.setattr(subprocess, "run", ends(code))
        with pytest.raises(kind, match=message):
            in_a_process(task, 1.0)
        monkeypatch.undo()


def test_memory_of_the_scores(ranks: Callable[..., list[Any]]) -> None:
    """Unfused attention holds score matrices, 6 heads x 1025^2 x 4 bytes each; the fused kernel holds none."""
    scores = 6 * 1025**2 * 4 / 2**20
    names = ("vit_mini", "vit_mini:unfused")
    settings = replace(QUICK, memory_limit=2.0 * 2**30)
    fused, unfused = ranks(
        2, lambda rank: perform(Task("memory", [Cell(names[rank], "inference", 128)], settings))
    )  # fmt: skip
    assert fused["limited"]
    assert unfused["limited"]
    assert fused["mib"] < scores < unfused["mib"] < 8 * scores


def test_memory_that_runs_out_in_a_process_of_its_own() -> None:
    settings = replace(QUICK, memory_limit=6.0 * 1025**2 * 4)
    found = in_a_process(Task("memory", [Cell("vit_mini:unfused", "inference", 128)], settings), 2.0)
    assert found["failed"] == "out of memory"
    assert "allocate" in found["detail"]


def test_a_worker_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter([7, 7, 1])
    monkeypatch.setattr(worker.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(worker.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(worker.os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        worker._end_with(7)


def test_the_command(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`python eval.py eval=efficiency ...`, with the tasks done in this process."""
    monkeypatch.setattr(run, "in_a_process", lambda task, minutes: perform(task))
    arguments = ("eval=efficiency", "models=[vit_mini,vit_mini:unfused]", "resolutions=[16,24]", "device=cpu",
                 "efficiency.rounds=2", "efficiency.energy_seconds=0", "efficiency.modes=[inference]",
                 "efficiency.threads=1")  # fmt: skip
    ended = command(*arguments, script="eval.py")
    assert ended.code == 0, ended.err
    assert cells_of(ended.out, "vit_mini:unfused")[1:4] == ["inference", "16", "1"]
    result = json.loads((tmp_path / "runs/efficiency/efficiency.json").read_text())
    assert [row["check"]["state"] for row in result["rows"]] == ["right"] * 4
    assert all(isinstance(row["speedup"]["vit_mini"], float) for row in result["rows"])
    assert result["machine"]["torch"] == torch.__version__
    ended = command("eval=efficiency", "models=[vit_mini]", script="eval.py")
    assert (ended.code, ended.errors) == (1, ["error: eval=efficiency needs resolutions=[...]."])


def test_the_command_with_a_wrong_mechanism(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: None
) -> None:
    """From the mechanism to the exit code."""
    monkeypatch.setattr(run, "in_a_process", lambda task, minutes: perform(task))
    monkeypatch.setitem(InfViT.__init__.__kwdefaults__, "attention", "test_last_head")  # that of vit_mini
    arguments = ("eval=efficiency", "models=[vit_mini,infvit_linear_mini]", "resolutions=[16]", "device=cpu",
                 "efficiency.rounds=1", "efficiency.energy_seconds=0", "efficiency.modes=[inference]")  # fmt: skip
    ended = command(*arguments, script="eval.py")
    assert ended.code == 1
    assert ended.errors[0].startswith("error: wrong result against the reference: vit_mini; see check in")
    assert cells_of(ended.out, "infvit_linear_mini")[7] == "wrong result: vit_mini"
