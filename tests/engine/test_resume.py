"""An interrupted run is the unbroken run, bitwise: weights, average, optimiser, rows; also with loader workers."""

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interruptions import Killed, at_call, die, folder_of, send

from infvit.config import TrainConfig
from infvit.engine import checkpoint, loop, train
from infvit.engine.signals import Interrupted, stop_request

Config = Callable[..., TrainConfig]


STOPS: dict[str, tuple[Any, str, int]] = {
    "first-update": (loop, "train_update", 1),
    "mid-epoch": (loop, "train_update", 2),
    "last-update-of-an-epoch": (loop, "train_update", 3),
    "second-epoch": (loop, "train_update", 5),
    "validation-of-raw": (loop, "validate", 1),
    "validation-of-ema": (loop, "validate", 2),
    "last-validation": (loop, "validate", 4),
    "between-epochs": (loop, "write_history", 1),
}


@pytest.mark.parametrize("stop", STOPS)
def test_stopped_and_continued(rich: Config, straight: Any, outcome: Any, same: Any, stop: str) -> None:
    """By SIGINT and SIGTERM in turn; the exit code is the shell's, the handlers are put back."""
    number = list(STOPS).index(stop)
    signum, code = [(signal.SIGINT, 130), (signal.SIGTERM, 143)][number % 2]
    before = signal.getsignal(signum)
    with at_call(*STOPS[stop], send(signum)), pytest.raises(Interrupted, match="stopped after update") as info:
        train(rich())
    assert info.value.exit_code == code
    assert signal.getsignal(signum) is before
    train(rich())
    assert same(outcome(folder_of(rich())), straight)


def test_stopped_again_and_again(rich: Config, straight: Any, outcome: Any, same: Any) -> None:
    """One update at a time."""
    for update in range(1, 7):
        message = f"stopped after update {update} of 6"
        with at_call(loop, "train_update", 1, send(signal.SIGTERM)), pytest.raises(Interrupted, match=message):
            train(rich())
    train(rich())
    assert same(outcome(folder_of(rich())), straight)


KILLS: dict[str, tuple[Any, str, int]] = {
    "mid-epoch": (loop, "train_update", 2),
    "second-epoch": (loop, "train_update", 6),
    "validation": (loop, "validate", 2),
    "before-best": (checkpoint, "save", 4),
    "before-last": (checkpoint, "save", 5),
    "before-rows": (loop, "write_history", 1),
    "before-last-rows": (loop, "write_history", 2),
    "file-unnamed": (os, "replace", 4),
    "file-in-writing": (os, "fsync", 3),
}


@pytest.mark.parametrize("kill", KILLS)
def test_killed_and_continued(rich: Config, straight: Any, outcome: Any, same: Any, kill: str) -> None:
    """Nothing is saved on the way out; what was saved after each update is enough."""
    often = {"engine.checkpoint_minutes": 0.0}
    with at_call(*KILLS[kill], die), pytest.raises(Killed):
        train(rich(often))
    train(rich(often))
    assert same(outcome(folder_of(rich())), straight)


def test_mid_epoch_checkpoints_are_written(rich: Config, load: Any) -> None:
    for minutes, saved in ((0.0, 2), (10.0, 0)):
        config = rich({"engine.checkpoint_minutes": minutes}, run=f"run-{minutes}")
        with at_call(loop, "train_update", 3, die), pytest.raises(Killed):
            train(config)
        path = folder_of(config) / "last.pt"
        assert (load(path)["update"] if path.exists() else 0) == saved


@pytest.mark.parametrize("stop", ["mid-epoch", "validation-of-ema"])
def test_loader_workers_have_no_influence(rich: Config, straight: Any, outcome: Any, same: Any, stop: str) -> None:
    """Two of them until the interruption, one after it, against none."""
    with at_call(*STOPS[stop], send(signal.SIGTERM)), pytest.raises(Interrupted):
        train(rich({"data.num_workers": 2}))
    train(rich({"data.num_workers": 1}))
    assert same(outcome(folder_of(rich())), straight)


def test_stopped_in_a_run_that_is_cut_short(rich: Config, outcome: Any, same: Any) -> None:
    """`max_steps` in the middle of an epoch."""
    train(rich(run="whole", max_steps=4))
    with at_call(loop, "train_update", 2, send(signal.SIGTERM)), pytest.raises(Interrupted):
        train(rich(max_steps=4))
    train(rich(max_steps=4))
    whole = outcome(folder_of(rich(run="whole")))
    assert same(outcome(folder_of(rich())), whole)
    assert [row["update"] for row in whole["rows"]] == [3, 4]


def test_a_finished_run_shows_its_result_and_trains_nothing(
    rich: Config, load: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where only the picture is lacking."""
    caplog.set_level(logging.INFO, "infvit")
    first = train(rich(epochs=1))
    folder = folder_of(rich())
    written = (folder / "last.pt").stat().st_mtime_ns
    (folder / "metrics.jsonl").unlink()
    caplog.clear()
    drawn: list[Path] = []
    with at_call(loop, "train_update", 0, die):
        second = train(rich(epochs=1), after_epoch=[drawn.append])
    assert second == first
    assert (folder / "last.pt").stat().st_mtime_ns == written
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
    assert drawn == [folder]
    assert "This run is finished" in caplog.text
    assert f"Held-out top-1 {first.metrics['top1']:.2f} %" in caplog.text


def test_a_run_that_is_evaluated_for_long_is_saved_meanwhile(
    rich: Config, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All updates of an epoch, when the kill comes in its evaluation."""
    config = rich({"engine.checkpoint_minutes": 10.0})

    def later(*args: Any) -> Any:
        run_between = args[5]
        clock = time.monotonic
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop.time, "monotonic", lambda: clock() + 601)
            run_between()
        raise Killed

    monkeypatch.setattr(loop, "validate", later)
    with pytest.raises(Killed):
        train(config)
    content = load(folder_of(config) / "last.pt")
    assert (content["update"], content["history"]) == (3, [])


def test_a_second_ctrl_c_does_not_wait() -> None:
    with stop_request() as stop:
        assert not stop
        signal.raise_signal(signal.SIGINT)
        assert stop
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with stop_request() as stop:  # a second SIGTERM waits: the state is being saved
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signum == signal.SIGTERM


def test_a_changed_precision_may_continue(tiny: Config, load: Any) -> None:
    """The state of the loss scaler is only there under fp16."""
    with at_call(loop, "train_update", 2, send(signal.SIGTERM)), pytest.raises(Interrupted):
        train(tiny())
    with at_call(loop, "train_update", 2, send(signal.SIGTERM)), pytest.raises(Interrupted):
        train(tiny({"engine.precision": "fp16"}))
    scale = load(folder_of(tiny()) / "last.pt")["scaler"]["scale"]
    assert scale > 1
    train(tiny())
    assert load(folder_of(tiny()) / "last.pt")["scaler"] == {}


def test_the_scaler_continues(tiny: Config, load: Any, outcome: Any, same: Any) -> None:
    """fp16 on the CPU: the scale grows or shrinks on the way, and goes on from where it was."""
    half = {"engine.precision": "fp16"}
    train(tiny(half, run="straight"))
    with at_call(loop, "train_update", 4, send(signal.SIGTERM)), pytest.raises(Interrupted):
        train(tiny(half))
    train(tiny(half))
    assert same(outcome(folder_of(tiny())), outcome(folder_of(tiny(run="straight"))))
    assert load(folder_of(tiny()) / "last.pt")["scaler"]["_growth_tracker"] > 0


def test_the_state_of_a_run_is_one_object(rich: Config, built: Any, same: Any) -> None:
    """What goes into a checkpoint comes back out, and it is all that changed."""
    train(rich())
    first = built(rich()).state
    assert first.update == 6
    assert len(first.history) == 2
    assert same(first.state_dict(), built(rich()).state.state_dict())


def test_resume_takes_no_longer_than_the_rest(tiny: Config) -> None:
    """The sampler jumps to where the run was: no image is decoded twice."""
    from infvit.data import source

    with at_call(loop, "train_update", 3, send(signal.SIGTERM)), pytest.raises(Interrupted):
        train(tiny(epochs=1))
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        original = source.decode
        patch.setattr(source, "decode", lambda *args: seen.append(time.monotonic()) or original(*args))
        train(tiny(epochs=1))
    assert len(seen) == 2 * 11 + 4  # two evaluations, the images of the heads' health, and not one training image
