"""The highest resolution without memory failure."""

from collections.abc import Callable
from typing import Any


def highest(fits: Callable[[int], str | None], start: int, bound: int, step: int, patch: int) -> dict[str, Any]:
    """Searches by doubling, then by halving the interval.

    Args:
        fits: tries a size, in a process of its own; returns None, or why it failed.
        start: first size in pixels, a multiple of the patch.
        bound: no size beyond this is tried.
        step: pixels to which the result is found; every size is a multiple of the patch.
        patch: side of a patch.

    Returns:
        `resolution` (None if even the first fails), `reason` why no higher one, `tried` sizes with what became of them.
    """
    bound -= bound % patch
    step = max(patch, step - step % patch)
    tried: dict[int, str] = {}

    def works(size: int) -> bool:
        reason = fits(size)
        tried[size] = reason or "fits"
        return reason is None

    low, size = 0, min(start, bound)
    while works(size):
        low = size
        if size == bound:
            break
        size = min(2 * size, bound)
    high = 0 if low == bound else size
    while low and high - low > step:
        size = (low + high) // 2 // patch * patch
        if works(size):
            low = size
        else:
            high = size
    reason = f"{tried[high]} at {high} px" if high else f"efficiency.highest={bound}"
    return {"resolution": low or None, "reason": reason, "tried": {str(size): tried[size] for size in sorted(tried)}}
