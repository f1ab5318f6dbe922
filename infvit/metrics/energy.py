"""Energy of a computation, measured where the machine lets us: NVML on NVIDIA GPUs, RAPL on Linux CPUs.

Never zero where nothing was measured: a reading is a positive number with its source, or None with the reason.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

POWERCAP = Path("/sys/class/powercap")
SAMPLE_SECONDS = 0.02


@dataclass(frozen=True)
class Reading:
    """Energy of a stretch of work.

    Attributes:
        joules: None where it was not measured.
        source: counter, power_integral, rapl or unavailable.
        reason: why it was not measured.
    """

    joules: float | None
    source: str
    reason: str | None = None


class Meter(Protocol):
    """Measures the energy that a device uses during some work."""

    def measure(self, work: Callable[[], object]) -> Reading:
        """Does the work, which must be synchronised, and returns the energy used meanwhile."""
        ...


@dataclass(frozen=True)
class NoMeter:
    """Says why there is no measurement."""

    reason: str

    def measure(self, work: Callable[[], object]) -> Reading:
        work()
        return Reading(None, "unavailable", self.reason)


@dataclass(frozen=True)
class CounterMeter:
    """Reads a counter of joules before and after.

    Attributes:
        read: returns each counter in joules; there may be several (one a CPU package).
        source: what it is.
        wraps: joules at which each starts again at 0; None: never.
    """

    read: Callable[[], list[float]]
    source: str
    wraps: list[float] | None = None

    def measure(self, work: Callable[[], object]) -> Reading:
        before = self.read()
        work()
        after = self.read()
        used = [b - a for a, b in zip(before, after, strict=True)]
        if self.wraps is not None:
            used = [u + w if u < 0 else u for u, w in zip(used, self.wraps, strict=True)]
        if sum(used) <= 0 or min(used) < 0:
            return Reading(None, "unavailable", "the energy counter did not move; measure for longer")
        return Reading(sum(used), self.source)


@dataclass(frozen=True)
class PowerMeter:
    """Samples the power in a thread and integrates it by the trapezoid rule.

    Attributes:
        watts: returns the power now.
        interval: seconds between two samples.
        clock: seconds from any start.
    """

    watts: Callable[[], float]
    interval: float = SAMPLE_SECONDS
    clock: Callable[[], float] = time.perf_counter

    def measure(self, work: Callable[[], object]) -> Reading:
        samples: list[tuple[float, float]] = []
        failures: list[Exception] = []
        done = threading.Event()

        def sample() -> None:
            try:
                samples.append((self.clock(), self.watts()))
            except Exception as error:  # in a thread nobody would see it
                failures.append(error)

        def keep_sampling() -> None:
            while not done.wait(self.interval):
                sample()

        sample()
        thread = threading.Thread(target=keep_sampling, daemon=True)
        thread.start()
        try:
            work()
        finally:
            done.set()
            thread.join()
        sample()
        if failures:
            return Reading(None, "unavailable", f"power cannot be read: {failures[0]}")
        joules = integrate(samples)
        return Reading(joules, "power_integral") if joules > 0 else Reading(None, "unavailable", "power reads 0 W")


def integrate(samples: list[tuple[float, float]]) -> float:
    """Returns the joules below (seconds, watts) by the trapezoid rule."""
    return sum((t1 - t0) * (p0 + p1) / 2 for (t0, p0), (t1, p1) in pairwise(samples))


def energy_per_call(
    meter: Meter,
    call: Callable[[], object],
    synchronize: Callable[[], None],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Reading:
    """Returns the energy of one call, from calling it for a time: counters move every 20 to 100 ms only."""
    calls = 0

    def work() -> None:
        nonlocal calls
        start = clock()
        while calls == 0 or clock() - start < seconds:
            call()
            synchronize()
            calls += 1

    synchronize()
    reading = meter.measure(work)
    return Reading(None if reading.joules is None else reading.joules / calls, reading.source, reading.reason)


def open_meter(device: torch.device) -> Meter:
    """Returns the best meter for a device."""
    if device.type == "cpu":
        return open_rapl()
    if device.type != "cuda":
        return NoMeter(f"there is no energy counter for {device.type}")
    try:
        import pynvml
    except ImportError:
        return NoMeter("the package nvidia-ml-py is not installed (pip install 'infvit[energy]')")
    # By UUID: NVML does not know CUDA_VISIBLE_DEVICES, so that an index would name another GPU.
    return open_nvml(pynvml, f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def open_nvml(nvml: Any, uuid: str) -> Meter:
    """Returns a meter of one NVIDIA GPU: its energy counter, or, before Volta and on many virtual GPUs, its power.

    Args:
        nvml: the module `pynvml`.
        uuid: `GPU-...`, as NVML writes it.
    """
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        return NoMeter(f"NVML does not give access to {uuid}: {error}")
    try:
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        return CounterMeter(lambda: [nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3], "counter")
    except nvml.NVMLError:
        pass
    try:
        nvml.nvmlDeviceGetPowerUsage(handle)
        return PowerMeter(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
    except nvml.NVMLError as error:
        return NoMeter(f"{uuid} reports neither energy nor power: {error}")


def open_rapl(root: Path = POWERCAP) -> Meter:
    """Returns a meter of all CPU packages (the whole machine's, whoever else computes on it)."""
    packages = sorted(path for path in root.glob("intel-rapl:*") if path.name.count(":") == 1)  # AMD's is called so too
    if not packages:
        return NoMeter(f"this CPU has no energy counter: no intel-rapl:* in {root}")
    try:
        wraps = [int((path / "max_energy_range_uj").read_text()) / 1e6 for path in packages]
        meter = CounterMeter(lambda: [int((path / "energy_uj").read_text()) / 1e6 for path in packages], "rapl", wraps)
        meter.read()
    except (OSError, ValueError) as error:
        return NoMeter(f"RAPL cannot be read ({error}); most systems let only root read it")
    return meter
