"""Loading: exact whatever the number of workers and the place of interruption, honest about damage."""

import contextlib
import dataclasses
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from infvit.config import DataConfig, RecipeConfig
from infvit.data import (
    Batch,
    DamageLog,
    EvalBatch,
    TrainSampler,
    build_eval_loader,
    build_source,
    build_train_loader,
    eval_transform,
    seeded,
    train_transform,
)
from infvit.errors import DataError

DIGITS = DataConfig(name="digits")
PLAIN = RecipeConfig(
    auto_augment=None, color_jitter=None, hflip=0, scale=[1, 1], ratio=[1, 1], reprob=0, interpolation="nearest"
)
"""Leaves images as they are."""


def train_batches(workers: int, seed: int = 0, epoch: int = 0, update: int = 0) -> list[Batch]:
    source = build_source(DIGITS, "train")
    sampler = TrainSampler(60, 20, 8, 3, seed)
    loader = build_train_loader(source, train_transform(RecipeConfig(), DIGITS, 32), sampler, workers, False)
    sampler.start(epoch, update)
    return list(loader)


def same(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x.images, y.images) and torch.equal(x.targets, y.targets) for x, y in zip(a, b, strict=True)
    )


def test_workers_and_interruptions_change_nothing() -> None:
    whole = train_batches(0, epoch=3)
    assert [len(batch.targets) for batch in whole] == [8, 8, 4] * 3
    assert whole[0].images.shape == (8, 3, 32, 32)
    assert whole[0].images.dtype == torch.float32
    assert same(whole, train_batches(1, epoch=3))
    assert same(whole, train_batches(2, epoch=3))
    assert same(whole[3:], train_batches(0, epoch=3, update=1))
    assert same(whole[6:], train_batches(2, epoch=3, update=2))
    assert not same(whole, train_batches(0, epoch=4))
    assert not same(whole, train_batches(0, seed=1, epoch=3))


def test_views_of_one_image_differ() -> None:
    images = train_batches(0)[0].images
    assert len({image.numpy().tobytes() for image in images}) == len(images)


def test_global_generators_are_left_alone() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(3).tolist()
    for workers in (0, 1):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        train_batches(workers)
        assert (random.random(), np.random.rand(), torch.rand(3).tolist()) == expected


def test_seeded_seeds_all_three_and_restores_after_an_error() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(()).item()

    draws = []
    for seed in (2**63 + 5, 2**63 + 5, 6):
        with seeded(seed):
            draws.append(draw())
    assert draws[0] == draws[1]
    assert all(a != b for a, b in zip(draws[0], draws[2], strict=True))
    before = random.getstate()
    with contextlib.suppress(KeyError), seeded(3):
        draw()
        raise KeyError
    assert random.getstate() == before


@pytest.fixture
def damaged(tmp_path: Path) -> DataConfig:
    """Ten images, image i in class 0 of grey value 20 i; 3 and 8 damaged."""
    for split in ("train", "val"):
        folder = tmp_path / split / "only"
        folder.mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (8, 8), (20 * i,) * 3).save(folder / f"{i}.png")
        (folder / "3.png").write_bytes(b"")
        (folder / "8.png").write_bytes(b"not an image")
    return DataConfig(name="folder", root=str(tmp_path), mean=[0.0], std=[1.0])


@pytest.mark.parametrize("workers", [0, 2])
def test_training_drops_damaged_images_and_their_partners(damaged: DataConfig, workers: int) -> None:
    source = build_source(damaged, "train")
    sampler = TrainSampler(10, 10, None, 1, seed=0)
    (views,) = list(sampler)
    (batch,) = build_train_loader(source, train_transform(PLAIN, damaged, 8), sampler, workers, False)
    order = [view.index for view in views]
    lost = {order[p] for i in (3, 8) for p in (order.index(i), 9 - order.index(i))}
    kept = [i for i in order if i not in lost]
    assert len(kept) >= 6
    values = (batch.images[:, 0, 0, 0] * 255 / 20).round().int().tolist()
    assert values == kept  # nothing was put in place of the damaged ones, and partners still face each other
    assert len(batch.targets) == len(kept)
    assert len(batch.damaged) == 2
    assert all(any(name in message for message in batch.damaged) for name in ("3.png", "8.png"))


def test_a_wholly_damaged_micro_batch_is_empty(damaged: DataConfig) -> None:
    for path in Path(damaged.root or "").glob("train/only/*"):
        path.write_bytes(b"")
    sampler = TrainSampler(10, 10, 4, 1, seed=0)
    transform = train_transform(PLAIN, damaged, 8)
    batches = list(build_train_loader(build_source(damaged, "train"), transform, sampler, 0, False))
    assert [len(b.targets) for b in batches] == [len(b.images) for b in batches] == [0, 0, 0]
    assert [len(b.damaged) for b in batches] == [4, 4, 2]


def test_damage_log_names_each_file_once_and_stops(caplog: pytest.LogCaptureFixture) -> None:
    log = DamageLog(2, [])
    with caplog.at_level(logging.WARNING, logger="infvit"):
        log.add(["a.jpg: bad.", "b.jpg: bad."])
        log.add(["a.jpg: bad."])
    assert [record.getMessage() for record in caplog.records] == ["Skipped: a.jpg: bad.", "Skipped: b.jpg: bad."]
    with pytest.raises(DataError, match=r"3 images .*data.max_damaged=2.*c.jpg"):
        log.add(["c.jpg: bad."])


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_stops_at_damage_with_one_line(damaged: DataConfig, workers: int) -> None:
    source = build_source(damaged, "val")
    loader = build_eval_loader(source, eval_transform(1.0, "nearest", damaged, 8), 2, workers, False)
    batches = iter(loader)
    assert next(batches).indices.tolist() == [0, 1]
    with pytest.raises(DataError) as caught:
        list(batches)
    assert str(caught.value).startswith(source.locate(3))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_leaves_out_damage_when_asked(damaged: DataConfig, workers: int) -> None:
    source, transform = build_source(damaged, "val"), eval_transform(1.0, "nearest", damaged, 8)
    batches = list(build_eval_loader(source, transform, 2, workers, False, 1, 2, exclude_damaged=True))
    assert [batch.indices.tolist() for batch in batches] == [[1], [5, 7], [9]]
    assert [len(batch.images) for batch in batches] == [1, 2, 1]
    assert [message.startswith(source.locate(3)) for batch in batches for message in batch.damaged] == [True]
    (alone,) = list(build_eval_loader(source, transform, 1, workers, False, 3, 10, exclude_damaged=True))
    assert (len(alone.images), len(alone.targets), len(alone.damaged)) == (0, 0, 1)


class Few:
    """Seven grey images, image i of class i."""

    classes = tuple("0123456")
    native_size = 8
    warnings = ()

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def image(self, index: int) -> Image.Image:
        return Image.new("RGB", (8, 8), (index,) * 3)

    def target(self, index: int) -> int:
        return index

    def locate(self, index: int) -> str:
        return str(index)


class Noise(Few):
    """Images of noise, which counts how many were decoded. Those of `damaged` cannot be."""

    def __init__(self, length: int, damaged: tuple[int, ...] = ()) -> None:
        super().__init__(length)
        self.decoded: list[int] = []
        self.damaged = damaged

    def image(self, index: int) -> Image.Image:
        self.decoded.append(index)
        if index in self.damaged:
            raise DataError(f"{index}: damaged")
        return Image.fromarray(np.random.default_rng(index).integers(0, 256, (12, 9, 3), np.uint8))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("micro", "world"), [(None, 1), (4, 1), (8, 2), (1, 1)])
def test_an_image_is_decoded_once_for_its_views_in_a_row(micro: int | None, world: int, workers: int) -> None:
    """And each view is what it is when it is decoded and augmented alone."""
    transform = train_transform(RecipeConfig(reprob=0.5), DIGITS, 8)
    for rank in range(world):
        source, sampler = Noise(48), TrainSampler(48, 16, micro, 3, seed=4, rank=rank, world_size=world)
        batches = list(build_train_loader(source, transform, sampler, workers, False))
        order = list(sampler)
        for views, batch in zip(order, batches, strict=True):
            for view, image, target in zip(views, batch.images, batch.targets, strict=True):
                with seeded(view.seed):
                    assert torch.equal(image, transform(Noise(48).image(view.index)))
                assert target == view.index
        runs = sum(1 + sum(a.index != b.index for a, b in pairwise(views)) for views in order)
        assert len(source.decoded) == (0 if workers else runs)
        if micro is None:
            assert runs < 0.45 * sum(map(len, order))


def test_all_views_of_a_damaged_image_are_left_out() -> None:
    """Each with its partner; the file is decoded once, and reported for each of its views."""
    source, sampler = Noise(12), TrainSampler(12, 12, None, 3, seed=0)
    (views,) = list(sampler)
    first = views[0].index
    source.damaged = (first,)
    (batch,) = build_train_loader(source, train_transform(PLAIN, DIGITS, 8), sampler, 0, False)
    assert source.decoded.count(first) == 1
    assert batch.damaged == [f"{first}: damaged"] * 3
    assert batch.targets.tolist() == [view.index for view in views[3:-3]]


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_evaluation_scores_each_image_once(length: int, world: int, batch_size: int) -> None:
    transform = eval_transform(1.0, "nearest", DIGITS, 8)
    batches: list[EvalBatch] = []
    for rank in range(world):
        loader = build_eval_loader(Few(length), transform, batch_size, 0, False, rank, world)
        mine = list(loader)
        assert len(mine) == len(loader)
        batches += mine
    indices = [i for batch in batches for i in batch.indices.tolist()]
    assert sorted(indices) == list(range(length))
    assert [t for batch in batches for t in batch.targets.tolist()] == indices
    assert all(len(batch.images) == len(batch.indices) <= batch_size for batch in batches)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_whole_batches_are_dealt_out_once_and_the_same_on_any_number_of_processes(world: int) -> None:
    transform = eval_transform(1.0, "nearest", DIGITS, 8)
    loaders = [
        build_eval_loader(Few(7), transform, 2, 0, False, rank, world, whole_batches=True) for rank in range(world)
    ]
    shares = [[batch.indices.tolist() for batch in loader] for loader in loaders]
    assert sorted(batch for share in shares for batch in share) == [[0, 1], [2, 3], [4, 5], [6]]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("name", ["digits", "digit_scenes", "folder"])
def test_loading_can_be_sent_to_spawned_workers(damaged: DataConfig, name: str) -> None:
    """macOS and Windows start workers afresh and pickle what these need."""
    source = build_source(dataclasses.replace(damaged, name=name), "train")
    transform = train_transform(RecipeConfig(), damaged, 16)
    there, back = pickle.loads(pickle.dumps((source, transform)))
    for original in (0, 1):
        with seeded(original):
            expected = transform(source.image(original))
        with seeded(original):
            assert torch.equal(back(there.image(original)), expected)


HANGING = """
import os, signal, sys, time
import torch
from infvit.data import loader

class Hanging(torch.utils.data.Dataset):
    def __getitem__(self, index):
        if index > 1:
            time.sleep(100)
        return index

batches = loader._loader(loader.Loader, Hanging(), [[0], [1], [2], [3]], list, 2, False)
running = iter(batches)
assert [next(running), next(running)] == [[0], [1]]
for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
    before = signal.signal(signum, signal.SIG_IGN)
    os.killpg(0, signum)
    signal.signal(signum, before)
time.sleep(0.3)
print(*(worker.pid for worker in running._workers if worker.is_alive()))
sys.exit(5)
"""


@pytest.mark.slow
def test_workers_outlive_signals_but_not_their_process() -> None:
    """Also where they hang, and nobody has told them to end."""
    command = [sys.executable, "-c", HANGING]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, timeout=60, check=False)
    workers = [int(pid) for pid in done.stdout.split()]
    assert len(workers) == 2, done.stderr
    assert (done.returncode, done.stderr) == (5, "")
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def test_workers_survive_a_signal_while_they_start() -> None:
    """Before they ignore signals themselves, which is the first thing of ours that they do."""
    transform, sampler = train_transform(RecipeConfig(), DIGITS, 16), TrainSampler(60, 20, None, 1, 0)
    loader = build_train_loader(build_source(DIGITS, "train"), transform, sampler, 2, False)
    ignore = loader.worker_init_fn

    def late(worker: int) -> None:
        time.sleep(0.5)
        ignore(worker)

    loader.worker_init_fn = late
    batches = iter(loader)
    for worker in loader._iterator._workers:
        os.kill(worker.pid, signal.SIGTERM)
    assert sum(len(batch.targets) for batch in batches) == 60
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_loading_in_a_thread_leaves_signals_alone() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert same(pool.submit(train_batches, 1).result(), train_batches(0))
