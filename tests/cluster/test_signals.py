"""Signals to all processes of a run at once, as Slurm, torchrun and a terminal send them."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cluster_processes import members, wait_for

from infvit.engine.signals import Interrupted, stop_request

SLOW_EVALUATION = """
import time
from infvit.data import loader

plain = loader.EvalDataset.__getitem__

def slow(self, index):
    if index == 0:
        print("evaluating", flush=True, file=__import__("sys").stderr)
    time.sleep(0.02)
    return plain(self, index)

loader.EvalDataset.__getitem__ = slow
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_exit_codes_and_names(name: str) -> None:
    """The handlers there were before, say submitit's, are not called, and are back afterwards."""
    signum, calls = signal.Signals[name], []
    before = signal.signal(signum, lambda *args: calls.append(args))
    theirs = signal.getsignal(signum)
    try:
        with stop_request() as stop:
            signal.raise_signal(signum)
            assert stop.signum == signum
        assert signal.getsignal(signum) is theirs
    finally:
        signal.signal(signum, before)
    assert not calls
    error = Interrupted(signum, "saved.")
    assert error.exit_code == (130 if name == "SIGINT" else 143)
    assert str(error) == f"saved. ({name})"


@pytest.mark.slow
def test_a_job_step_is_stopped_and_goes_on(
    start: Callable, scontrol: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ahead of the time limit in the middle of training; by scancel and torchrun at once in an evaluation."""
    calls = scontrol()
    (tmp_path / "slow_evaluation.py").write_text(SLOW_EVALUATION)
    command = ("run_dir=out", "epochs=500", "data.num_workers=2", "engine.requeue=true", "imports=[slow_evaluation]")

    def said() -> str:
        return (tmp_path / "stderr").read_text()

    def stop(process, until: str, *signals: int) -> dict:
        assert wait_for(lambda: until in said() or process.poll() is not None)
        assert len(members(process.pid)) >= 3
        for signum in signals:
            os.killpg(process.pid, signum)
        assert process.wait(timeout=30) == 143, said()
        assert wait_for(lambda: not members(process.pid), 5)
        assert "Traceback" not in said()
        return torch.load(tmp_path / "out" / "last.pt", weights_only=True)

    first = stop(start(*command, SLURM_JOB_ID="77"), "update 3/11", signal.SIGUSR1)
    assert 3 <= first["update"] < 11
    assert f"stopped after update {first['update']} of 5500; saved in out." in said()
    assert "(SIGUSR1)" in said()
    assert calls.read_text() == "requeue 77\n"
    second = stop(start(*command, SLURM_JOB_ID="77"), "evaluating", signal.SIGTERM, signal.SIGTERM)
    assert re.findall(r"Found the state after update (\d+) in out", said()) == [str(first["update"])]
    assert second["update"] == 11
    assert second["history"] == [], "the epoch is not yet evaluated"
    assert "(SIGTERM)" in said()
    assert calls.read_text() == "requeue 77\n", "scancel means an end"


@pytest.mark.slow
def test_workers_end_with_their_main_process(start: Callable, tmp_path: Path) -> None:
    """Which is killed, and can tell them nothing."""
    process = start("run_dir=out", "epochs=500", "data.num_workers=2")
    assert wait_for(lambda: "update 3/11" in (tmp_path / "stderr").read_text())
    assert len(members(process.pid)) >= 3
    process.kill()
    process.wait()
    assert members(process.pid), "else nothing is shown here"
    assert wait_for(lambda: not members(process.pid), 15)
