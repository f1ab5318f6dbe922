"""A model shared out over processes (FSDP2) learns what a whole one learns; its checkpoints are those of any run."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interruptions import at_call, folder_of, send
from steps import Steps, awake, build, first_updates
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from infvit.config import TrainConfig
from infvit.engine import loop, train
from infvit.engine.parallel import is_sharded, shard
from infvit.engine.processes import join_processes
from infvit.errors import ConfigError

pytestmark = pytest.mark.slow

Config = Callable[..., TrainConfig]
Ranks = Callable[..., list[Any]]
SHARDED = {
    "engine.parallel": "fsdp",
    "recipe.ema_decay": None,
    "recipe.drop_path": 0.0,
    "recipe.drop": 0.0,
    "recipe.clip_grad": 1.0,
    # As infvit_pure_24l is, but for the size: several layers, few heads, one gamma a layer.
    "model.name": "infvit_pure_24l",
    "model.args": {"depth": 3, "embed_dim": 24, "num_heads": 2, "patch_size": 4},
}


def first_of_several(config: TrainConfig) -> Steps:
    """The first update, seen by one of several processes."""
    return first_updates(awake(build(config, join_processes("cpu", 1))))


@pytest.mark.parametrize("micro", [None, 4], ids=["whole", "accumulated"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_those_of_the_whole_model(rich: Config, ranks: Ranks, world_size: int, micro: int | None) -> None:
    """Also of a vector, gamma, of one number only, which does not divide; and the norm is that of all shares."""
    config = rich({**SHARDED, "data.micro_batch_size": micro}, batch_size=12)
    alone = first_updates(awake(build(config)))
    assert all(gradient.any() for gradient in alone.gradients.values())
    for theirs in ranks(world_size, lambda rank: first_of_several(config)):
        assert theirs.loss == pytest.approx(alone.loss, rel=1e-5)
        assert theirs.norm == pytest.approx(alone.norm, rel=1e-4)
        assert theirs.gradients.keys() == alone.gradients.keys()
        assert_close(theirs.gradients, alone.gradients, rtol=1e-3, atol=1e-6)


def test_each_process_holds_a_share(rich: Config, ranks: Ranks) -> None:
    def work(rank: int) -> tuple[int, int, bool]:
        run = build(rich(SHARDED), join_processes("cpu", 1))
        assert is_sharded(run.state.model)
        parameters = list(run.state.model.parameters())
        assert all(isinstance(p, DTensor) for p in parameters)
        optimised = [p for group in run.state.optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in optimised} == {id(p) for p in parameters}
        return sum(p.to_local().numel() for p in parameters), sum(p.numel() for p in parameters), True

    (first, total, _), (second, _, _) = ranks(2, work)
    assert first + second == total
    assert second > 0.4 * total


def without_times(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timing = ("images_per_second", "data_wait", "train_seconds", "eval_seconds", "gamma")
    return [{k: v for k, v in row.items() if k not in timing} for row in history]


def test_a_run_is_that_of_one_process(rich: Config, ranks: Ranks, load: Any, rows: Any) -> None:
    alone, config = rich(SHARDED, run="alone"), rich(SHARDED)
    train(alone)
    first, second = ranks(2, lambda rank: train(config).metrics)
    assert without_times([first]) == without_times([second])
    assert [row["update"] for row in rows(folder_of(config))] == [3, 6]
    for mine, theirs in zip(rows(folder_of(config)), rows(folder_of(alone)), strict=True):
        for name in ("train_loss", "grad_norm", "loss"):
            assert mine[name] == pytest.approx(theirs[name], rel=2e-2)
        assert mine["gamma"] == pytest.approx(theirs["gamma"], rel=1e-2)
        assert mine["images"] == 11
    mine, theirs = (load(folder_of(c) / "last.pt") for c in (config, alone))
    assert mine["state_dict"].keys() == theirs["state_dict"].keys()
    assert_close(mine["state_dict"], dict(theirs["state_dict"]), rtol=0.1, atol=5e-3)
    shapes = [
        {key: {k: tuple(v.shape) for k, v in entry.items()} for key, entry in content["optimizer"]["state"].items()}
        for content in (mine, theirs)
    ]
    assert shapes[0] == shapes[1]
    assert mine["optimizer"]["param_groups"] == theirs["optimizer"]["param_groups"]


def stop_at(config: TrainConfig, number: int) -> Any:
    """Trains up to an update, where this process is told to stop."""
    with at_call(loop, "train_update", number, send(signal.SIGTERM)):
        return train(config).metrics


@pytest.mark.parametrize("direction", ["to one", "from one"])
def test_checkpoints_go_from_shares_to_a_whole_and_back(rich: Config, ranks: Ranks, load: Any, direction: str) -> None:
    """Weights and the optimiser's moments: what is loaded is exactly what was saved."""
    config = rich(SHARDED)
    if direction == "to one":
        assert [result.error for result in ranks(2, lambda rank: stop_at(config, 2))] == ["Interrupted"] * 2
        restored = [build(config).state.state_dict()]
    else:
        with pytest.raises(Exception, match="stopped after update 2"):
            stop_at(config, 2)
        restored = ranks(2, lambda rank: build(config, join_processes("cpu", 1)).state.state_dict())
    saved = load(folder_of(config) / "last.pt")
    assert saved["update"] == 2
    for state in restored:
        assert state["state_dict"].keys() == saved["state_dict"].keys()
        assert all(torch.equal(value, saved["state_dict"][name]) for name, value in state["state_dict"].items())
        assert state["optimizer"]["state"].keys() == saved["optimizer"]["state"].keys() != set()
        for index, values in state["optimizer"]["state"].items():
            assert {"exp_avg", "exp_avg_sq", "step"} <= values.keys()
            assert all(torch.equal(v, saved["optimizer"]["state"][index][name]) for name, v in values.items())
        assert state["epoch_loss"] == saved["epoch_loss"] > 0


def test_an_interrupted_run_goes_on_exactly(rich: Config, ranks: Ranks, outcome: Any, same: Any) -> None:
    """On the same two processes: bitwise."""
    straight, config = rich(SHARDED, run="straight"), rich(SHARDED)
    ranks(2, lambda rank: train(straight).metrics)
    assert [result.error for result in ranks(2, lambda rank: stop_at(config, 4))] == ["Interrupted"] * 2
    ranks(2, lambda rank: train(config).metrics)
    assert same(outcome(folder_of(config)), outcome(folder_of(straight)))


def test_gradient_checkpointing_changes_no_gradient(rich: Config, ranks: Ranks) -> None:
    plain = first_updates(awake(build(rich(SHARDED)))).gradients
    config = rich({**SHARDED, "engine.grad_checkpointing": True})
    for theirs in ranks(2, lambda rank: first_of_several(config)):
        assert_close(theirs.gradients, plain, rtol=1e-3, atol=1e-6)


def test_more_processes_than_held_out_images(rich: Config, ranks: Ranks, tmp_path: Path, digit_folders: Path) -> None:
    """A process without an image runs the model all the same: the others wait for its shares."""
    root = tmp_path / "few"
    shutil.copytree(digit_folders / "train", root / "train")
    for folder in sorted((digit_folders / "validation").iterdir())[:2]:
        (root / "validation" / folder.name).mkdir(parents=True)
        shutil.copy(sorted(folder.iterdir())[0], root / "validation" / folder.name)
    config = rich({**SHARDED, "data.root": str(root)}, batch_size=12, epochs=1)
    results = ranks(3, lambda rank: train(config).metrics)
    assert [metrics["images"] for metrics in results] == [2, 2, 2]


def test_damaged_images_hold_nobody_up(rich: Config, ranks: Ranks, tmp_path: Path, digit_folders: Path, load: Any):
    """One pair a micro-batch: some of them are empty on one process, while the other waits for its shares."""
    root = tmp_path / "damaged"
    shutil.copytree(digit_folders, root)
    for path in sorted((root / "train").rglob("*.png"))[::4]:
        path.write_bytes(b"no picture")
    config = rich(
        {**SHARDED, "data.root": str(root), "data.micro_batch_size": 2, "recipe.repeated_aug": 1}, batch_size=12
    )
    results = ranks(2, lambda rank: train(config).metrics)
    assert [metrics["update"] for metrics in results] == [4, 4]
    assert len(load(folder_of(config) / "last.pt")["damaged"]) >= 6


def test_a_broken_update_is_named_and_left_out_by_all(rich: Config, ranks: Ranks, load: Any) -> None:
    config = rich({**SHARDED, "recipe.clip_grad": None})

    def work(rank: int) -> Any:
        original, calls = loop.training_loss, 0

        def broken(*args: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return original(*args) * (float("nan") if rank == 1 and calls == 1 else 1)

        loop.training_loss = broken
        return train(config).metrics["skipped"]

    assert ranks(2, work) == [1, 1]
    assert all(value.isfinite().all() for value in load(folder_of(config) / "last.pt")["state_dict"].values())


def test_what_does_not_combine_is_refused(rich: Config) -> None:
    for changes, top, message in (
        ({"recipe.ema_decay": 0.9}, {}, "a weight average; use recipe.ema_decay=null"),
        ({"engine.precision": "fp16"}, {}, "the loss scaling of fp16; use engine.precision=bf16"),
        ({}, {"compile": True}, "compile=true"),
    ):
        with pytest.raises(ConfigError, match=f"engine.parallel=fsdp does not combine with {message}"):
            rich({**SHARDED, **changes}, **top)
    with pytest.raises(ConfigError, match=r"engine.parallel='zero' must be one of ddp, fsdp"):
        rich({"engine.parallel": "zero"})
    with pytest.raises(ConfigError, match="shards a model by its `blocks`, and lenet has none; use ddp"):
        shard(nn.Linear(2, 2), "lenet")
    with pytest.raises(ConfigError, match="does not share the batch statistics of levit; use ddp"):
        shard(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "levit")


def test_half_precision(rich: Config, ranks: Ranks, rows: Any) -> None:
    config = rich({**SHARDED, "engine.precision": "bf16"})
    assert all(isinstance(result, dict) for result in ranks(2, lambda rank: train(config).metrics))
    assert rows(folder_of(config))[-1]["train_loss"] < 2
