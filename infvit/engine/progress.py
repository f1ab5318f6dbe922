"""What the user sees while an epoch runs: a bar on a terminal, plain lines elsewhere."""

import logging
import sys
import time
from collections.abc import Iterator
from typing import Self, TypeVar

from tqdm import tqdm

T = TypeVar("T")

log = logging.getLogger(__name__)


class Progress:
    """Shows loss, learning rate, images/s, the share of time spent waiting for data, and the time left.

    A context manager: the bar goes away at its end.

    Args:
        epoch: index of the epoch, from 0.
        epochs: epochs of the run.
        updates: updates in the epoch.
        done: updates of it that a resumed run has behind it.
        seconds: time between two plain lines.
        shown: whether this process shows anything.
    """

    def __init__(self, epoch: int, epochs: int, updates: int, done: int, seconds: float, shown: bool = True) -> None:
        self.label = f"epoch {epoch + 1}/{epochs}"
        self.updates, self.done, self.first = updates, done, done
        self.seconds = seconds
        self.waited = 0.0
        self.images = 0
        self.start = self.last_line = time.perf_counter()
        self.bar = None
        if shown and sys.stderr.isatty():
            self.bar = tqdm(total=updates, initial=done, desc=self.label, leave=False)

    def step(self, loss: float, lr: float, images: int) -> None:
        """Counts one update and shows it."""
        self.done += 1
        self.images += images
        now = time.perf_counter()
        shown = f"loss {loss:.4f}  lr {lr:.2e}  {self.images_per_second:,.0f} images/s  data wait {self.data_wait:.0%}"
        if self.bar is not None:
            self.bar.set_postfix_str(shown, refresh=False)
            self.bar.update()
        elif now - self.last_line >= self.seconds and self.done < self.updates:
            eta = (now - self.start) / (self.done - self.first) * (self.updates - self.done)
            log.info("%s  update %d/%d  %s  ETA %.0f s", self.label, self.done, self.updates, shown, eta)
            self.last_line = now

    def timed(self, batches: Iterator[T], count: int) -> Iterator[T]:
        """Yields the next batches, and counts the time spent waiting for them."""
        for _ in range(count):
            start = time.perf_counter()
            batch = next(batches)
            self.waited += time.perf_counter() - start
            yield batch

    @property
    def elapsed(self) -> float:
        """Seconds since the epoch (or its resumption) began."""
        return max(time.perf_counter() - self.start, 1e-9)

    @property
    def images_per_second(self) -> float:
        """Images trained on per second."""
        return self.images / self.elapsed

    @property
    def data_wait(self) -> float:
        """Share of the time that was spent waiting for the loader."""
        return self.waited / self.elapsed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()
