"""Sweeps whose jobs run in other processes: the same folders, statuses, table and exit code as in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = ("model.args.depth=1", "data.img_size=16", "data.num_workers=0", "batch_size=32", "epochs=1", "max_steps=1",
        "engine.device=cpu")  # fmt: skip


def sweep(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "-m", *arguments, *TINY], cwd=folder, text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_other_processes(launcher: str, tmp_path: Path) -> None:
    if launcher == "joblib":
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    ended = sweep(tmp_path, f"hydra/launcher={launcher}", "seed=-1,1,2")
    assert ended.returncode == 1, ended.stderr
    found = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("runs/sweep/*/status.json")}
    assert {name.rpartition("_")[2]: status["state"] for name, status in found.items()} == {
        "seed--1": "failed", "seed-1": "done", "seed-2": "done",
    }  # fmt: skip
    lines = ended.stdout.splitlines()
    assert [line.split()[1] for line in lines[1:4]] == ["failed", "done", "done"]
    assert "seed=-1 must be between 0 and 4294967295" in lines[1]
    assert len({status["pid"] for status in found.values()} | {os.getpid()}) > 2, "jobs ran in other processes"
    again = sweep(tmp_path, f"hydra/launcher={launcher}", "seed=1,2")
    assert again.returncode == 0, again.stderr
    assert {
        path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("runs/sweep/*/status.json")
    } == found
