"""Latency: all candidates in turn, synchronised and repeated, so that ratios hold on a machine that drifts."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import quantiles

import torch

MIN_ROUNDS = 3


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one call.

    Attributes:
        median_ms: of the rounds that count.
        low_ms: their lower quartile.
        high_ms: their upper quartile.
        rounds: how many count.
        first_ms: the very first call, with compilation and the choice of kernels; in none of the others.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    rounds: int
    first_ms: float


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Returns what waits until the device has done all it was given; a CPU has done it when a call returns."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return torch.mps.synchronize if device.type == "mps" else lambda: None


def interleave(
    work: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int,
    seconds: float,
    synchronize: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Latency]:
    """Times several candidates against each other.

    Every round calls each candidate once; the order is rotated from round to round, so that none always follows the
    same other one, whose data it finds in the caches. A change of the machine's speed meets all of them alike.

    Args:
        work: the candidates by name.
        rounds: rounds that count.
        warmup: rounds before them that do not, after the first call of each.
        seconds: no new round begins after this time, but at least three are run.
        synchronize: waits for the device; called before and after each call.
        clock: seconds from any start.

    Returns:
        The latency of each candidate, by name.
    """

    def call(name: str) -> float:
        synchronize()
        start = clock()
        work[name]()
        synchronize()
        return 1e3 * (clock() - start)

    names = list(work)
    first = {name: call(name) for name in names}
    for _ in range(warmup):
        for name in names:
            call(name)
    times: dict[str, list[float]] = {name: [] for name in names}
    begun = clock()
    for number in range(rounds):
        if number >= MIN_ROUNDS and clock() - begun >= seconds:
            break
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(call(name))
    return {name: _latency(times[name], first[name]) for name in names}


def _latency(times: list[float], first: float) -> Latency:
    low, median, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return Latency(median, low, high, len(times), first)
