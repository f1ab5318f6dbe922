"""Latency: in which order calls are made, what counts, and the statistics against NumPy's."""

import numpy as np
import pytest
import torch
from efficiency_doubles import Clock

from infvit.metrics.timing import interleave, synchronizer


def run(clock: Clock, durations: dict[str, list[float]], **keys: float) -> tuple[dict, list[str]]:
    """Times calls that last as listed (the last one again and again), and returns the log of all that happened."""
    log: list[str] = []
    left = {name: list(times) for name, times in durations.items()}

    def call(name: str) -> None:
        log.append(name)
        clock.now += left[name].pop(0) if len(left[name]) > 1 else left[name][0]

    def wait() -> None:
        log.append("wait")

    options = {"rounds": 6, "warmup": 1, "seconds": 1e9, **keys}
    work = {name: lambda name=name: call(name) for name in durations}
    return interleave(work, synchronize=wait, clock=clock, **options), log


def test_order_is_interleaved_and_rotated(clock: Clock) -> None:
    _, log = run(clock, {"a": [1.0], "b": [1.0], "c": [1.0]}, rounds=4, warmup=2)
    calls = "".join(entry for entry in log if entry != "wait")
    assert calls == "abc" + "abc" * 2 + "abc" + "bca" + "cab" + "abc"


def test_the_device_is_waited_for_before_and_after_each_call(clock: Clock) -> None:
    _, log = run(clock, {"a": [1.0], "b": [1.0]})
    calls = [entry for entry in log if entry != "wait"]
    assert log == [entry for call in calls for entry in ("wait", call, "wait")]


def test_a_device_that_works_on_after_the_call(clock: Clock) -> None:
    """As CUDA does: the time passes in `synchronize`."""
    pending = [0.0]

    def launch() -> None:
        pending[0] += 0.25

    def wait() -> None:
        clock.now += pending.pop()
        pending.append(0.0)

    latency = interleave({"x": launch}, 3, 0, 1e9, wait, clock)["x"]
    assert (latency.median_ms, latency.first_ms) == (250.0, 250.0)


def test_first_call_and_warmup_do_not_count(clock: Clock) -> None:
    times = [0.1, 0.4, 0.2, 0.3, 0.8]
    results, _ = run(clock, {"a": [9.0, 5.0, 5.0, *times]}, rounds=5, warmup=2)
    latency = results["a"]
    assert latency.first_ms == pytest.approx(9000)
    expected = 1e3 * np.percentile(times, [25, 50, 75])
    assert (latency.low_ms, latency.median_ms, latency.high_ms) == pytest.approx(expected)
    assert latency.rounds == 5


def test_time_limit_keeps_three_rounds(clock: Clock) -> None:
    assert run(clock, {"a": [10.0], "b": [1.0]}, rounds=50, seconds=5)[0]["b"].rounds == 3
    assert run(clock, {"a": [10.0], "b": [1.0]}, rounds=50, seconds=40)[0]["b"].rounds == 4
    assert run(clock, {"a": [10.0]}, rounds=1, seconds=0)[0]["a"].rounds == 1


def test_a_cpu_needs_no_waiting() -> None:
    assert synchronizer(torch.device("cpu"))() is None
