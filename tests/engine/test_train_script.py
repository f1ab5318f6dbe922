"""`python train.py` and `python eval.py` as processes, started from another folder."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "+model.args.depth=1", "+model.args.embed_dim=24", "+model.args.num_heads=2", "data.img_size=16", "batch_size=128",
    "engine.device=cpu", "run_dir=out",
)  # fmt: skip


def command(script: str, *overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / script), *overrides]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def call(folder: Path, script: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(script, *overrides), cwd=folder, env=environment(), capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


def test_train_and_evaluate_from_anywhere(tmp_path: Path) -> None:
    done = call(tmp_path, "train.py", *SMALL, "epochs=2", "data.num_workers=0")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    for line, start in zip(
        lines,
        (
            "model   infvit_linear_mini, depth 1, embed_dim 24, num_heads 2",
            "data    digits: 1437 training and 360 held-out images, 10 classes, 16 px",
            "recipe  quick: 2 epochs of 11 updates, batch 128 in 1 micro-batch, peak lr 0.0007",
            "device  cpu, float32",
            "folder  out",
        ),
        strict=False,
    ):
        assert line == start
    hint = "ImageNet: python train.py model=infvit_linear_4l data=imagenet recipe=deit data.root=/path/to/imagenet"
    assert hint in lines[5:10]
    assert lines[-1].startswith("Held-out top-1 ")
    assert "Traceback" not in done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        ".lock", "best.pt", "config.yaml", "curves.png", "environment.json", "last.pt", "metrics.jsonl", "previous.pt",
        "summary.csv", "train.log",
    }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"out"}

    scored = call(tmp_path, "eval.py", "checkpoint=out", "weights=ema", "device=cpu")
    assert scored.returncode == 0, scored.stderr
    assert "weights        ema\n" in scored.stdout
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    best = max(rows, key=lambda row: row["top1"])
    result = json.loads(next((tmp_path / "out").glob("eval_accuracy_ema_16px_*.json")).read_text())
    assert result["top1"] == best["ema_top1"]


@contextlib.contextmanager
def running(folder: Path, until: str = "epoch 2/500  update 3/11") -> Iterator["subprocess.Popen[str]"]:
    """A training with two loader workers, in a process group of its own, once it has shown a text."""
    log = (folder / "stderr").open("w")
    process = subprocess.Popen(
        command("train.py", *SMALL, "epochs=500", "engine.log_seconds=0", "data.num_workers=2"),
        cwd=folder, env=environment(), stderr=log, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while until not in (folder / "stderr").read_text():
            assert process.poll() is None, (folder / "stderr").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


def group_is_gone(process: "subprocess.Popen[str]") -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"])
def test_a_signal_leaves_a_usable_checkpoint_and_no_process(tmp_path: Path, signum: int, code: int) -> None:
    """Ctrl-C reaches the whole group, SIGTERM from a scheduler often the main process alone."""
    with running(tmp_path) as process:
        if signum == signal.SIGINT:
            os.killpg(process.pid, signum)
        else:
            process.send_signal(signum)
        assert process.wait(timeout=30) == code
        assert group_is_gone(process)
    text = (tmp_path / "stderr").read_text()
    assert "Traceback" not in text
    assert "interrupted: stopped after update " in text.splitlines()[-1]
    content = torch.load(tmp_path / "out" / "last.pt", weights_only=True)
    assert content["update"] > 11
    assert f"stopped after update {content['update']} of 5500; saved in out" in text
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == len(content["history"])


def test_killed_and_started_again_at_once(tmp_path: Path) -> None:
    """The workers of the dead process live on for a while; the folder is free, and a second owner is refused."""
    with running(tmp_path) as process:
        refused = call(tmp_path, "train.py", *SMALL, "epochs=500")
        assert refused.returncode == 1
        assert f"error: run_dir=out is in use by process {process.pid} on " in refused.stderr.splitlines()[-1]
        process.kill()
        process.wait()
        with running(tmp_path, until="  update 3/11"):
            text = (tmp_path / "stderr").read_text()
    update = int(re.findall(r"Found the state after update (\d+) in out", text)[0])
    assert update > 0
    assert update % 11 == 0
