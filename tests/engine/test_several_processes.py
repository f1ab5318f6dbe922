"""Several processes train the run that one would train, in one folder, and none is ever left alone."""

import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interruptions import at_call, folder_of, send
from steps import UNDRAWN, Steps, awake, build, first_updates
from torch.testing import assert_close

from infvit.config import EvalConfig, TrainConfig
from infvit.engine import checkpoint, loop, train
from infvit.engine.plan import make_plan
from infvit.engine.processes import join_processes
from infvit.engine.signals import Interrupted
from infvit.errors import DataError
from infvit.evaluation import evaluate

Config = Callable[..., TrainConfig]
Ranks = Callable[..., list[Any]]


def first_of_several(config: TrainConfig, count: int = 1) -> Steps:
    """The first updates, seen by one of several processes."""
    return first_updates(awake(build(config, join_processes("cpu", 1))), count)


@pytest.mark.parametrize("micro", [None, 4], ids=["whole", "accumulated"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_those_of_the_global_batch(
    rich: Config, ranks: Ranks, world_size: int, micro: int | None
) -> None:
    """With mixup, repeated augmentation and accumulation."""
    config = rich({**UNDRAWN, "data.micro_batch_size": micro, "recipe.clip_grad": None}, batch_size=12)
    alone = first_updates(awake(build(config)))
    assert alone.images == 12
    for theirs in ranks(world_size, lambda rank: first_of_several(config)):
        assert theirs.images == 12
        assert theirs.loss == pytest.approx(alone.loss, rel=1e-5)
        assert theirs.norm == pytest.approx(alone.norm, rel=1e-4)
        assert theirs.gradients.keys() == alone.gradients.keys()
        assert_close(theirs.gradients, alone.gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_weights_stay_the_same_on_all(rich: Config, ranks: Ranks, precision: str) -> None:
    """Bitwise, over three updates with everything random."""
    config = rich({"engine.precision": precision}, batch_size=8)
    first, second = ranks(2, lambda rank: first_of_several(config, 3))
    assert all(torch.equal(value, second.weights[name]) for name, value in first.weights.items())


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_run_one_folder_one_writer(rich: Config, ranks: Ranks, load: Any, rows: Any, world_size: int) -> None:
    """The rows are those of a single process up to rounding, and each image is scored once: 11 on 3 processes."""
    alone = train(rich(UNDRAWN, run="alone", batch_size=12, epochs=1)).metrics
    config = rich(UNDRAWN, batch_size=12, epochs=1)
    before = set(folder_of(config).parent.iterdir())
    writers: list[Path] = []

    def work(rank: int) -> Any:
        return train(config, after_epoch=[writers.append]).metrics, list(writers)

    results = ranks(world_size, work)
    assert set(folder_of(config).parent.iterdir()) - before == {folder_of(config)}
    (first, drawn), *others = results
    assert drawn == [folder_of(config)]
    timing = ("images_per_second", "data_wait", "train_seconds", "eval_seconds")
    for metrics, written in others:
        assert written == []
        assert {k: v for k, v in metrics.items() if k not in timing} == {
            k: v for k, v in first.items() if k not in timing
        }
    assert first["images"] == 11
    for name in ("train_loss", "grad_norm", "loss", "ema_loss"):
        assert first[name] == pytest.approx(alone[name], rel=1e-3)
    (row,) = rows(folder_of(config))
    assert row["update"] == alone["update"] == 2
    assert load(folder_of(config) / "last.pt")["update"] == 2
    assert not list(folder_of(config).glob("*.tmp"))


def test_dropout_differs_between_processes(rich: Config, ranks: Ranks) -> None:
    """Equal masks for different images would be fewer draws than the batch has images."""
    config = rich({"recipe.drop": 0.5, "data.micro_batch_size": None}, batch_size=8, max_steps=1)

    def work(rank: int) -> torch.Tensor:
        run = build(config, join_processes("cpu", 1))
        masks: list[torch.Tensor] = []
        run.state.model.head_drop.register_forward_hook(lambda module, inputs, output: masks.append(output == 0))
        loop.train_epoch(run, 0)
        return masks[0]

    first, second = ranks(2, work)
    assert first.shape == second.shape == (4, 24)
    assert 0.2 < first.float().mean() < 0.8
    assert not torch.equal(first, second)


def interrupted(config: TrainConfig, where: str, number: int, signum: int) -> Any:
    """Trains, and sends this process a signal at the n-th call of a function of the loop."""
    with at_call(loop, where, number, send(signum)):
        return train(config).metrics


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize(("where", "number", "update"), [("train_update", 2, 2), ("train_update", 4, 4),
                                                         ("validate", 1, 3)])  # fmt: skip
def test_all_leave_when_one_is_told_to(
    rich: Config, ranks: Ranks, load: Any, signum: int, where: str, number: int, update: int
) -> None:
    """The signal reaches only the second process; the checkpoint is there before anybody leaves."""
    config = rich()

    def work(rank: int) -> Any:
        return interrupted(config, where, number if rank == 1 else 0, signum)

    first, second = ranks(2, work)
    assert (first.error, second.error) == ("Interrupted", "Interrupted")
    assert f"stopped after update {update} of 6" in first.message
    assert (first.shown_elsewhere, second.shown_elsewhere) == (False, True)
    assert load(folder_of(config) / "last.pt")["update"] == update


def test_nobody_leaves_until_it_is_saved(rich: Config, ranks: Ranks) -> None:
    """torchrun ends all processes when it sees that one has ended."""
    config = rich()

    def work(rank: int) -> bool:
        original = checkpoint.save

        def slow(*args: Any, **kwargs: Any) -> None:
            time.sleep(1)
            original(*args, **kwargs)

        checkpoint.save = slow
        with pytest.raises(Interrupted):
            interrupted(config, "train_update", 1, signal.SIGTERM)
        return (folder_of(config) / "last.pt").exists()

    assert ranks(2, work) == [True, True]


def test_a_ctrl_c_that_comes_twice_is_one(rich: Config, ranks: Ranks, load: Any) -> None:
    """From the terminal, and again from torchrun."""
    config = rich()

    def work(rank: int) -> Any:
        original = loop.train_update

        def wrapped(*args: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            return original(*args)

        loop.train_update = wrapped
        return train(config)

    assert [result.error for result in ranks(2, work)] == ["Interrupted", "Interrupted"]
    assert load(folder_of(config) / "last.pt")["update"] == 1


def test_a_run_goes_on_with_another_number_of_processes(rich: Config, ranks: Ranks, load: Any, rows: Any) -> None:
    """One process, then two, then three, then one; the result is that of one process up to rounding."""
    values = {"batch_size": 12, "epochs": 4}
    straight = train(rich(UNDRAWN, run="alone", **values)).metrics
    config = rich(UNDRAWN, **values)
    for world_size, update in ((1, 1), (2, 3), (3, 5)):
        results = ranks(
            world_size,
            lambda rank, count=update: interrupted(config, "train_update", 2 if count > 1 else 1, signal.SIGTERM),
        )
        assert {result.error for result in results} == {"Interrupted"}
        assert load(folder_of(config) / "last.pt")["update"] == update
    finished = train(config).metrics
    assert [row["update"] for row in rows(folder_of(config))] == [2, 4, 6, 8]
    for name in ("train_loss", "loss", "ema_loss"):
        assert finished[name] == pytest.approx(straight[name], rel=2e-2)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_all_leave_out_an_update_that_is_not_finite_on_one(
    tiny: Config, ranks: Ranks, load: Any, rows: Any, where: str
) -> None:
    config = tiny({"recipe.ema_decay": 0.8})

    def work(rank: int) -> Any:
        original, calls = loop.training_loss, 0

        def broken(*args: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            loss = original(*args)
            if rank == 1 and calls == 2:
                return loss * math.nan if where == "loss" else loss + (args[0].sum() - args[0].sum().detach()) * 1e38**2
            return loss

        loop.training_loss = broken
        return train(config).metrics["skipped"]

    assert ranks(2, work) == [1, 1]
    content = load(folder_of(config) / "last.pt")
    assert content["skipped"] == 1
    for state in ("state_dict", "ema_state_dict"):
        assert all(value.isfinite().all() for value in content[state].values())
    assert [row["skipped"] for row in rows(folder_of(config))] == [1, 1]


def test_too_many_in_a_row_end_all(tiny: Config, ranks: Ranks) -> None:
    def work(rank: int) -> Any:
        original = loop.training_loss
        loop.training_loss = lambda *args: original(*args) * (math.nan if rank == 1 else 1)
        return train(tiny())

    first, second = ranks(2, work)
    assert (first.error, second.error) == ("TrainingError", "TrainingError")
    assert "3 updates in a row were not finite" in first.message
    assert "first bad gradient: cls_token" in first.message or "first bad gradient: pos_embed" in first.message
    assert second.shown_elsewhere


def test_damaged_images_are_counted_once_over_all(one_damaged: Config, ranks: Ranks, load: Any) -> None:
    """Whichever process meets it; also where it leaves a process without any image of its own."""
    config = one_damaged({"data.micro_batch_size": 2}, batch_size=8, epochs=3)
    assert all(isinstance(result, dict) for result in ranks(2, lambda rank: train(config).metrics))
    (message,) = load(folder_of(config) / "last.pt")["damaged"]
    assert "0" in message
    assert ".png" in message
    results = ranks(2, lambda rank: train(one_damaged({"data.max_damaged": 0}, run="strict", epochs=3)))
    assert [result.error for result in results] == ["DataError", "DataError"]
    assert "more than data.max_damaged=0" in results[0].message


def test_a_process_without_an_image_takes_part(one_damaged: Config, ranks: Ranks) -> None:
    """Batches of one pair on each of two processes: the damaged image takes its partner along, and none is left."""
    config = one_damaged(batch_size=4, epochs=2)
    plan = make_plan(config)
    batches = []
    for epoch in range(2):
        plan.sampler.start(epoch)
        batches += [[view.index for view in views] for views in plan.sampler]
    broken = next(i for i in range(26) if is_damaged(plan.data.train, i))
    expected = [2 if broken in batch else 4 for batch in batches]
    assert 2 in expected
    assert ranks(2, lambda rank: images_of_updates(config)) == [expected, expected]


def test_an_image_in_place_of_none_adds_nothing(one_damaged: Config, ranks: Ranks) -> None:
    """The gradient of the images that are left, whoever has them: one process for all, or one with none of its own."""
    config = one_damaged({**UNDRAWN, "recipe.mixup": 0.8}, batch_size=4)
    plan = make_plan(config)
    first = [view.index for view in next(iter(plan.sampler))]
    Path(plan.data.train.files[first[0]]).write_bytes(b"no picture")
    alone = first_updates(awake(build(config)))
    assert alone.images == 2
    for theirs in ranks(2, lambda rank: first_of_several(config)):
        assert theirs.images == 2
        assert_close(theirs.gradients, alone.gradients, rtol=1e-4, atol=1e-6)


def is_damaged(source: Any, index: int) -> bool:
    try:
        source.image(index)
    except DataError:
        return True
    return False


def images_of_updates(config: TrainConfig) -> list[int]:
    counts: list[int] = []
    original = loop.train_update

    def counted(*args: Any) -> Any:
        result = original(*args)
        counts.append(result[2])
        return result

    loop.train_update = counted
    train(config)
    return counts


def test_gradient_checkpointing_and_compile(rich: Config, ranks: Ranks) -> None:
    """Neither changes a gradient."""
    plain = first_updates(awake(build(rich(UNDRAWN, batch_size=12)))).gradients
    settings = {"engine.grad_checkpointing": True, "engine.compile_backend": "eager"}
    config = rich({**UNDRAWN, **settings}, batch_size=12, compile=True)
    for theirs in ranks(2, lambda rank: first_of_several(config)):
        assert_close(theirs.gradients, plain, rtol=1e-4, atol=1e-6)


def test_batch_normalisation_is_scored_as_it_is_saved(tiny: Config, ranks: Ranks, tmp_path: Path) -> None:
    """Each process has statistics of its own images; all score with those of the first, which the checkpoint has."""
    config = tiny({"model.name": "lcnet_035", "model.args": {}}, epochs=1)
    first, second = ranks(2, lambda rank: train(config).metrics)
    folder = folder_of(config)
    assert (first["loss"], first["ema_loss"]) == (second["loss"], second["ema_loss"])
    for weights, column in (("raw", "loss"), ("ema", "ema_loss")):
        keys = {"checkpoint": str(folder / "last.pt"), "output": str(tmp_path), "device": "cpu", "weights": weights}
        assert evaluate(EvalConfig(**keys))["accuracy"]["loss"] == pytest.approx(first[column], rel=1e-5)


def test_checkpoints_are_written_by_the_clock_of_the_first(tiny: Config, ranks: Ranks) -> None:
    """`checkpoint_minutes=0` on the second process alone writes nothing."""
    saves = ranks(
        2, lambda rank: count_saves(tiny({"engine.checkpoint_minutes": 0.0 if rank == 1 else 10.0}, epochs=1))
    )
    assert saves == [2, 0]  # best and last of the one epoch
    saves = ranks(2, lambda rank: count_saves(tiny({"engine.checkpoint_minutes": 0.0}, run="often", epochs=1)))
    assert saves[0] > 5
    assert saves[1] == 0


def count_saves(config: TrainConfig) -> int:
    calls: list[Any] = []
    original = checkpoint.save
    checkpoint.save = lambda *args, **kwargs: (calls.append(args), original(*args, **kwargs))
    train(config)
    return len(calls)
