"""A loss or gradient that is not finite changes nothing, is counted, and ends the run when it stays."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from infvit.config import TrainConfig
from infvit.engine import checkpoint, loop, train
from infvit.engine.loop import Run, train_update
from infvit.errors import TrainingError

Config = Callable[..., TrainConfig]


def nan_loss(loss: Tensor) -> Tensor:
    return loss * math.nan


def nan_gradient(loss: Tensor) -> Tensor:
    """The loss is as it was, its gradient is inf * 0."""
    return loss + (loss * 0).sqrt()


@contextmanager
def broken(updates: set[int], how: Callable[[Tensor], Tensor] = nan_loss) -> Iterator[None]:
    """Spoils the loss of the updates with these indices (one micro-batch each)."""
    original, calls = loop.training_loss, -1

    def spoiled(*args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        loss = original(*args)
        return how(loss) if calls in updates else loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "training_loss", spoiled)
        yield
    assert calls >= max(updates)


def folder_of(config: TrainConfig) -> Path:
    return Path(str(config.run_dir))


def all_finite(tree: Any) -> bool:
    if isinstance(tree, Tensor):
        return bool(tree.isfinite().all())
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return all(map(all_finite, values))


@pytest.mark.parametrize("how", [nan_loss, nan_gradient])
def test_the_update_is_left_out(
    tiny: Config, load: Any, same: Any, rows: Any, how: Any, caplog: pytest.LogCaptureFixture
) -> None:
    train(tiny(run="one", max_steps=1))
    with broken({1}, how):
        train(tiny(max_steps=2))
    before, after = load(folder_of(tiny(run="one")) / "last.pt"), load(folder_of(tiny()) / "last.pt")
    for part in ("state_dict", "ema_state_dict"):
        assert same(before[part], after[part])
    assert same(before["optimizer"]["state"], after["optimizer"]["state"])
    assert (after["update"], after["skipped"], after["failures"]) == (2, 1, 1)
    first, second = rows(folder_of(tiny(run="one")))[0], rows(folder_of(tiny()))[0]
    assert second["skipped"] == 1
    assert second["train_loss"] == first["train_loss"]  # the mean of what was trained on
    assert second["grad_norm"] is None
    (record,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "update left out (1 of 3 in a row): update 1: loss " in record
    assert ("loss nan" in record) == (how is nan_loss)
    assert "gradient norm nan, lr 9.34e-03, loss scale 1, first bad gradient: cls_token" in record


def test_training_goes_on_after_single_ones(tiny: Config, rows: Any, load: Any) -> None:
    """Two in a row, one that works, two again: never three."""
    with broken({0, 1, 3, 4}):
        train(tiny())
    content = load(folder_of(tiny()) / "last.pt")
    assert (content["skipped"], content["failures"]) == (4, 0)
    assert [row["skipped"] for row in rows(folder_of(tiny()))] == [2, 4]
    assert all_finite(content)
    assert content["optimizer"]["state"][0]["step"] == 2


def test_too_many_in_a_row_end_the_run(tiny: Config, rows: Any, load: Any) -> None:
    with broken({3, 4, 5}), pytest.raises(TrainingError, match="3 updates in a row were not finite") as info:
        train(tiny(epochs=4))
    folder = folder_of(tiny())
    assert f"The last finite checkpoint is kept in {folder}" in str(info.value)
    assert "update 5" in str(info.value)
    assert load(folder / "last.pt")["update"] == 3
    assert all_finite(load(folder / "last.pt"))
    assert len(rows(folder)) == 1
    assert str(info.value) in (folder / "train.log").read_text()
    train(tiny(epochs=4))  # what made it fail is gone: it goes on
    assert len(rows(folder)) == 4


def test_they_are_counted_over_epochs_and_restarts(tiny: Config, load: Any) -> None:
    """An epoch may have fewer updates than it takes; and a run that fails must not go on for ever when restarted."""
    short = {"batch_size": 26, "epochs": 5}
    with broken({0, 1, 2}), pytest.raises(TrainingError, match="3 updates in a row"):
        train(tiny(**short))
    assert load(folder_of(tiny()) / "last.pt")["failures"] == 2
    with broken({0}), pytest.raises(TrainingError, match="3 updates in a row"):
        train(tiny(**short))


def test_without_any_checkpoint_none_is_promised(tiny: Config) -> None:
    with broken({0}), pytest.raises(TrainingError, match="There is no checkpoint yet"):
        train(tiny({"engine.max_nonfinite": 1}))
    assert not (folder_of(tiny()) / "last.pt").exists()


@contextmanager
def spoiled_weight(number: int, after: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Sets a weight to NaN before the update with this number."""
    original, calls = loop.train_update, 0

    def wrapped(run: Run, micro_batches: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            with torch.no_grad():
                run.state.model.get_parameter("blocks.0.mlp.fc1.weight")[0, 0] = math.nan
            after()
        return original(run, micro_batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_update", wrapped)
        yield


def test_a_broken_weight_ends_the_run_and_reaches_no_checkpoint(tiny: Config, load: Any, rows: Any) -> None:
    with spoiled_weight(4), pytest.raises(TrainingError, match="in a row were not finite"):
        train(tiny({"engine.checkpoint_minutes": 10.0}, epochs=4))
    folder = folder_of(tiny())
    for name in ("last.pt", "best.pt"):
        assert load(folder / name)["update"] == 3
        assert all_finite(load(folder / name))
    assert len(rows(folder)) == 1


def test_broken_weights_are_not_saved(tiny: Config, load: Any) -> None:
    """Neither by the checkpoints inside an epoch."""
    with spoiled_weight(5), pytest.raises(TrainingError, match=r"blocks.0.mlp.fc1.weight is not finite; nothing was"):
        train(tiny({"engine.checkpoint_minutes": 0.0}))
    assert load(folder_of(tiny()) / "last.pt")["update"] == 4
    assert all_finite(load(folder_of(tiny()) / "previous.pt"))


def test_require_finite_looks_at_every_tensor() -> None:
    model = torch.nn.BatchNorm1d(3)
    checkpoint.require_finite(model.state_dict())
    model.running_var[2] = math.inf
    with pytest.raises(TrainingError, match="running_var is not finite"):
        checkpoint.require_finite(model.state_dict())


SCORES = [(math.nan, 99.0), (0.5, 40.0), (0.4, 30.0), (math.inf, 80.0), (0.6, 40.0)]


@pytest.mark.parametrize(("metric", "column"), [("top1", 0), ("ema_top1", 1)])
def test_a_score_of_broken_weights_is_never_the_best(
    tiny: Config, load: Any, rows: Any, monkeypatch: pytest.MonkeyPatch, metric: str, column: int
) -> None:
    """Nor does it hide a later one; the other column never has a say; the first of equals stays."""
    other = [(0.1, 100.0 - epoch) for epoch in range(5)]
    columns = (SCORES, other) if column == 0 else (other, SCORES)
    answers = iter([pair for both in zip(*columns, strict=True) for pair in both])

    def validate(*args: Any) -> dict[str, Any]:
        loss, top1 = next(answers)
        return {"top1": top1, "top5": 100.0, "loss": loss, "images": 11}

    monkeypatch.setattr(loop, "validate", validate)
    result = train(tiny({"engine.best_metric": metric}, epochs=5, batch_size=26))
    folder = folder_of(tiny())
    best = load(folder / "best.pt")
    assert (best["update"], best["best"]) == (2, 40.0)
    assert load(folder / "last.pt")["best"] == 40.0
    name = metric.replace("top1", "loss")
    assert [row[name] for row in rows(folder)] == [None, 0.5, 0.4, None, 0.6]
    assert result.metrics[metric] == 40.0


def test_without_any_usable_score_there_is_no_best(tiny: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "validate", lambda *args: {"top1": 50.0, "top5": 100.0, "loss": math.nan, "images": 11})
    train(tiny())
    assert not (folder_of(tiny()) / "best.pt").exists()
    assert checkpoint.find(folder_of(tiny())).name == "last.pt"


def half(run: Run, how: Callable[[Tensor], Tensor]) -> bool:
    """One spoiled update in fp16; returns whether it counts as done."""
    run.forward.train()
    run.sampler.start(0, 0)
    with broken({0}, how):
        _, _, _, done = train_update(run, iter([next(iter(run.train_loader))]))
    return done


def test_fp16_searches_its_scale(tiny: Config, built: Any) -> None:
    """An infinite gradient halves the scale, which is no failure as long as there is scale left to give up."""
    run = built(tiny({"engine.precision": "fp16"}))
    before = {name: value.clone() for name, value in run.state.model.state_dict().items()}
    assert run.state.scaler.get_scale() == 65536
    assert half(run, nan_gradient)
    assert run.state.scaler.get_scale() == 32768
    for _ in range(15):
        assert half(run, nan_gradient)
    assert run.state.scaler.get_scale() == 1
    assert not half(run, nan_gradient)
    assert all(torch.equal(value, before[name]) for name, value in run.state.model.state_dict().items())


def test_fp16_with_a_loss_that_is_not_finite_is_a_failure(tiny: Config, built: Any) -> None:
    assert not half(built(tiny({"engine.precision": "fp16"})), nan_loss)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains(tiny: Config, rows: Any, load: Any, precision: str) -> None:
    """Close to float32, but not equal; the weights stay float32."""
    train(tiny({"engine.precision": precision}, epochs=15, run=precision))
    train(tiny(epochs=15))
    low, full = (rows(folder_of(tiny(run=run))) for run in (precision, "run"))
    assert low[0]["train_loss"] == pytest.approx(full[0]["train_loss"], rel=0.02)
    assert low[-1]["train_loss"] < low[0]["train_loss"] - 0.1
    state, exact = (load(folder_of(tiny(run=run)) / "last.pt")["state_dict"] for run in (precision, "run"))
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert any(not torch.equal(value, exact[name]) for name, value in state.items())
