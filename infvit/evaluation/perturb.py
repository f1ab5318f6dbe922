"""Scores of images with more and more patches removed, in batches that several images and steps share."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infvit.metrics.perturbation import SHARES, random_ranks, removal_ranks, removed_counts, without_patches

CURVES = ("morf", "lerf", "random")
"""Orders of removal: most relevant first, least relevant first, and a random one beside them."""


@dataclass(frozen=True)
class _Job:
    """One forward pass of one image: its first `count` patches by rank are removed."""

    image: Tensor
    filling: Tensor
    ranks: Tensor
    count: int
    target: int
    into: list[tuple[np.ndarray, int]]


class Perturber:
    """Takes images with their maps, and scores them with patches removed.

    Every batch is full but the last, whatever the images are that come in at a time.

    Args:
        model: from images (B, C, H, W) to logits.
        batch_size: images per forward pass.
        grid: rows and columns of the patches.
        filling: from images to what removed patches are filled with.
        seed: of the random order.
    """

    def __init__(
        self,
        model: Callable[[Tensor], Tensor],
        batch_size: int,
        grid: tuple[int, int],
        filling: Callable[[Tensor], Tensor],
        seed: int,
    ) -> None:
        self.model, self.batch_size, self.grid, self.filling, self.seed = model, batch_size, grid, filling, seed
        self.patches = grid[0] * grid[1]
        self.counts = removed_counts(self.patches)
        self.scores: dict[int, np.ndarray] = {}
        self._jobs: list[_Job] = []

    def add(self, images: Tensor, logits: Tensor, maps: Tensor, indices: list[int]) -> None:
        """Takes a batch.

        Args:
            images: (B, C, H, W).
            logits: of the intact images, (B, classes): the class is their largest.
            maps: relevance of the patches on the intact images, (B, N).
            indices: of the images, (B,); `scores` is filled under them, float64 (curves, points).
        """
        targets = logits.argmax(1).tolist()
        intact = probabilities(logits)
        fillings = self.filling(images)
        fillings = fillings.expand(len(images), *fillings.shape[1:])
        orders = [removal_ranks(maps, True), removal_ranks(maps, False)]
        for row, (index, target) in enumerate(zip(indices, targets, strict=True)):
            scores = self.scores[index] = np.full((len(CURVES), len(SHARES)), np.nan)
            scores[:, 0] = intact[row, target]
            ranks = [order[row] for order in orders]
            ranks.append(random_ranks(self.patches, self.seed, index).to(images.device))
            for count in dict.fromkeys(self.counts):  # with few patches two shares may remove as many
                points = [point for point, other in enumerate(self.counts) if other == count and point]
                if count == 0:
                    scores[:, points] = scores[:, :1]
                    continue
                places = [[(curve, point) for point in points] for curve in scores]
                if count == self.patches:  # alike in every order
                    places = [[place for curve in places for place in curve]]
                for order, into in zip(ranks, places, strict=False):
                    self._jobs.append(_Job(images[row], fillings[row], order, count, target, into))
        while len(self._jobs) >= self.batch_size:
            self._run()

    def finish(self) -> None:
        """Scores what is left."""
        while self._jobs:
            self._run()

    def _run(self) -> None:
        jobs, self._jobs = self._jobs[: self.batch_size], self._jobs[self.batch_size :]
        images, fillings, ranks = (
            torch.stack([getattr(job, name) for job in jobs]) for name in ("image", "filling", "ranks")
        )
        counts = torch.tensor([job.count for job in jobs], device=images.device)
        scores = probabilities(self.model(without_patches(images, fillings, ranks < counts[:, None], self.grid)))
        for row, job in enumerate(jobs):
            for curve, point in job.into:
                curve[point] = scores[row, job.target]


def probabilities(logits: Tensor) -> np.ndarray:
    """Returns softmax probabilities, float64 (B, classes), on the CPU."""
    return logits.detach().cpu().double().softmax(1).numpy()
