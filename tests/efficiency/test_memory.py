"""Peak memory, its limit, and what counts as running out of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infvit.metrics.memory import PeakMemory, is_out_of_memory, limit_memory

CPU = torch.device("cpu")


def touched(mib: int) -> torch.Tensor:
    return torch.ones(mib * 2**18)


def test_peak_above_the_start(ranks: Callable[..., list[Any]]) -> None:
    """Above what is held, and not what was needed before."""

    def work(rank: int) -> Any:
        held = touched(64)
        del (earlier := [touched(200)])[:]
        peak = PeakMemory(CPU)
        del (during := [touched(96)])[:]
        return peak.read(), len(held), len(earlier), len(during)

    peak = ranks(1, work)[0][0]
    assert peak.mib == pytest.approx(96, abs=8)
    assert peak.start_mib > 64
    assert peak.method == "resident memory (VmHWM)"


def test_nothing_needed_is_not_zero(ranks: Callable[..., list[Any]]) -> None:
    peak = ranks(1, lambda rank: PeakMemory(CPU).read())[0]
    assert peak.mib is None or 0 < peak.mib < 2


def test_a_limit_makes_memory_run_out(ranks: Callable[..., list[Any]]) -> None:
    def work(rank: int) -> Any:
        assert limit_memory(CPU, 200 * 2**20)
        fits = touched(100).sum().item()
        try:
            touched(400)
        except Exception as error:
            return fits, is_out_of_memory(error), str(error)
        return fits, False, "allocated"

    fits, out, message = ranks(1, work)[0]
    assert fits == 100 * 2**18
    assert out, message


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("MPS backend out of memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_without_a_mark_that_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As outside Linux: the highest ever, and nothing said where it did not rise."""
    values = iter([300.0 * 2**20, 300.0 * 2**20, 420.0 * 2**20])
    monkeypatch.setattr("infvit.metrics.memory.CLEAR", Path("/nowhere/clear_refs"))
    monkeypatch.setattr("infvit.metrics.memory._highest_ever", lambda: next(values))
    peak = PeakMemory(CPU)
    assert peak.read().mib is None
    again = peak.read()
    assert (again.mib, again.start_mib, again.method) == (120.0, 300.0, "resident memory (ru_maxrss)")
