"""What a run shows while it goes on: progress, profile, damaged images."""

import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infvit.config import TrainConfig
from infvit.engine import loop, train
from infvit.engine import progress as progress_module
from infvit.engine.progress import Progress
from infvit.errors import DataError

Config = Callable[..., TrainConfig]


def folder_of(config: TrainConfig) -> Path:
    return Path(str(config.run_dir))


# Progress


class Clock:
    """Time that passes only when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress_module.time, "perf_counter", lambda: self.now)


def test_progress_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """10 updates of which 4 were done before; 2 s each, 0.5 of them waiting for the data."""
    caplog.set_level(logging.INFO, "infvit")
    clock = Clock(monkeypatch)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)

    def batches() -> Any:
        while True:
            clock.now += 0.5
            yield "batch"

    source = batches()
    with Progress(epoch=1, epochs=3, updates=10, done=4, seconds=3.0) as progress:
        for _ in range(6):
            for _ in progress.timed(source, 1):
                clock.now += 1.5
            progress.step(0.25, 0.003, 8)
    assert [record.getMessage() for record in caplog.records] == [
        "epoch 2/3  update 6/10  loss 0.2500  lr 3.00e-03  4 images/s  data wait 25%  ETA 8 s",
        "epoch 2/3  update 8/10  loss 0.2500  lr 3.00e-03  4 images/s  data wait 25%  ETA 4 s",
    ]
    assert progress.elapsed == 12.0


def test_progress_lines_of_a_run(tiny: Config, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "infvit")
    train(tiny({"engine.log_seconds": 0.0}, epochs=1))
    pattern = r"epoch 1/1  update \d/3  loss \d\.\d{4}  lr \d\.\d\de-\d\d  [\d,]+ images/s  data wait \d+%  ETA \d+ s"
    assert len([r for r in caplog.records if re.fullmatch(pattern, r.getMessage())]) == 2
    caplog.clear()
    train(tiny({"engine.log_seconds": 60.0}, epochs=1, run="quiet"))
    assert not [r for r in caplog.records if "ETA" in r.getMessage()]


def test_progress_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(epoch=0, epochs=2, updates=3, done=1, seconds=0.0) as progress:
        assert progress.bar is not None
        monkeypatch.setattr(progress.bar, "mininterval", 0)
        progress.step(0.5, 0.01, 8)
        progress.step(0.25, 0.01, 8)
    shown = capsys.readouterr().err
    assert "epoch 1/2" in shown
    assert "3/3" in shown
    assert "loss 0.2500  lr 1.00e-02" in shown
    assert progress.bar.disable  # closed


def test_epoch_line_and_data_wait(tiny: Config, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "infvit")
    metrics = train(tiny()).metrics
    assert (
        f"epoch 2/2  train loss {metrics['train_loss']:.4f}  held-out loss {metrics['loss']:.4f}  "
        f"top-1 {metrics['top1']:.2f} %  top-5 100.00 %  EMA top-1 {metrics['ema_top1']:.2f} %"
    ) in caplog.text


# Profile


def test_profile_leaves_a_trace_and_a_table(tiny: Config, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "infvit")
    train(tiny(profile=True, epochs=2, batch_size=4))
    folder = folder_of(tiny())
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert any("aten::" in str(event.get("name")) for event in events)
    table = (folder / "profile.txt").read_text()
    assert "Self CPU" in table
    assert "ProfilerStep" not in table
    assert "DataLoader" not in table
    assert 10 <= len([line for line in table.splitlines() if re.search(r"\d+\.\d+%", line)]) <= 12
    assert "Profile in" in caplog.text
    train(tiny(run="off", max_steps=1))
    assert not (folder_of(tiny(run="off")) / "trace.json").exists()


def test_a_profile_of_too_short_a_run(tiny: Config, caplog: pytest.LogCaptureFixture) -> None:
    """Three updates leave a profile of one; of two there is nothing to show, and that is said."""
    for steps, written in ((2, False), (3, True)):
        caplog.clear()
        name = f"of_{steps}"
        train(tiny(profile=True, epochs=2, batch_size=4, max_steps=steps, run=name))
        assert (folder_of(tiny(run=name)) / "profile.txt").exists() is written
        assert ("these were 2 updates" in caplog.text) is not written


def test_a_continued_run_is_profiled_too(tiny: Config) -> None:
    train(tiny(batch_size=4, epochs=2, max_steps=6, run="whole", profile=True))
    assert (folder_of(tiny(run="whole")) / "trace.json").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "evaluate", lambda run: (_ for _ in ()).throw(RuntimeError("stop")))
        with pytest.raises(RuntimeError, match="stop"):
            train(tiny({"engine.checkpoint_minutes": 0.0}, batch_size=4))
    train(tiny(batch_size=4, profile=True))
    assert (folder_of(tiny()) / "trace.json").exists()


# Damaged images


@pytest.fixture
def damaged(tiny: Config, digit_folders: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Two training images of the data set are cut in half; links to the others."""
    root = tmp_path / "damaged"
    for path in sorted(digit_folders.rglob("*.png")):
        target = root / path.relative_to(digit_folders)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path)
    for path in sorted((root / "train").rglob("*.png"))[:2]:
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[: len(content) // 2])

    def build(changes: dict[str, Any] | None = None, **top: Any) -> TrainConfig:
        return tiny({"data.root": str(root), **(changes or {})}, **top)

    return build


@pytest.mark.parametrize("mixup", [0.0, 0.8])
def test_damaged_images_are_named_once_and_left_out(
    damaged: Config, mixup: float, rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    train(damaged({"recipe.mixup": mixup, "data.micro_batch_size": 4}, epochs=3, batch_size=26))
    named = [r.getMessage() for r in caplog.records if "Skipped: " in r.getMessage()]
    assert len(named) == len(set(named)) == 2
    assert all("cannot be decoded" in message for message in named)
    assert len(rows(folder_of(damaged()))) == 3


def test_too_many_damaged_images_end_the_run(damaged: Config) -> None:
    with pytest.raises(DataError, match=r"2 images cannot be decoded, more than data.max_damaged=1"):
        train(damaged({"data.max_damaged": 1}, batch_size=26))


def test_damaged_images_are_counted_over_restarts(damaged: Config, load: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Each is named once in a run; a limit that turned out too low may be raised on the way."""
    train(damaged(epochs=1, batch_size=26))
    first = load(folder_of(damaged()) / "last.pt")["damaged"]
    assert len(first) == 2
    caplog.clear()
    train(damaged({"data.max_damaged": 2}, epochs=2, batch_size=26, allow_change=["epochs"]))
    assert not [r for r in caplog.records if "Skipped: " in r.getMessage()]
    assert load(folder_of(damaged()) / "last.pt")["damaged"] == first
    with pytest.raises(DataError, match="2 images cannot be decoded"):
        train(damaged({"data.max_damaged": 1}, epochs=3, batch_size=26, allow_change=["epochs"]))


def test_an_update_whose_images_are_all_damaged_is_an_error(tiny: Config, built: Any) -> None:
    from infvit.data import Batch

    run = built(tiny())
    before = {name: value.clone() for name, value in run.state.model.state_dict().items()}
    empty = Batch(torch.empty(0), torch.empty(0, dtype=torch.int64), ["a.png: damaged"])
    with pytest.raises(DataError, match=r"update 0: none of its images can be decoded \(a.png: damaged\)"):
        loop.train_update(run, iter([empty, empty]))
    assert all(torch.equal(value, before[name]) for name, value in run.state.model.state_dict().items())
