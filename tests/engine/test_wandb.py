"""Weights & Biases gets what it can take, and never stops a run."""

import logging
import math
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infvit.config import LoggerConfig, TrainConfig
from infvit.engine import loop, train
from infvit.engine.record import build_logger

Config = Callable[..., TrainConfig]


def folder_of(config: TrainConfig) -> Path:
    return Path(str(config.run_dir))


OFFLINE = {"logger.wandb": True, "logger.wandb_mode": "offline"}


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials and no network."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")


class FakeRun:
    """A W&B run that remembers what it was told."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.rows, self.exit_code = arguments, [], None

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        assert (args, kwargs) == (("*",), {"step_metric": "epoch"})

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stands for the package; `runs` are the runs it started, `key` whether there is one."""
    fake = types.SimpleNamespace(runs=[], key=True, Settings=dict)

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
    assert run.exit_code == 0
    expected = [{**row, "gamma/0": row["gamma"][0]} for row in rows(folder_of(config))]
    assert run.rows == [{k: v for k, v in row.items() if k != "gamma"} for row in expected]
    assert warnings_of(caplog) == []
    train(config)  # finished: nothing to log
    assert len(fake_wandb.runs) == 1


def test_a_continued_run_is_the_same_wandb_run(tiny: Config, fake_wandb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    from infvit.engine.signals import Interrupted

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


def test_without_a_key_wandb_goes_offline(tiny: Config, fake_wandb: Any, caplog: pytest.LogCaptureFixture) -> None:
    fake_wandb.key = False
    train(tiny({"logger.wandb": True}, max_steps=1))
    assert [run.arguments["mode"] for run in fake_wandb.runs] == ["offline"]
    (warning,) = warnings_of(caplog)
    assert "online mode failed (no API key); logging offline, upload later with: wandb sync" in warning


@pytest.mark.parametrize("where", ["init", "log", "finish", "login"])
def test_a_failing_wandb_never_stops_training(
    tiny: Config, fake_wandb: Any, rows: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any, where: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr(fake_wandb if where in ("init", "login") else FakeRun, where, fail)
    train(tiny({"logger.wandb": True}))
    assert len(rows(folder_of(tiny()))) == 2
    assert any("no such thing" in message for message in warnings_of(caplog))


def test_wandb_hears_of_a_failed_run(tiny: Config, fake_wandb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "training_loss", lambda logits, *rest: logits.sum() * math.nan)
    with pytest.raises(Exception, match="not finite"):
        train(tiny({"logger.wandb": True}))
    assert fake_wandb.runs[0].exit_code == 1


def test_wandb_that_is_not_installed(tiny: Config, monkeypatch: pytest.MonkeyPatch, caplog: Any, rows: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    train(tiny({"logger.wandb": True}, max_steps=1))
    (warning,) = warnings_of(caplog)
    assert "pip install 'infvit[wandb]'" in warning
    assert len(rows(folder_of(tiny()))) == 1


def test_wandb_is_off_by_default(tmp_path: Path) -> None:
    assert build_logger(LoggerConfig(), tmp_path, {}, None) is None


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["offline", "online"])
def test_the_real_wandb_writes_an_offline_run(
    tiny: Config, no_key: None, rows: Any, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """The package itself, without key and network."""
    pytest.importorskip("wandb")
    train(tiny({"logger.wandb": True, "logger.wandb_mode": mode}))
    folder = folder_of(tiny())
    (offline,) = (folder / "wandb").glob("offline-run-*")
    (file,) = offline.glob("*.wandb")
    deadline = time.monotonic() + 60
    while b"ema_top1" not in file.read_bytes():  # W&B's own process writes it, some time after `finish`
        assert time.monotonic() < deadline, "the metrics never arrived in W&B's file"
        time.sleep(0.2)
    assert len(rows(folder)) == 2
    assert len(warnings_of(caplog)) == (mode == "online")
