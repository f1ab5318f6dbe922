"""How a quantity grows with another."""

from collections.abc import Sequence

import numpy as np

FEWEST_POINTS = 3


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """Returns b of y = a x^b by least squares on the logarithms; None of fewer than three different x.

    Args:
        points: pairs (x, y); those that are not positive are left out.
    """
    points = [(x, y) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in points}) < FEWEST_POINTS:
        return None
    xs, ys = np.log(np.array(points, dtype=float)).T
    return float(np.polyfit(xs, ys, 1)[0])
