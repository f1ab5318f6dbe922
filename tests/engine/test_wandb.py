"""Weights & Biases gets what it can take, and never stops a run."""

import logging
import math
import os
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from infvit.config import TrainConfig
from infvit.engine import loop, train
from infvit.engine.loggers import Loggers
from infvit.engine.processes import Processes
from infvit.engine.signals import Interrupted
from infvit.engine.train import _logger

Config = Callable[..., TrainConfig]


def folder_of(config: TrainConfig) -> Path:
    return Path(str(config.run_dir))


class FakeRun:
    """A W&B run that remembers what it was told."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.rows, self.figures, self.exit_code = arguments, [], [], None

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        assert (args, kwargs) == (("*",), {"step_metric": "epoch"})

    def log(self, row: dict[str, Any], step: int, commit: bool) -> None:
        assert (step, commit) == (row["epoch"], True)
        self.rows.append({name: value for name, value in row.items() if not isinstance(value, Image.Image)})
        self.figures.append({name: value.getpixel((0, 0)) for name, value in row.items() if name not in self.rows[-1]})

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stands for the package; `runs` are the runs it started, `key` whether there is one."""
    fake = types.SimpleNamespace(runs=[], key=True, Settings=dict, teardown=lambda: None, Image=lambda image: image)

    def init(**arguments: Any) -> FakeRun:
        fake.runs.append(FakeRun(**arguments))
        return fake.runs[-1]

    fake.init = init
    fake.login = lambda prompt, verify: fake.key and not prompt and not verify
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_wandb_gets_every_row_and_the_exit_code(tiny: Config, fake_wandb: Any, rows: Any, caplog: Any) -> None:
    config = tiny({"logger.wandb": True, "logger.project": "p", "logger.tags": ["t"]})
    train(config)
    (run,) = fake_wandb.runs
    assert (run.arguments["mode"], run.arguments["resume"], run.arguments["project"]) == ("online", "allow", "p")
    assert run.arguments["config"]["recipe"]["lr"] == 0.01
    assert run.arguments["name"] == "run"
    assert 0 < run.arguments["settings"]["finish_timeout"] <= 600, "a lost network must not keep the process for ever"
    assert run.exit_code == 0
    history = rows(folder_of(config))
    lists = [name for name, value in history[0].items() if isinstance(value, list)]  # of one layer here
    assert lists == ["gamma", "dead_heads", "dead_rows", "spectral_radius"]
    assert run.rows == [
        {k: v for k, v in row.items() if k not in lists} | {f"{k}/0": row[k][0] for k in lists} for row in history
    ]
    assert warnings_of(caplog) == []
    train(config)  # finished: nothing to log
    assert len(fake_wandb.runs) == 1


def test_a_continued_run_is_the_same_wandb_run(tiny: Config, fake_wandb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny({"logger.wandb": True})
    original = loop.validate
    monkeypatch.setattr(loop, "validate", lambda *a: (signal.raise_signal(signal.SIGTERM), original(*a))[1])
    with pytest.raises(Interrupted):
        train(config)
    monkeypatch.setattr(loop, "validate", original)
    train(config)
    first, second = fake_wandb.runs
    assert first.arguments["id"] == second.arguments["id"]
    assert (first.exit_code, second.exit_code) == (143, 0)
    assert [row["epoch"] for run in fake_wandb.runs for row in run.rows] == [1, 2]
    train(tiny({"logger.wandb": True}, run="other", max_steps=1))
    assert fake_wandb.runs[2].arguments["id"] != first.arguments["id"]


def test_wandb_is_told_an_absolute_folder(
    tiny: Config, fake_wandb: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """W&B's service may have been started by another process, in another directory."""
    monkeypatch.chdir(tmp_path)
    train(tiny({"logger.wandb": True, "run_dir": "relative"}, max_steps=1))
    assert fake_wandb.runs[0].arguments["dir"] == str(tmp_path / "relative")


def test_a_server_that_does_not_answer(tiny: Config, fake_wandb: Any, caplog: pytest.LogCaptureFixture) -> None:
    """W&B's service keeps the id of a start that failed, and would refuse the offline run of the same id."""
    original, in_use = fake_wandb.init, set()

    def init(**arguments: Any) -> FakeRun:
        if arguments["id"] in in_use:
            raise RuntimeError("run ID is in use")
        in_use.add(arguments["id"])
        if arguments["mode"] == "online":
            raise TimeoutError("context deadline exceeded")
        return original(**arguments)

    fake_wandb.init, fake_wandb.teardown = init, in_use.clear
    train(tiny({"logger.wandb": True}, max_steps=1))
    assert [run.arguments["mode"] for run in fake_wandb.runs] == ["offline"]
    (warning,) = warnings_of(caplog)
    assert "online mode failed (context deadline exceeded); logging offline" in warning


def test_without_a_key_wandb_goes_offline(tiny: Config, fake_wandb: Any, caplog: pytest.LogCaptureFixture) -> None:
    fake_wandb.key = False
    train(tiny({"logger.wandb": True}, max_steps=1))
    assert [run.arguments["mode"] for run in fake_wandb.runs] == ["offline"]
    (warning,) = warnings_of(caplog)
    upload = f"wandb sync {folder_of(tiny()) / 'wandb'}"
    assert warning == f"W&B: online mode failed (no API key); logging offline, upload later with: {upload}"


@pytest.mark.parametrize("where", ["init", "log", "finish", "login"])
def test_a_failing_wandb_never_stops_training(
    tiny: Config, fake_wandb: Any, rows: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any, where: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr(fake_wandb if where in ("init", "login") else FakeRun, where, fail)
    train(tiny({"logger.wandb": True}))
    assert len(rows(folder_of(tiny()))) == 2
    warnings = warnings_of(caplog)
    assert all("no such thing" in message for message in warnings)
    assert len(warnings) == (2 if where == "init" else 1), "init fails online and offline"
    if where == "log":
        assert fake_wandb.runs[0].exit_code == 0, "closed all the same"


def test_wandb_hears_of_a_failed_run(tiny: Config, fake_wandb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "training_loss", lambda logits, *rest: logits.sum() * math.nan)
    with pytest.raises(Exception, match="not finite"):
        train(tiny({"logger.wandb": True}))
    assert fake_wandb.runs[0].exit_code == 1


def test_wandb_hears_of_an_impatient_user(tiny: Config, fake_wandb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C ends the run at once."""

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "validate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(tiny({"logger.wandb": True}))
    assert fake_wandb.runs[0].exit_code == 130


def test_wandb_that_is_not_installed(tiny: Config, monkeypatch: pytest.MonkeyPatch, caplog: Any, rows: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    train(tiny({"logger.wandb": True}, max_steps=1))
    (warning,) = warnings_of(caplog)
    assert "pip install 'infvit[wandb]'" in warning
    assert len(rows(folder_of(tiny()))) == 1


def test_no_logger_is_on_by_default(tiny: Config, built: Any) -> None:
    run = built(tiny())
    with _logger(run):
        assert run.logger is None
    assert run.state.logger_id is None
    assert list(run.folder.iterdir()) == []


@pytest.mark.parametrize("key", ["wandb", "tensorboard"])
def test_only_the_first_process_logs(tiny: Config, built: Any, fake_wandb: Any, key: str) -> None:
    run = built(tiny({f"logger.{key}": True}))
    for rank in (1, 0):
        run.processes = Processes(rank, world_size=2, local_rank=rank)
        with _logger(run):
            assert (run.logger is None) == (rank == 1)
    assert len(fake_wandb.runs) == (key == "wandb")


# Figures


def paint(path: Path, grey: int) -> None:
    Image.new("L", (20, 10), grey).save(path)
    os.utime(path, ns=(0, grey))


def test_a_figure_is_logged_whenever_it_is_drawn_anew(tiny: Config, fake_wandb: Any, rows: Any) -> None:
    """`a` is drawn after every epoch, `b` after the first one."""

    def draw(folder: Path) -> None:
        done = len(rows(folder))
        paint(folder / "a.png", done)
        if done == 1:
            paint(folder / "b.png", 77)

    train(tiny({"logger.wandb": True}, epochs=3), after_epoch=[draw])
    (run,) = fake_wandb.runs
    grey = {name: (value,) * 3 for name, value in {"b": 77, 1: 1, 2: 2, 3: 3}.items()}
    assert run.figures == [{"a": grey[1], "b": grey["b"]}, {"a": grey[2]}, {"a": grey[3]}]


def test_a_picture_that_is_half_written_is_left_out(tiny: Config, fake_wandb: Any, rows: Any, caplog: Any) -> None:
    """Another command may be writing it; the metrics go on, and so does the picture once it is whole."""

    def draw(folder: Path) -> None:
        paint(folder / "a.png", len(rows(folder)))
        if len(rows(folder)) == 1:
            (folder / "a.png").write_bytes((folder / "a.png").read_bytes()[:50])
            (folder / "b.png").write_bytes(b"no picture")

    train(tiny({"logger.wandb": True}), after_epoch=[draw])
    (run,) = fake_wandb.runs
    assert run.figures == [{}, {"a": (2, 2, 2)}]
    assert [row["epoch"] for row in run.rows] == [1, 2]
    warnings = warnings_of(caplog)
    assert len(warnings) == 2
    for name, warning in zip(("a.png", "b.png"), warnings, strict=True):
        assert f"{name} cannot be read and is not logged" in warning


def test_one_logger_that_fails_leaves_the_other_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Fake:
        def __init__(self, name: str, fails: bool) -> None:
            self.name, self.fails, self.calls = name, fails, []

        def row(self, row: dict[str, float], figures: dict[str, Image.Image]) -> None:
            self.calls.append(row)
            if self.fails:
                raise OSError("disk full")

        def finish(self, exit_code: int) -> None:
            self.calls.append(exit_code)

    bad, good = Fake("bad", True), Fake("good", False)
    loggers = Loggers([bad, good], tmp_path)
    loggers.row({"epoch": 1, "gamma": [0.5, math.inf]})
    loggers.row({"epoch": 2, "note": "not a number"})
    loggers.finish(3)
    first = {"epoch": 1, "gamma/0": 0.5, "gamma/1": math.inf}
    assert bad.calls == [first, 3]
    assert good.calls == [first, {"epoch": 2}, 3]
    assert warnings_of(caplog) == ["bad: disk full. Logging to it stops, training goes on."]
