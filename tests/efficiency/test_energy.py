"""Energy: never 0 where nothing was measured, from the right GPU, with its source named."""

import builtins
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from efficiency_doubles import Clock

from infvit.metrics import energy
from infvit.metrics.energy import CounterMeter, NoMeter, PowerMeter, energy_per_call, integrate, open_nvml, open_rapl


class Nvml:
    """Three GPUs, known by UUID only; what is not `supported` raises as NVML does."""

    class NVMLError(Exception):
        pass

    def __init__(self, *supported: str) -> None:
        self.supported = supported
        self.millijoules = {"GPU-a": 1_000_000, "GPU-b": 5_000, "GPU-c": 70}
        self.milliwatts = {"GPU-a": 400_000, "GPU-b": 150_000, "GPU-c": 0}

    def nvmlInit(self) -> None:
        if "init" not in self.supported:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.millijoules:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if "energy" not in self.supported:
            raise self.NVMLError("Not Supported")
        return self.millijoules[handle]

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if "power" not in self.supported:
            raise self.NVMLError("Not Supported")
        return self.milliwatts[handle]


def test_counter_of_the_gpu_with_this_uuid() -> None:
    nvml = Nvml("init", "energy", "power")

    def work() -> None:
        nvml.millijoules["GPU-a"] += 999_000  # somebody else's
        nvml.millijoules["GPU-b"] += 2_500

    reading = open_nvml(nvml, "GPU-b").measure(work)
    assert (reading.joules, reading.source, reading.reason) == (2.5, "counter", None)


def test_without_a_counter_the_power_is_integrated() -> None:
    meter = open_nvml(Nvml("init", "power"), "GPU-b")
    assert isinstance(meter, PowerMeter)
    assert meter.watts() == 150.0


@pytest.mark.parametrize(
    ("nvml", "uuid", "reason"),
    [
        (Nvml(), "GPU-b", "NVML does not give access to GPU-b: Driver Not Loaded"),
        (Nvml("init", "energy"), "GPU-x", "NVML does not give access to GPU-x: Not Found"),
        (Nvml("init"), "GPU-b", "GPU-b reports neither energy nor power: Not Supported"),
    ],
)
def test_neither_is_null_with_the_reason(nvml: Nvml, uuid: str, reason: str) -> None:
    done = []
    reading = open_nvml(nvml, uuid).measure(lambda: done.append(1))
    assert (reading.joules, reading.source, reading.reason, done) == (None, "unavailable", reason, [1])


def test_a_counter_that_stands_still_is_not_zero() -> None:
    reading = open_nvml(Nvml("init", "energy"), "GPU-b").measure(lambda: None)
    assert (reading.joules, reading.source) == (None, "unavailable")
    assert "did not move" in str(reading.reason)


def test_power_is_sampled_while_it_works(clock: Clock) -> None:
    """A ramp from 0 to 100 W over 4 s, sampled by a thread: 200 J by the trapezoid rule, exactly."""
    seen: list[float] = []

    def watts() -> float:
        seen.append(clock.now)
        return 25 * clock.now

    def work() -> None:
        for _ in range(4):
            clock.now += 1.0
            count = len(seen)
            while len(seen) < count + 2:  # until the thread has looked
                pass

    reading = PowerMeter(watts, interval=0.001, clock=clock).measure(work)
    assert reading.joules == pytest.approx(200.0)
    assert reading.source == "power_integral"
    assert len(seen) >= 6


def test_power_that_cannot_be_read(clock: Clock) -> None:
    def lost() -> float:
        raise OSError("GPU is lost")

    reading = PowerMeter(lost, clock=clock).measure(lambda: None)
    assert (reading.joules, reading.reason) == (None, "power cannot be read: GPU is lost")
    assert PowerMeter(lambda: 0.0, clock=clock).measure(lambda: None).joules is None


def test_the_sampling_ends_with_the_work(clock: Clock) -> None:
    def work() -> None:
        raise ValueError("as it happens")

    with pytest.raises(ValueError, match="as it happens"):
        PowerMeter(lambda: 1.0, interval=0.001, clock=clock).measure(work)


def test_integral_is_numpys() -> None:
    generator = np.random.default_rng(0)
    seconds = np.cumsum(generator.random(20))
    watts = 100 * generator.random(20)
    points = list(zip(seconds.tolist(), watts.tolist(), strict=True))
    assert integrate(points) == pytest.approx(np.trapezoid(watts, seconds))


def rapl(root: Path, **microjoules: int) -> Path:
    """Two packages with a core domain inside the first, which its package counts already."""
    for name, value in microjoules.items():
        folder = root / name.replace("_", ":").replace("rapl", "intel-rapl")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "energy_uj").write_text(f"{value}\n")
        (folder / "max_energy_range_uj").write_text("10000000\n")
    return root


def test_rapl_adds_packages_and_survives_the_wrap(tmp_path: Path) -> None:
    meter = open_rapl(rapl(tmp_path, rapl_0=9_000_000, rapl_1=1_000_000, rapl_0_0=0))
    reading = meter.measure(lambda: rapl(tmp_path, rapl_0=500_000, rapl_1=1_250_000, rapl_0_0=7_000_000))
    assert reading.joules == pytest.approx(1.5 + 0.25)
    assert reading.source == "rapl"


def test_rapl_that_is_absent_or_closed(tmp_path: Path) -> None:
    absent = open_rapl(tmp_path / "nothing")
    assert isinstance(absent, NoMeter)
    assert "no intel-rapl" in absent.reason
    (rapl(tmp_path, rapl_0=1) / "intel-rapl:0" / "energy_uj").unlink()
    closed = open_rapl(tmp_path)
    assert isinstance(closed, NoMeter)
    assert "RAPL cannot be read" in closed.reason


def test_energy_of_one_call(clock: Clock) -> None:
    """Called for 2 s, 0.3 s a call: seven times, 6 J each; the last begins before the time is over."""
    joules = [0.0]
    waits: list[float] = []

    def call() -> None:
        clock.now += 0.3
        joules[0] += 6

    meter = CounterMeter(lambda: [joules[0]], "counter")
    reading = energy_per_call(meter, call, lambda: waits.append(clock.now), 2.0, clock)
    assert reading.joules == pytest.approx(6.0)
    assert joules[0] == 42.0
    assert len(waits) == 8
    assert energy_per_call(NoMeter("no"), call, lambda: None, 0.0, clock).joules is None


def test_meter_of_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The UUID is torch's of the device in use, whatever CUDA_VISIBLE_DEVICES made its index."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="b"))
    monkeypatch.setitem(sys.modules, "pynvml", Nvml("init", "energy"))  # type: ignore[arg-type]
    meter = energy.open_meter(torch.device("cuda", 0))
    assert isinstance(meter, CounterMeter)
    assert meter.read() == [5.0]
    monkeypatch.delitem(sys.modules, "pynvml")
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pynvml":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "nvidia-ml-py is not installed" in str(energy.open_meter(torch.device("cuda", 0)).measure(int).reason)
    assert "no energy counter for mps" in str(energy.open_meter(torch.device("mps")).measure(int).reason)
