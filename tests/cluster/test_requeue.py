"""Which signal brings a job back into Slurm's queue, and under which name."""

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infvit.engine.processes import join_processes
from infvit.engine.requeue import requeue

JOB = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0"}
ARRAY = {"SLURM_JOB_ID": "80", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*JOB, *ARRAY, "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("signum", "environment", "calls"),
    [
        (signal.SIGUSR1, JOB, "requeue 77\n"),
        (signal.SIGUSR2, JOB, "requeue 77\n"),
        (signal.SIGUSR2, ARRAY, "requeue 77_3\n"),
        (signal.SIGUSR1, {**JOB, "RANK": "0"}, "requeue 77\n"),
        (signal.SIGUSR1, {**JOB, "SLURM_PROCID": "5", "RANK": "0"}, "requeue 77\n"),  # of torchrun, on another node
        (signal.SIGUSR1, {**JOB, "SLURM_PROCID": "1"}, ""),
        (signal.SIGUSR1, {**JOB, "RANK": "1"}, ""),
    ],
)
def test_the_first_process_asks_for_the_job(
    scontrol: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, signum: int, environment: dict[str, str], calls: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    recorded = scontrol()
    assert requeue(signum) is bool(calls)
    assert (recorded.read_text() if recorded.exists() else "") == calls


@pytest.mark.parametrize("exit_code", [0, 1])
def test_no_process_leaves_before_the_first_has_asked(
    scontrol: Callable[..., Path], ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, exit_code: int
) -> None:
    """Else torchrun or srun would end that one in the middle of it. Slurm takes half a second here."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    recorded = scontrol(exit_code, before="sleep 0.5")

    def leave(rank: int) -> tuple[bool, bool]:
        join_processes("cpu", 1)
        return requeue(signal.SIGUSR1), recorded.exists()

    assert ranks(2, leave) == [(exit_code == 0, True)] * 2
    assert recorded.read_text() == "requeue 77\n"


@pytest.mark.parametrize(
    ("signum", "environment"), [(signal.SIGTERM, JOB), (signal.SIGINT, ARRAY), (signal.SIGUSR1, {})]
)
def test_a_cancelled_job_stays_away(
    scontrol: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, signum: int, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    recorded = scontrol()
    assert not requeue(signum)
    assert not recorded.exists()


@pytest.mark.parametrize("exit_code", [1, None], ids=["refused", "not there"])
def test_failure_is_one_warning(
    scontrol: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    exit_code: int | None,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    if exit_code is None:
        monkeypatch.setenv("PATH", "/nowhere")
    else:
        scontrol(exit_code)
    with caplog.at_level(logging.INFO, logger="infvit"):
        assert not requeue(signal.SIGUSR1)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "did not requeue job 77 (" in record.getMessage()
    assert ("Requested operation: no" if exit_code else "No such file") in record.getMessage()
