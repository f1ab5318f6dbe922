"""TensorBoard gets each epoch once, and never stops a run."""

import logging
import math
import signal
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from infvit.config import TrainConfig
from infvit.engine import loop, train
from infvit.engine.loggers import TensorboardLogger
from infvit.engine.signals import Interrupted
from infvit.reports import draw_curves

Config = Callable[..., TrainConfig]
ON = {"logger.tensorboard": True}


def folder_of(config: TrainConfig) -> Path:
    return Path(str(config.run_dir))


@pytest.fixture
def shown() -> Callable[[Path], Any]:
    """Reads a run folder as TensorBoard does, all of it."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return lambda folder: EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "images": 0}).Reload()


@pytest.fixture
def written() -> Callable[[Path, str], list[int]]:
    """Returns the steps at which a number was written, whether TensorBoard shows them or not."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    def read(folder: Path, name: str) -> list[int]:
        files = sorted((folder / "tensorboard").iterdir())
        events = [event for file in files for event in EventFileLoader(str(file)).Load()]
        return [event.step for event in events for value in event.summary.value if value.tag == name]

    return read


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_all_of_a_run_arrives(tiny: Config, rows: Any, shown: Any, caplog: pytest.LogCaptureFixture) -> None:
    def attention(folder: Path) -> None:
        if len(rows(folder)) == 1:
            Image.new("RGB", (6, 4), (10, 200, 30)).save(folder / "attention.png")

    config = tiny(ON)
    train(config, after_epoch=[draw_curves, attention])
    folder = folder_of(config)
    board, history = shown(folder), rows(folder)
    for row in history:
        for name in ("gamma", "dead_heads", "dead_rows", "spectral_radius"):  # a list, one number per layer
            row[f"{name}/0"] = row.pop(name)[0]
    assert set(board.Tags()["scalars"]) == set(history[0])
    for name in history[0]:
        events = board.Scalars(name)
        assert [event.step for event in events] == [1, 2]
        assert [event.value for event in events] == pytest.approx([row[name] for row in history], rel=1e-6)
    assert [event.step for event in board.Images("attention")] == [1], "drawn after the first epoch only"
    attention_map = Image.open(BytesIO(board.Images("attention")[0].encoded_image_string))
    assert (np.asarray(attention_map) == np.broadcast_to([10, 200, 30], (4, 6, 3))).all()
    assert [event.step for event in board.Images("curves")] == [1, 2]
    with (
        Image.open(folder / "curves.png") as image,
        Image.open(BytesIO(board.Images("curves")[-1].encoded_image_string)) as arrived,
    ):
        assert (np.asarray(arrived) == np.asarray(image.convert("RGB"))).all()
    (text,) = board.Tensors("config/text_summary")
    lines = text.tensor_proto.string_val[0].decode().splitlines()
    assert (lines[0], lines[-1]) == ("```yaml", "```")
    assert yaml.safe_load("\n".join(lines[1:-1]))["recipe"]["lr"] == 0.01
    assert warnings_of(caplog) == []
    train(config)
    assert len(list((folder / "tensorboard").iterdir())) == 1, "finished: nothing to log"


def test_a_continued_run_has_each_epoch_once(
    tiny: Config, shown: Any, written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the validation of the second epoch."""
    config, original = tiny(ON, epochs=3), loop.validate
    calls = []

    def stop(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:  # two an epoch: raw and averaged weights
            signal.raise_signal(signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(loop, "validate", stop)
    with pytest.raises(Interrupted):
        train(config, after_epoch=[draw_curves])
    assert written(folder_of(config), "top1") == [1]
    monkeypatch.setattr(loop, "validate", original)
    train(config, after_epoch=[draw_curves])
    assert written(folder_of(config), "top1") == [1, 2, 3]
    board = shown(folder_of(config))
    assert [event.step for event in board.Scalars("top1")] == [1, 2, 3]
    assert [event.step for event in board.Images("curves")] == [1, 2, 3]


def test_an_epoch_that_is_done_again_is_shown_once(tiny: Config, rows: Any, shown: Any, written: Any) -> None:
    """The newest checkpoint is lost, so that a logged epoch is trained again from the older one."""
    config = tiny(ON)
    train(config)
    folder = folder_of(config)
    (folder / "last.pt").unlink()
    train(config)
    assert written(folder, "train_seconds") == [1, 2, 2]
    events = shown(folder).Scalars("train_seconds")
    assert [(event.step, event.value) for event in events] == [
        (row["epoch"], pytest.approx(row["train_seconds"])) for row in rows(folder)
    ]


def test_an_epoch_is_on_the_disk_before_the_next_one(tiny: Config, written: Any, rows: Any) -> None:
    """What a run that is killed without warning has logged stays."""
    seen = []

    def look(folder: Path) -> None:  # is called just before an epoch is logged
        seen.append(written(folder, "top1"))

    train(tiny(ON, epochs=3), after_epoch=[look])
    assert seen == [[], [1], [1, 2]]


def test_numbers_that_are_not_finite(tmp_path: Path, shown: Any) -> None:
    logger = TensorboardLogger(TrainConfig(), tmp_path, 0)
    logger.row({"epoch": 1, "train_loss": math.nan, "grad_norm": math.inf}, {})
    logger.finish(0)
    assert math.isnan(shown(tmp_path).Scalars("train_loss")[0].value)
    assert shown(tmp_path).Scalars("grad_norm")[0].value == math.inf


def test_tensorboard_that_is_not_installed(
    tiny: Config, rows: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    train(tiny(ON))
    (warning,) = warnings_of(caplog)
    assert "pip install 'infvit[tensorboard]'" in warning
    assert warning.endswith("Training goes on without it.")
    assert len(rows(folder_of(tiny()))) == 2


def test_a_folder_that_tensorboard_cannot_write(tiny: Config, rows: Any, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard")
    folder = folder_of(tiny())
    folder.mkdir()
    (folder / "tensorboard").write_text("a file in the way")
    train(tiny(ON))
    (warning,) = warnings_of(caplog)
    assert warning.startswith("TensorBoard: ")
    assert warning.endswith("Training goes on without it.")
    assert len(rows(folder)) == 2
