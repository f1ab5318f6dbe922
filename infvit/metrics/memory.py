"""Peak memory of a stretch of work, and what running out of it looks like."""

import contextlib
import ctypes
import gc
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from infvit.errors import ConfigError

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|bad_alloc|bad allocation", re.I
)


@dataclass(frozen=True)
class Peak:
    """Memory that was needed on top of what was held at the start.

    Attributes:
        mib: mebibytes at the highest point above those at the start; None where it cannot be told.
        start_mib: held at the start.
        method: how it was measured.
    """

    mib: float | None
    start_mib: float
    method: str


class PeakMemory:
    """Measures the peak from its creation to `read`. Use a process of its own: allocators keep what was freed.

    CUDA: bytes that tensors occupied (`max_memory_allocated`). CPU: resident memory of the process, from Linux's
    high-water mark, which is reset at the start.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.resettable = False
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.start = float(torch.cuda.memory_allocated(device))
            return
        try:
            _give_back()
            CLEAR.write_text("5")  # the high-water mark starts anew
            self.start = _status("VmRSS")
            self.resettable = True
        except OSError:
            self.start = _highest_ever()

    def read(self) -> Peak:
        """Returns the peak so far."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            peak, method = float(torch.cuda.max_memory_allocated(self.device)), "max_memory_allocated"
        elif self.resettable:
            peak, method = _status("VmHWM"), "resident memory (VmHWM)"
        else:
            peak, method = _highest_ever(), "resident memory (ru_maxrss)"
        # A mark that did not rise says nothing about what was needed: memory that was free already served.
        return Peak((peak - self.start) / 2**20 if peak > self.start else None, self.start / 2**20, method)


def _give_back() -> None:
    """Lets glibc return what was freed, which would otherwise be in the start value and serve unseen afterwards."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _status(field: str) -> float:
    """Returns bytes from Linux's report on this process."""
    found = re.search(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), re.M)
    assert found, f"{STATUS} has no {field}"
    return int(found[1]) * 1024.0


def _highest_ever() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def available_memory() -> float | None:
    """Returns the bytes of main memory that can be used without swapping; None where the system does not say."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        return None
    return int(found[1]) * 1024.0 if found else None


def limit_memory(device: torch.device, limit: float) -> bool:
    """Lets this process allocate `limit` bytes more; what exceeds them fails at once, where it would swap or be killed.

    Returns:
        Whether the system holds to it (Linux and CUDA do).

    Raises:
        ConfigError: a GPU has less than that.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        if limit > total:
            raise ConfigError(
                f"efficiency.memory_limit_gib={limit / 2**30:g} is more than the GPU's {total / 2**30:.1f} GiB."
            )
        torch.cuda.set_per_process_memory_fraction(limit / total, device)
        return True
    if not STATUS.exists():
        return False
    bound = int(_status("VmData") + limit)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))
    return True


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or in main memory; nothing else counts as that."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
