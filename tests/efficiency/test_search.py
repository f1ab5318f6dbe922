"""The highest resolution: every number of the search, on machines whose limit is known."""

import pytest

from infvit.evaluation.efficiency.search import highest


def search(limit: int, start: int = 224, bound: int = 4096, step: int = 64, patch: int = 16) -> tuple[dict, list[int]]:
    sizes: list[int] = []

    def fits(size: int) -> str | None:
        sizes.append(size)
        return None if size <= limit else "out of memory"

    return highest(fits, start, bound, step, patch), sizes


@pytest.mark.parametrize("limit", [224, 230, 448, 1000, 1023, 1024, 2047, 4000])
@pytest.mark.parametrize(("step", "patch"), [(64, 16), (16, 16), (100, 14), (1, 16)])
def test_found_to_the_step(limit: int, step: int, patch: int) -> None:
    start = 16 * patch
    result, sizes = search(max(limit, start), start, 4096, step, patch)
    found, failed = result["resolution"], min(s for s in sizes if s > max(limit, start))
    assert found <= max(limit, start)
    assert failed - found <= max(step, patch)
    assert all(size % patch == 0 for size in sizes)
    assert len(sizes) == len(set(sizes))
    assert result["reason"] == f"out of memory at {failed} px"
    assert result["tried"] == {str(s): "fits" if s <= found else "out of memory" for s in sorted(sizes)}


def test_the_bound_is_tried_and_never_passed() -> None:
    result, sizes = search(10**6, bound=1000)
    assert (result["resolution"], result["reason"]) == (992, "efficiency.highest=992")
    assert sizes == [224, 448, 896, 992]
    assert search(10**6, bound=224)[1] == [224]


def test_not_even_the_first() -> None:
    result, sizes = search(100)
    assert (result["resolution"], result["reason"], sizes) == (None, "out of memory at 224 px", [224])


def test_time_is_not_memory() -> None:
    result = highest(lambda size: None if size < 500 else "time limit", 224, 4096, 256, 16)
    assert (result["resolution"], result["reason"]) == (448, "time limit at 672 px")
