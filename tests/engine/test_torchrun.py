"""`torchrun train.py` and `torchrun eval.py` as a user starts them, on two CPU processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
SMALL = (
    "+model.args.depth=1", "+model.args.embed_dim=24", "+model.args.num_heads=2", "data.img_size=16", "batch_size=128",
    "engine.device=cpu", "run_dir=out",
)  # fmt: skip
FAILS = """
import os
import time
from infvit import cli
from infvit.engine import loop

original, calls, lost_another = loop.training_loss, 0, cli.lost_another

def broken(*arguments):
    global calls
    calls += 1
    if os.environ["RANK"] == "1" and calls == 3:
        raise MemoryError("no room")
    return original(*arguments)

def slow(error):
    time.sleep(2)  # by now torchrun has sent its SIGTERM
    return lost_another(error)

loop.training_loss, cli.lost_another = broken, slow
"""


def start(folder: Path, script: str, *overrides: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*TORCHRUN, str(ROOT / script), *overrides], cwd=folder, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def call(folder: Path, script: str, *overrides: str) -> tuple[int, str, str]:
    process = start(folder, script, *overrides)
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err


def rows(folder: Path) -> list[dict[str, object]]:
    path = folder / "out" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_interrupted_continued_and_scored(tmp_path: Path) -> None:
    """SIGTERM to torchrun: it passes it on and waits. One log, one folder, one table."""
    process = start(tmp_path, "train.py", *SMALL, "epochs=500", "data.num_workers=1")
    deadline = time.monotonic() + 90
    while len(rows(tmp_path)) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert err.count("interrupted: stopped after update") == 1
    assert err.count("model   infvit_linear_mini") == 1
    content = torch.load(tmp_path / "out" / "last.pt", weights_only=True)
    assert f"stopped after update {content['update']} of 5500; saved in out" in err
    done = len(rows(tmp_path))
    assert done == len(content["history"]) >= 2

    code, _, err = call(
        tmp_path, "train.py", *SMALL, f"epochs={done + 1}", "allow_change=[epochs]", "data.num_workers=0"
    )
    assert code == 0, err
    assert f"Found the state after update {content['update']} in out" in err
    assert [row["epoch"] for row in rows(tmp_path)] == list(range(1, done + 2))
    assert {path.name for path in tmp_path.iterdir()} == {"out"}

    code, out, err = call(tmp_path, "eval.py", "checkpoint=out/last.pt", "device=cpu")
    assert code == 0, err
    assert out.count("images         360\n") == 1
    (result,) = (tmp_path / "out").glob("eval_accuracy_*.json")
    assert json.loads(result.read_text())["top1"] == rows(tmp_path)[-1]["top1"]


def test_one_that_fails_ends_all(tmp_path: Path) -> None:
    """Within seconds, with its reason; the first says only that another has gone."""
    (tmp_path / "fails_on_the_second.py").write_text(FAILS)
    begin = time.monotonic()
    code, _, err = call(tmp_path, "train.py", *SMALL, "epochs=2", "data.num_workers=0", "imports=[fails_on_the_second]")
    assert code != 0
    assert time.monotonic() - begin < 60
    assert "MemoryError: no room" in err
    assert err.count("error: another process of this run has ended or does not answer") == 1


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    code, _, err = call(tmp_path, "train.py", *SMALL, "batch_size=126")
    assert code != 0
    assert err.count("error: batch_size=126 does not divide into pairs over 2 processes") == 1
    assert not (tmp_path / "out").exists()
