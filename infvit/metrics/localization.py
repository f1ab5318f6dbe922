"""How well a map of relevance finds the objects: ROC-AUC and average precision over patches, energy in the boxes.

For many maps at once: scikit-learn's functions, against which these are tested, take one map at a time.
"""

from dataclasses import dataclass

import numpy as np


def patch_labels(boxes: np.ndarray, size: tuple[int, int], grid: tuple[int, int]) -> np.ndarray:
    """Returns which patches show an object: those whose centre lies in the union of the boxes.

    Args:
        boxes: (x0, y0, x1, y1) in pixels of the image that the model sees, half-open, float (n, 4).
        size: Height and width of that image.
        grid: Rows and columns of the patches.

    Returns:
        Labels, bool (rows * columns,), row by row.
    """
    y = (np.arange(grid[0]) + 0.5) * size[0] / grid[0]
    x = (np.arange(grid[1]) + 0.5) * size[1] / grid[1]
    x0, y0, x1, y1 = np.asarray(boxes, dtype=np.float64).reshape(-1, 4).T[:, :, None]
    rows, columns = (y0 <= y) & (y < y1), (x0 <= x) & (x < x1)
    return (rows[:, :, None] & columns[:, None, :]).any(0).reshape(-1)


@dataclass(frozen=True)
class Ranking:
    """Maps with their patches in descending order of relevance. Equal values share one threshold.

    Attributes:
        labels: In that order, bool (M, N).
        hits: Positives at or above the threshold of each patch, int (M, N).
        above: Positives above that threshold, int (M, N).
        taken: Patches at or above it, int (M, N).
    """

    labels: np.ndarray
    hits: np.ndarray
    above: np.ndarray
    taken: np.ndarray

    @classmethod
    def of(cls, labels: np.ndarray, maps: np.ndarray) -> "Ranking":
        """Orders maps, float (M, N), with labels, bool (M, N).

        Raises:
            ValueError: A value is not finite, or an image has one class only.
        """
        labels, maps = np.asarray(labels, dtype=bool), np.asarray(maps)
        if not np.isfinite(maps).all():
            raise ValueError("a map is not finite.")
        if not (labels.any(1) & ~labels.all(1)).all():
            raise ValueError("an image has one class only; ROC and PR are not defined for it.")
        order = np.argsort(-maps, axis=1, kind="stable")
        values, ordered = np.take_along_axis(maps, order, 1), np.take_along_axis(labels, order, 1)
        count = maps.shape[1]
        place = np.arange(count)
        new = np.ones(maps.shape, dtype=bool)
        new[:, 1:] = values[:, 1:] != values[:, :-1]
        first = np.maximum.accumulate(np.where(new, place, 0), 1)
        ends = np.roll(new, -1, 1)  # the last column gets the first, which is always new
        last = np.minimum.accumulate(np.where(ends, place, count)[:, ::-1], 1)[:, ::-1]
        sums = np.concatenate([np.zeros((len(maps), 1), dtype=np.int64), ordered.cumsum(1)], 1)
        return cls(ordered, np.take_along_axis(sums, last + 1, 1), np.take_along_axis(sums, first, 1), last + 1)

    @property
    def positives(self) -> np.ndarray:
        """Positives of each map, int (M, 1)."""
        return self.labels.sum(1, keepdims=True)

    def roc_auc(self) -> np.ndarray:
        """Returns the area under each ROC curve, (M,): the chance that a positive patch outranks a negative one."""
        negatives = self.labels.shape[1] - self.positives
        outranked = np.where(self.labels, 0, (self.hits + self.above) / 2).sum(1, keepdims=True)
        return (outranked / (self.positives * negatives))[:, 0]

    def average_precision(self) -> np.ndarray:
        """Returns sum over thresholds of (recall gained) x precision, (M,). No interpolation, as in scikit-learn."""
        gained = np.where(self.labels, self.hits / self.taken, 0).sum(1, keepdims=True)
        return (gained / self.positives)[:, 0]

    def mean_roc(self, false_positive_rates: np.ndarray) -> np.ndarray:
        """Returns the mean true-positive rate at given false-positive rates: linear between thresholds, the upper end
        of a vertical step."""
        origin = ((0, 0), (1, 0))
        false = np.pad((self.taken - self.hits) / (self.labels.shape[1] - self.positives), origin)
        true = np.pad(self.hits / self.positives, origin)
        return np.mean([np.interp(false_positive_rates, f, t) for f, t in zip(false, true, strict=True)], 0)

    def mean_precision(self, recalls: np.ndarray) -> np.ndarray:
        """Returns the mean precision at given recalls: that of the first threshold which reaches them."""
        reached = self.hits / self.positives
        precision = self.hits / self.taken
        first = np.array([np.searchsorted(row, recalls - 1e-12) for row in reached])
        return np.take_along_axis(precision, first, 1).mean(0)


def energy_in_boxes(labels: np.ndarray, maps: np.ndarray) -> np.ndarray:
    """Returns the share of each map's relevance on positive patches, (M,): the energy-based pointing game.

    Wang et al. 2020 (Score-CAM, arXiv 1910.01279), over patches. NaN for a map with a negative value or without any
    relevance, where a share means nothing.
    """
    total = maps.sum(1)
    defined = (maps >= 0).all(1) & (total > 0)
    return np.where(defined, np.where(labels, maps, 0).sum(1) / np.where(defined, total, 1), np.nan)
