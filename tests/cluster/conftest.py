"""Processes of train.py, and a Slurm of shell scripts that only writes down what it is asked."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("+model.args.depth=1", "+model.args.embed_dim=24", "+model.args.num_heads=2", "data.img_size=16",
         "batch_size=128", "engine.device=cpu", "engine.log_seconds=0")  # fmt: skip


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts `train.py` as the leader of a process group, in `tmp_path`; stderr goes to the file `stderr` there."""
    groups: list[subprocess.Popen[str]] = []

    def run(*overrides: str, **environment: str) -> "subprocess.Popen[str]":
        with (tmp_path / "stderr").open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *overrides, *SMALL], cwd=tmp_path, stderr=stderr, text=True,
                stdout=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1", **environment},
            )  # fmt: skip
        groups.append(process)
        return process

    yield run
    for process in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts an `scontrol` on the PATH that appends its arguments to a file, and returns that file."""

    def install(exit_code: int = 0, before: str = "true") -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        calls = tmp_path / "scontrol.txt"
        script = folder / "scontrol"
        lines = ("#!/bin/sh", before, f'echo "$@" >> {calls}', "echo Requested operation: no >&2", f"exit {exit_code}")
        script.write_text("\n".join(lines))
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return calls

    return install
