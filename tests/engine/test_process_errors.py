"""What goes wrong on one of several processes is told once, and leaves none of them waiting."""

import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interruptions import folder_of
from steps import build, first_updates

from infvit.config import TrainConfig
from infvit.engine import loop, train
from infvit.engine.processes import ALONE, join_processes
from infvit.engine.setup import connect
from infvit.errors import ConfigError, DataError

Config = Callable[..., TrainConfig]
Ranks = Callable[..., list[Any]]


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


def test_different_data_on_two_machines_is_refused(tiny: Config, one_damaged: Config, ranks: Ranks) -> None:
    root = Path(one_damaged().data.root)
    sorted((root / "train").rglob("*.png"))[0].unlink()
    results = ranks(2, lambda rank: train(one_damaged() if rank else tiny()))
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


def test_other_processes_are_silent(tiny: Config, ranks: Ranks, capfd: pytest.CaptureFixture) -> None:
    def work(rank: int) -> None:
        logging.basicConfig(level=logging.INFO, format=f"[{os.environ['RANK']}] %(message)s", force=True)
        logging.getLogger("infvit").setLevel(logging.INFO)
        train(tiny(epochs=1))

    ranks(2, work)
    lines = capfd.readouterr().err.splitlines()
    assert any(line.startswith("[0] epoch 1/1") for line in lines)
    assert not [line for line in lines if line.startswith("[1]")]
