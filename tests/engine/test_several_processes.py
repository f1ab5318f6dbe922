"""Several processes train the run that one would train, in one folder, and none is ever left alone."""

import fcntl
import logging
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from infvit.config import EvalConfig, TrainConfig
from infvit.engine import checkpoint, loop, train
from infvit.engine.loop import Run, train_update
from infvit.engine.plan import make_plan
from infvit.engine.processes import ALONE, Processes, join_processes
from infvit.engine.setup import build_run, connect
from infvit.engine.signals import Interrupted, StopRequest
from infvit.errors import ConfigError, DataError
from infvit.evaluation import evaluate

Config = Callable[..., TrainConfig]
Ranks = Callable[..., list[Any]]
# What differs between processes on purpose: dropout is drawn by each for its own images.
UNDRAWN = {"recipe.drop_path": 0.0, "recipe.drop": 0.0}


def folder_of(config: TrainConfig) -> Path:
    return Path(str(config.run_dir))


def build(config: TrainConfig, processes: Processes) -> Run:
    folder_of(config).mkdir(exist_ok=True)
    run = build_run(make_plan(config, processes), StopRequest())
    connect(run)
    torch.nn.init.normal_(run.state.model.head.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    return run


def first_updates(
    run: Run, count: int = 1, images: int = 0
) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Loss and gradients of the last of the first updates, and the weights after it."""
    run.training.train()
    run.sampler.start(0, 0)
    batches = iter(run.train_loader)
    for update in range(count):
        run.schedule.set(update)
        loss, _, seen, done = train_update(run, (next(batches) for _ in range(run.sampler.micro_batches)))
        assert done
        assert seen == (images or run.config.batch_size)
    named = dict(run.state.model.named_parameters())
    return loss, {k: p.grad.clone() for k, p in named.items() if p.grad is not None}, run.state.model.state_dict()


@pytest.mark.parametrize("micro", [None, 4], ids=["whole", "accumulated"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_those_of_the_global_batch(
    rich: Config, ranks: Ranks, world_size: int, micro: int | None
) -> None:
    """With mixup, repeated augmentation and accumulation."""
    config = rich({**UNDRAWN, "data.micro_batch_size": micro, "recipe.clip_grad": None}, batch_size=12)
    loss, gradients, _ = first_updates(build(config, ALONE))
    for their_loss, theirs, _ in ranks(world_size, lambda rank: first_updates(build(config, join_processes("cpu", 1)))):
        assert their_loss == pytest.approx(loss, rel=1e-5)
        assert theirs.keys() == gradients.keys()
        assert_close(theirs, gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_weights_stay_the_same_on_all(rich: Config, ranks: Ranks, precision: str) -> None:
    """Bitwise, over three updates with everything random."""
    config = rich({"engine.precision": precision}, batch_size=8)
    (_, _, first), (_, _, second) = ranks(2, lambda rank: first_updates(build(config, join_processes("cpu", 1)), 3))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


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


def interrupted(config: TrainConfig, rank: int, where: str, number: int, signum: int) -> Any:
    """Trains, and sends this process a signal at the n-th call of a function of the loop."""
    original, calls = getattr(loop, where), 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            signal.raise_signal(signum)
        return original(*args, **kwargs)

    setattr(loop, where, wrapped)
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
        return interrupted(config, rank, where, number if rank == 1 else 0, signum)

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
            interrupted(config, rank, "train_update", 1, signal.SIGTERM)
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
            lambda rank, count=update: interrupted(config, rank, "train_update", 2 if count > 1 else 1, signal.SIGTERM),
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


@pytest.fixture
def damaged(tiny: Config, tmp_path: Path, digit_folders: Path) -> Config:
    """26 training images of which one cannot be decoded."""
    root = tmp_path / "damaged"
    shutil.copytree(digit_folders, root)
    sorted((root / "train").rglob("*.png"))[5].write_bytes(b"no picture")
    return lambda changes=None, **top: tiny({"data.root": str(root), **(changes or {})}, **top)


def test_damaged_images_are_counted_once_over_all(damaged: Config, ranks: Ranks, load: Any) -> None:
    """Whichever process meets it; also where it leaves a process without any image of its own."""
    config = damaged({"data.micro_batch_size": 2}, batch_size=8, epochs=3)
    assert all(isinstance(result, dict) for result in ranks(2, lambda rank: train(config).metrics))
    (message,) = load(folder_of(config) / "last.pt")["damaged"]
    assert "0" in message
    assert ".png" in message
    results = ranks(2, lambda rank: train(damaged({"data.max_damaged": 0}, run="strict", epochs=3)))
    assert [result.error for result in results] == ["DataError", "DataError"]
    assert "more than data.max_damaged=0" in results[0].message


def test_a_process_without_an_image_takes_part(damaged: Config, ranks: Ranks) -> None:
    """Batches of one pair on each of two processes: the damaged image takes its partner along, and none is left."""
    config = damaged(batch_size=4, epochs=2)
    plan = make_plan(config)
    batches = []
    for epoch in range(2):
        plan.sampler.start(epoch)
        batches += [[view.index for view in views] for views in plan.sampler]
    broken = next(i for i in range(26) if is_damaged(plan.data.train, i))
    expected = [2 if broken in batch else 4 for batch in batches]
    assert 2 in expected
    assert ranks(2, lambda rank: images_of_updates(config)) == [expected, expected]


def test_an_image_in_place_of_none_adds_nothing(damaged: Config, ranks: Ranks) -> None:
    """The gradient of the images that are left, whoever has them: one process for all, or one with none of its own."""
    config = damaged({**UNDRAWN, "recipe.mixup": 0.8}, batch_size=4)
    plan = make_plan(config)
    first = [view.index for view in next(iter(plan.sampler))]
    Path(plan.data.train.files[first[0]]).write_bytes(b"no picture")
    _, gradients, _ = first_updates(build(config, ALONE), images=2)
    for _, theirs, _ in ranks(2, lambda rank: first_updates(build(config, join_processes("cpu", 1)), images=2)):
        assert_close(theirs, gradients, rtol=1e-4, atol=1e-6)


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


def test_a_mistake_is_found_by_all_and_told_by_one(tiny: Config, ranks: Ranks) -> None:
    for config, message in (
        (tiny(batch_size=10), "batch_size=10 does not divide into pairs over 2 processes"),
        (tiny({"data.root": "nowhere"}), "nowhere"),
    ):
        first, second = ranks(2, lambda rank, config=config: train(config))
        assert message in first.message
        assert message in second.message
        assert (first.shown_elsewhere, second.shown_elsewhere) == (False, True)
        assert not folder_of(config).exists()


def test_what_one_process_alone_lacks_is_told_by_the_first(tiny: Config, ranks: Ranks) -> None:
    """Data on one machine, and not on the other."""
    first, second = ranks(2, lambda rank: train(tiny({"data.root": "nowhere"} if rank == 1 else {})))
    assert first.message.startswith("process 1: ")
    assert "nowhere" in first.message
    assert not first.shown_elsewhere
    assert second.error == "DataError"


def test_different_data_on_two_machines_is_refused(tiny: Config, damaged: Config, ranks: Ranks) -> None:
    root = Path(damaged().data.root)
    sorted((root / "train").rglob("*.png"))[0].unlink()
    results = ranks(2, lambda rank: train(damaged() if rank else tiny()))
    assert [result.error for result in results] == ["DataError", "DataError"]
    assert "(26, 11), process 1: (25, 11)" in results[0].message


def test_folders_that_are_not_shared_are_refused(tiny: Config, ranks: Ranks) -> None:
    """Each machine with a disk of its own: the second finds no checkpoint."""
    train(tiny(epochs=1, max_steps=1))
    results = ranks(2, lambda rank: train(tiny(epochs=1, max_steps=1, run="run" if rank == 0 else "elsewhere")))
    assert [result.error for result in results] == ["DataError", "DataError"]
    assert "process 0: 1, process 1: 0" in results[0].message
    assert "shared file system" in results[0].message


def test_a_folder_in_use_is_refused_on_all(tiny: Config, ranks: Ranks) -> None:
    folder = folder_of(tiny())
    folder.mkdir()
    with open(folder / ".lock", "a+") as lock:
        lock.write("process 4711 on elsewhere")
        lock.flush()
        fcntl.lockf(lock, fcntl.LOCK_EX)
        results = ranks(2, lambda rank: train(tiny(max_steps=1)))
    assert all("in use by process 4711 on elsewhere" in result.message for result in results)


def test_a_process_that_dies_ends_the_others(tiny: Config, ranks: Ranks) -> None:
    """The second fails in its second update. The first learns of it at once, not after the timeout of 10 minutes."""

    def work(rank: int) -> Any:
        original, calls = loop.training_loss, 0

        def broken(*args: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if rank == 1 and calls == 2:
                raise MemoryError("no room")
            return original(*args)

        loop.training_loss = broken
        start = time.monotonic()
        try:
            return train(tiny())
        except Exception as error:
            return type(error).__name__, time.monotonic() - start

    (_, seconds), (name, _) = ranks(2, work)
    assert name == "MemoryError"
    assert seconds < 30


def test_a_process_that_hangs_ends_the_others_after_the_timeout(tiny: Config, ranks: Ranks) -> None:
    def work(rank: int) -> float:
        config = tiny({"engine.timeout_minutes": 0.05})
        start = time.monotonic()
        if rank == 1:
            join_processes("cpu", config.engine.timeout_minutes)
            time.sleep(6)
            return 0.0
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            train(config)
        return time.monotonic() - start

    waited, _ = ranks(2, work)
    assert 2.5 < waited < 6


def test_a_model_with_parameters_out_of_use_is_refused(tiny: Config, ranks: Ranks) -> None:
    def work(rank: int) -> Any:
        run = build(tiny(), join_processes("cpu", 1))
        run.state.model.register_parameter("idle", torch.nn.Parameter(torch.zeros(3)))
        connect(run)
        return first_updates(run)

    for result in ranks(2, work):
        assert result.error == "TrainingError"
        assert "1 parameters get no gradient (idle)" in result.message


def test_the_variables_of_torchrun_must_be_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="RANK, MASTER_ADDR is not set: start them with torchrun"):
        join_processes("cpu", 1)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigError, match="cannot share MPS"):
        join_processes("mps", 1)


def test_tasks_of_a_bare_srun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    with pytest.raises(ConfigError, match="this Slurm step has 8 tasks, which would each train by themselves"):
        join_processes("cpu", 1)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert join_processes("cpu", 1) is ALONE


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join_processes("cpu", 1) is ALONE
    assert not torch.distributed.is_initialized()
    assert ALONE.table([1, 2.5]).tolist() == [[1, 2.5]]
    assert ALONE.gather("x") == ["x"]
    with pytest.raises(DataError, match="as it is"), ALONE.together():
        raise DataError("as it is")


def test_numbers_and_values_by_rank(ranks: Ranks) -> None:
    def work(rank: int) -> Any:
        processes = join_processes("cpu", 1)
        assert (processes.rank, processes.world_size, processes.local_rank) == (rank, 3, rank)
        return processes.table([rank, 0.5]).tolist(), processes.gather(f"p{rank}"), processes.first

    expected = ([[0, 0.5], [1, 0.5], [2, 0.5]], ["p0", "p1", "p2"])
    assert ranks(3, work) == [(*expected, True), (*expected, False), (*expected, False)]


def test_a_dry_run_is_shown_once(tiny: Config, ranks: Ranks, capfd: pytest.CaptureFixture) -> None:
    ranks(2, lambda rank: train(tiny(dry_run=True)).folder)
    assert capfd.readouterr().out.count("dry run: nothing was written.") == 1


def test_gradient_checkpointing_and_compile(rich: Config, ranks: Ranks) -> None:
    """Neither changes a gradient."""
    plain = first_updates(build(rich(UNDRAWN, batch_size=12), ALONE))[1]
    settings = {"engine.grad_checkpointing": True, "engine.compile_backend": "eager"}
    config = rich({**UNDRAWN, **settings}, batch_size=12, compile=True)
    for _, gradients, _ in ranks(2, lambda rank: first_updates(build(config, join_processes("cpu", 1)))):
        assert_close(gradients, plain, rtol=1e-4, atol=1e-6)


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


def test_other_processes_are_silent(tiny: Config, ranks: Ranks, capfd: pytest.CaptureFixture) -> None:
    def work(rank: int) -> None:
        logging.basicConfig(level=logging.INFO, format=f"[{os.environ['RANK']}] %(message)s", force=True)
        logging.getLogger("infvit").setLevel(logging.INFO)
        train(tiny(epochs=1))

    ranks(2, work)
    lines = capfd.readouterr().err.splitlines()
    assert any(line.startswith("[0] epoch 1/1") for line in lines)
    assert not [line for line in lines if line.startswith("[1]")]
