"""The package wandb itself, offline: what is in the files of its runs, read without its help."""

import contextlib
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from infvit.config import TrainConfig
from infvit.engine import train
from infvit.reports import draw_curves

pytestmark = pytest.mark.slow
pytest.importorskip("wandb")

Config = Callable[..., TrainConfig]
ROOT = Path(__file__).resolve().parents[2]
SMALL = ("+model.args.depth=1", "+model.args.embed_dim=24", "+model.args.num_heads=2", "data.img_size=16",
         "data.num_workers=0", "batch_size=128", "engine.device=cpu")  # fmt: skip


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials and no network."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")


def offline_runs(folder: Path) -> list[Path]:
    """Returns the folders of the offline runs below a folder, oldest first."""
    files = sorted(folder.glob("**/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime)
    return [path.parent for path in files]


def records(offline: Path) -> Iterator[Any]:
    """Reads the records of an offline run: after 7 bytes of header a log in the format of LevelDB.

    It has blocks of 32 KiB; a piece of a record is checksum, length, kind (1 whole, 2 first, 3 middle, 4 last), bytes.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = offline.glob("*.wandb")
    data, at, record = path.read_bytes(), 7, b""
    assert data[:4] in (b":W&B", b"")
    while at + 7 < len(data):
        if 32768 - at % 32768 < 7:  # too little room left in a block for another piece
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        at += 7
        if kind == 0 or at + length > len(data):
            return  # not written yet
        record = (b"" if kind in (1, 2) else record) + data[at : at + length]
        at += length
        if kind in (1, 4):
            yield Record.FromString(record)


def tree(items: Any) -> dict[str, Any]:
    """Turns items with a key, or a nested one such as (curves, path), into a dictionary of dotted keys."""
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def parse(offline: Path) -> dict[str, Any]:
    """Returns what an offline run holds: id, name, configuration, step metrics, a row per epoch, exit code or None."""
    found: dict[str, Any] = {"rows": [], "steps": {}, "exit": None}
    for record in records(offline):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            found |= {"id": run.run_id, "name": run.display_name, "config": tree(run.config.update)}
        elif kind == "history":
            found["rows"].append(tree(record.history.item))
        elif kind == "metric":
            found["steps"][record.metric.glob_name or record.metric.name] = record.metric.step_metric
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
    return found


def wait(question: Callable[[], Any], what: str) -> Any:
    """Asks again and again until the answer is true, and returns it: W&B's own process writes when it likes."""
    deadline = time.monotonic() + 60
    while not (answer := question()):
        assert time.monotonic() < deadline, f"{what} never came"
        time.sleep(0.05)
    return answer


def ended(offline: Path) -> dict[str, Any]:
    """Returns what a run holds once its exit code is there."""
    wait(lambda: parse(offline)["exit"] is not None, f"the exit code in {offline}")
    return parse(offline)


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_all_of_a_run_arrives(
    tiny: Config, no_key: None, load: Any, rows: Any, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """Without key and network."""

    def attention(folder: Path) -> None:
        if len(rows(folder)) == 1:
            Image.new("RGB", (6, 4), (10, 200, 30)).save(folder / "attention.png")

    config = tiny({"logger.wandb": True, "logger.wandb_mode": mode, "logger.tags": ["t"]})
    train(config, after_epoch=[draw_curves, attention])
    folder = Path(str(config.run_dir))
    (offline,) = wait(lambda: offline_runs(folder), "the file of the run")
    found = ended(offline)
    assert found["exit"] == 0
    assert found["id"] == load(folder / "last.pt")["logger_id"]
    assert found["name"] == "run"
    assert found["config"]["recipe"]["lr"] == 0.01
    assert found["config"]["epochs"] == 2
    assert found["config"]["data"]["root"] == config.data.root
    assert found["steps"]["*"] == "epoch"
    assert len(found["rows"]) == 2
    for arrived, row in zip(found["rows"], rows(folder), strict=True):
        for name in ("gamma", "dead_heads", "dead_rows", "spectral_radius"):
            row[f"{name}/0"] = row.pop(name)[0]
        assert {name: arrived[name] for name in row} == row
        assert arrived["_step"] == row["epoch"]
    assert ["attention.path" in row for row in found["rows"]] == [True, False]

    def figure(row: dict[str, Any], name: str) -> Any:
        with Image.open(offline / "files" / row[f"{name}.path"]) as image:
            return np.asarray(image.convert("RGB"))

    first, last = found["rows"]
    assert (figure(first, "attention") == np.broadcast_to([10, 200, 30], (4, 6, 3))).all()
    with Image.open(folder / "curves.png") as image:
        assert (figure(last, "curves") == np.asarray(image.convert("RGB"))).all()
    assert not np.array_equal(figure(first, "curves"), figure(last, "curves"))
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == (mode == "online")


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """`python train.py` with W&B offline, in a process group of its own; stderr goes to a file."""
    # W&B tells child processes to use its service of this process, which does not live and die with them.
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL"] = "0.1"  # seconds; what is not flushed dies with a killed run
    with (folder / "stderr").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *arguments, *SMALL, "logger.wandb=true",
             "logger.wandb_mode=offline"],
            cwd=folder, env=environment, stderr=log, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_every_job_of_a_sweep_is_a_run_of_its_own(tmp_path: Path, no_key: None) -> None:
    """The second of three jobs fails: its rate is so high that nothing stays finite."""
    broken = ("recipe.lr=1e-3,1e30,2e-3", "recipe.clip_grad=null", "recipe.warmup_epochs=0", "engine.max_nonfinite=2")
    with started(tmp_path, "-m", "logger=tensorboard", "epochs=1", *broken) as process:
        assert process.wait(timeout=200) == 1, (tmp_path / "stderr").read_text()
    wait(lambda: len(offline_runs(tmp_path)) >= 3, "a file for each of the jobs")
    runs = [(offline, ended(offline)) for offline in offline_runs(tmp_path)]
    assert len(runs) == 3
    by_rate = {found["config"]["recipe"]["lr"]: (offline, found) for offline, found in runs}
    assert {rate: found["exit"] for rate, (_, found) in by_rate.items()} == {1e-3: 0, 1e30: 1, 2e-3: 0}
    assert {rate: len(found["rows"]) for rate, (_, found) in by_rate.items()} == {1e-3: 1, 1e30: 0, 2e-3: 1}
    assert len({found["id"] for _, found in runs}) == 3
    for offline, found in runs:
        folder = offline.parents[1]
        assert found["name"] == folder.name
        assert len(list((folder / "tensorboard").iterdir())) == 1
        assert len(list((folder / "wandb").glob("offline-run-*"))) == 1


def test_a_killed_run_goes_on_as_the_same_wandb_run(tmp_path: Path, no_key: None, load: Any) -> None:
    """Killed without warning in some epoch, then started again and ended with Ctrl-C: no epoch is there twice."""
    arguments = ("logger=tensorboard", "epochs=500", "run_dir=out")

    def shown(process: "subprocess.Popen[str]") -> str:
        text = (tmp_path / "stderr").read_text()
        assert process.poll() is None, text
        return text

    with started(tmp_path, *arguments) as process:
        (killed,) = wait(lambda: shown(process) and offline_runs(tmp_path), "the file of the first process")
        wait(lambda: shown(process) and len(parse(killed)["rows"]) >= 2, "the rows of the first process")
        process.kill()
    last = tmp_path / "out" / "last.pt"
    kept = load(last)
    done = len(kept["history"])
    with started(tmp_path, *arguments) as process:
        wait(lambda: f"epoch {done + 2}/500  train loss" in shown(process), "two epochs more")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 130, (tmp_path / "stderr").read_text()
    _, resumed = wait(lambda: len(runs := offline_runs(tmp_path)) == 2 and runs, "the file of the second process")
    first, second = parse(killed), ended(resumed)
    assert first["id"] == second["id"] == kept["logger_id"] == load(last)["logger_id"]
    assert second["exit"] == 130
    early, late = ([row["epoch"] for row in found["rows"]] for found in (first, second))
    assert early == [*range(1, len(early) + 1)]
    assert 2 <= len(early) <= done, "the newest may have died with the process"
    assert late == [*range(done + 1, len(load(last)["history"]) + 1)]
    assert [row["_step"] for row in second["rows"]] == late
