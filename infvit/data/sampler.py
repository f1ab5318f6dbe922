"""Which image is where in the run, and with which random numbers it is augmented.

Everything is a function of (run seed, epoch, position in the epoch): not of the number of workers, of processes, of the
micro-batch size, or of where a run was interrupted.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from infvit.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class View:
    """One augmented view: the image's index and the seed (64 bits) of its augmentation."""

    index: int
    seed: int


class TrainSampler:
    """Yields the views of each micro-batch of one process.

    An epoch is a random order of the images; update `u` takes its positions `[u * B, (u + 1) * B)` and the rest is
    dropped. With `repeats` > 1 each image stands that many times in a row and the sequence is cut to the number of
    images (repeated augmentation, as in DeiT), so an epoch shows only `distinct_images` of them.

    Mixup pairs image `p` of a batch with image `B - 1 - p`. Both mirrors are always in the same micro-batch, arranged
    so that `flip(0)` of the micro-batch pairs exactly them: mixing each micro-batch equals mixing the global batch, for
    any micro-batch size and number of processes. (An odd micro-batch has no pairs; the configuration excludes mixing.)

    Attributes:
        updates_per_epoch: Updates in one epoch.
        micro_batches: Micro-batches of one update on this process. The last of them may be smaller.
        distinct_images: Different images shown in one epoch.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        micro_batch_size: int | None,
        repeats: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Checks that the numbers fit together.

        Args:
            num_samples: Images in the training split.
            batch_size: Images per update over all processes and micro-batches.
            micro_batch_size: Images per forward pass of one process; None: the process's whole share.
            repeats: Views of an image in one epoch.
            seed: Seed of the run.
            rank: Index of this process.
            world_size: Number of processes.

        Raises:
            DataError: There are fewer images than one update takes.
            ConfigError: The batch cannot be divided among the processes.
        """
        check_batch(num_samples, batch_size)
        if world_size > 1 and batch_size % (2 * world_size):
            unit = 2 * world_size
            below, above = batch_size // unit * unit, (batch_size // unit + 1) * unit
            raise ConfigError(
                f"batch_size={batch_size} does not divide into pairs over {world_size} processes: "
                f"use a multiple of {unit}, e.g. {f'{below} or ' if below else ''}{above}."
            )
        self.num_samples, self.batch_size, self.repeats = num_samples, batch_size, repeats
        self.seed = seed
        self.updates_per_epoch = num_samples // batch_size
        self.distinct_images = -(-self.updates_per_epoch * batch_size // repeats)
        self._layout = _layout(batch_size, micro_batch_size, rank, world_size)
        self.micro_batches = len(self._layout)
        self.start(0)

    def start(self, epoch: int, update: int = 0) -> None:
        """Makes the next iteration begin at this update of this epoch. It ends with the epoch."""
        self.epoch, self.update = epoch, update

    def __len__(self) -> int:
        """Micro-batches that the next iteration yields."""
        return max(0, self.updates_per_epoch - self.update) * self.micro_batches

    def __iter__(self) -> Iterator[list[View]]:
        order, seeds = self._epoch(self.epoch)
        for update in range(self.update, self.updates_per_epoch):
            for positions in self._layout:
                at = update * self.batch_size + positions
                yield [View(*pair) for pair in zip(order[at].tolist(), seeds[at].tolist(), strict=True)]

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the image index and the view seed of every position of an epoch."""
        images = np.random.default_rng((self.seed, epoch, 0)).permutation(self.num_samples)
        order = np.repeat(images[: -(-self.num_samples // self.repeats)], self.repeats)[: self.num_samples]
        seeds = np.random.default_rng((self.seed, epoch, 1)).integers(2**64, size=self.num_samples, dtype=np.uint64)
        return order, seeds


def check_batch(num_samples: int, batch_size: int) -> None:
    """Raises `DataError` when the training split has fewer images than one update takes."""
    if num_samples < batch_size:
        raise DataError(
            f"The training split has {num_samples} images, fewer than one batch (batch_size={batch_size}): "
            f"lower batch_size to at most {num_samples}, or give more images."
        )


def _layout(batch_size: int, micro_batch_size: int | None, rank: int, world_size: int) -> list[np.ndarray]:
    """Returns the positions, within the global batch, of each micro-batch of a process."""
    share = batch_size // 2 // world_size
    left = np.arange(rank * share, (rank + 1) * share)
    middle = [batch_size // 2] if batch_size % 2 else []  # without a partner; only ever on a single process
    size = micro_batch_size or batch_size
    if size % 2 or (middle and batch_size <= size):
        whole = np.concatenate([left, middle, batch_size - 1 - left[::-1]]).astype(np.int64)
        return [whole[at : at + size] for at in range(0, len(whole), size)]
    halves = [left[at : at + size // 2] for at in range(0, share, size // 2)]
    micro_batches = [np.concatenate([half, batch_size - 1 - half[::-1]]) for half in halves]
    return micro_batches + ([np.array(middle)] if middle else [])
