"""PyTorch loaders around a `Source`.

Not timm's `create_loader`: it takes no sampler, and its augmentation draws from generators that run on from view to
view, so that a resumed run cannot see what the unbroken one saw. Here each view is seeded by itself.

A damaged image is never replaced by another one. In training its micro-batch is returned without it, and without its
mixup partner, so that the others keep theirs; in evaluation it is an error, or left out and
named when that is asked for.
"""

import atexit
import logging
import multiprocessing
import random
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from infvit.data.sampler import TrainSampler, View
from infvit.data.source import Source
from infvit.data.transforms import Transform
from infvit.errors import DataError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_logger = logging.getLogger(__name__)


class Batch(NamedTuple):
    """A training micro-batch of n images: float32 (n, C, H, W), int64 (n,), and one message, naming the file, for each
    image that could not be decoded. After damage n is smaller than planned; at 0, `images` has the shape (0,)."""

    images: Tensor
    targets: Tensor
    damaged: list[str]


class EvalBatch(NamedTuple):
    """An evaluation batch of n images: float32 (n, C, H, W), int64 (n,), their indices in the split, int64 (n,), and a
    message, naming the file, for each image left out as damaged. At n = 0, `images` has the shape (0,)."""

    images: Tensor
    targets: Tensor
    indices: Tensor
    damaged: Sequence[str] = ()


@dataclass(frozen=True)
class Sample:
    """One transformed image, float32 (C, H, W)."""

    image: Tensor
    target: int
    index: int


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Runs a block with Python's, NumPy's and PyTorch's (CPU) global generators seeded, and restores them afterwards.

    The block's draws thus depend on the seed (64 bits) alone, and those of the surrounding program (dropout) do not
    depend on the block. GPU generators are left alone, hence not `torch.manual_seed`.
    """
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        random.seed(seed)
        np.random.seed((seed & 0xFFFFFFFF, seed >> 32))
        torch.default_generator.manual_seed(seed)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(pytorch)


class TrainDataset(Dataset[Sample | DataError]):
    """Augmented views. A damaged image comes as the error itself: raised in a worker it would lose its one line."""

    def __init__(self, source: Source, transform: Transform) -> None:
        self.source, self.transform = source, transform

    def __getitem__(self, view: View) -> Sample | DataError:
        try:
            image = self.source.image(view.index)
        except DataError as error:
            return error
        with seeded(view.seed):
            return Sample(self.transform(image), self.source.target(view.index), view.index)


class EvalDataset(Dataset[Sample | DataError]):
    """Images under a transform without randomness."""

    def __init__(self, source: Source, transform: Transform) -> None:
        self.source, self.transform = source, transform

    def __getitem__(self, index: int) -> Sample | DataError:
        try:
            return Sample(self.transform(self.source.image(index)), self.source.target(index), index)
        except DataError as error:
            return error


def collate_train(samples: Sequence[Sample | DataError]) -> Batch:
    """Stacks a micro-batch, leaving out damaged images and their mirrors (`n - 1 - i` of `i`)."""
    mirrored = zip(samples, reversed(samples), strict=True)
    good = [s for s, mirror in mirrored if isinstance(s, Sample) and isinstance(mirror, Sample)]
    damaged = [str(s) for s in samples if isinstance(s, DataError)]
    images = torch.stack([s.image for s in good]) if good else torch.empty(0)
    return Batch(images, torch.tensor([s.target for s in good], dtype=torch.int64), damaged)


def collate_eval(samples: Sequence[Sample | DataError]) -> EvalBatch:
    """Stacks a batch, leaving out damaged images."""
    good = [s for s in samples if isinstance(s, Sample)]
    damaged = [str(s) for s in samples if isinstance(s, DataError)]
    images = torch.stack([s.image for s in good]) if good else torch.empty(0)
    targets = torch.tensor([s.target for s in good], dtype=torch.int64)
    return EvalBatch(images, targets, torch.tensor([s.index for s in good], dtype=torch.int64), damaged)


class Loader(DataLoader[Any]):
    """Starts its workers with signals held back, until they ignore them: torch's own handler would end a worker."""

    def __iter__(self) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return super().__iter__()  # no signal ever reaches this thread
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class EvalLoader(Loader):
    """Raises in the calling process what a worker found damaged."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            if batch.damaged:
                raise DataError(batch.damaged[0])
            yield batch


def build_train_loader(
    source: Source, transform: Transform, sampler: TrainSampler, num_workers: int, pin_memory: bool
) -> DataLoader[Batch]:
    """Returns a loader of training micro-batches (`Batch`) in the sampler's order.

    Each iteration runs from where `sampler.start` put it to the end of that epoch. Neither the order nor the images
    depend on `num_workers`, and no global generator is touched.
    """
    return _loader(Loader, TrainDataset(source, transform), sampler, collate_train, num_workers, pin_memory)


def build_eval_loader(
    source: Source,
    transform: Transform,
    batch_size: int,
    num_workers: int,
    pin_memory: bool,
    rank: int = 0,
    world_size: int = 1,
    exclude_damaged: bool = False,
    whole_batches: bool = False,
) -> DataLoader[EvalBatch]:
    """Returns a loader of this process's share of a split (`EvalBatch`).

    Over all processes each image comes exactly once: nothing is padded, the last batch may be smaller, and a process
    may have no batch at all. A damaged image raises `DataError` with its path when its batch is reached, or is left out
    and named in `EvalBatch.damaged`. With `whole_batches` it is batches, not images, that are dealt out, so that each
    holds the same images whatever the number of processes.
    """
    mine = range(len(source)) if whole_batches else range(rank, len(source), world_size)
    batches = [mine[at : at + batch_size] for at in range(0, len(mine), batch_size)]
    batches = batches[rank::world_size] if whole_batches else batches
    return _loader(
        Loader if exclude_damaged else EvalLoader,
        EvalDataset(source, transform),
        batches,
        collate_eval,
        num_workers,
        pin_memory,
    )


def _loader(
    kind: type[Loader],
    dataset: Dataset[Any],
    batches: Iterable[Any],
    collate: Any,
    num_workers: int,
    pin_memory: bool,
) -> DataLoader[Any]:
    return kind(
        dataset,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # each iteration draws a seed, by default from the global generator
        worker_init_fn=_ignore_signals,
    )


def _ignore_signals(worker: int) -> None:
    """Leaves signals to the main process: they reach the whole process group or job step, and that one saves first.

    Not even a second SIGTERM ends a worker: under Slurm it gets one from scancel and one from torchrun.
    """
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


@atexit.register
def _kill_workers() -> None:
    """Ends the workers that are still there when this process ends: they may hang in a file system.

    multiprocessing, which comes after this, would send them a SIGTERM and wait for ever.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler takes a killed worker for an accident
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


class DamageLog:
    """Counts damaged files of a run, names each once, and stops the run when there are too many."""

    def __init__(self, most: int, seen: list[str]) -> None:
        """`most` is `data.max_damaged`: that many different files may be damaged. `seen`: those of earlier starts."""
        self.most = most
        self.seen = seen

    def add(self, damaged: Sequence[str]) -> None:
        """Takes `Batch.damaged`. Raises `DataError` above the limit."""
        for message in damaged:
            if message not in self.seen:
                self.seen.append(message)
                _logger.warning("Skipped: %s", message)
        if len(self.seen) > self.most:
            raise DataError(
                f"{len(self.seen)} images cannot be decoded, more than data.max_damaged={self.most} (the last: "
                f"{damaged[-1]}) Mend the data set, or raise data.max_damaged."
            )
