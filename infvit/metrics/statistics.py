"""How far a score can be trusted, and whether two scores on the same images differ."""

from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest


def wilson_interval(hits: int, images: int, confidence: float = 0.95) -> tuple[float, float]:
    """Returns Wilson's score interval of an accuracy, in %. It stays within 0 and 100 and is right near both ends."""
    interval = binomtest(hits, images).proportion_ci(confidence, method="wilson")
    return 100 * float(interval.low), 100 * float(interval.high)


@dataclass(frozen=True)
class Difference:
    """Two models on the same images.

    Attributes:
        images: How many.
        first, second: Accuracies in %.
        difference: Second minus first, in percentage points.
        low, high: 95 % interval of the difference, paired bootstrap over the images (percentiles).
        only_first, only_second: Images that only one of them has right.
        p_value: McNemar's exact test, two-sided: the chance of so uneven a split of those images if neither is better.
    """

    images: int
    first: float
    second: float
    difference: float
    low: float
    high: float
    only_first: int
    only_second: int
    p_value: float


def compare_hits(first: np.ndarray, second: np.ndarray, samples: int = 10_000, seed: int = 0) -> Difference:
    """Compares two models image by image.

    Args:
        first: Whether the first model has each image right, bool (n,).
        second: The same for the second, in the same order.
        samples: Bootstrap samples.
        seed: Of the bootstrap.
    """
    n, gained, lost = len(first), int((second & ~first).sum()), int((first & ~second).sum())
    # Of n images drawn with replacement only the numbers gained and lost matter, and these are multinomial.
    draws = np.random.default_rng(seed).multinomial(n, [gained / n, lost / n, (n - gained - lost) / n], samples)
    low, high = np.percentile(100 * (draws[:, 0] - draws[:, 1]) / n, [2.5, 97.5])
    return Difference(
        images=n,
        first=100 * float(first.mean()),
        second=100 * float(second.mean()),
        difference=100 * (gained - lost) / n,
        low=float(low),
        high=float(high),
        only_first=lost,
        only_second=gained,
        p_value=float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0,
    )
