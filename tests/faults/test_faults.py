"""A run that was killed anywhere, and started again by the same command, is the straight run, bitwise.

Which call of a place it is comes from a seed: `FAULTS_SEED=7 make faults` tries others. To repeat one that failed:
`FAULTS_WHOLE=1 .venv/bin/python -m pytest "tests/faults/test_faults.py::test_at_a_place[...]"`.
"""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from fault_lab import LAST, SEED, UPDATES, Equal, Lab, Start, Tried, draw

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="finds the processes of a run in Linux's /proc"),
]
whole = pytest.mark.whole

PLACES = {
    "start": ("start", "half-of-config.yaml", "before-config.yaml", "after-config.yaml", "after-environment.json"),
    "training": ("update", "forward-done", "backward", "optimizer-step", "optimizer-step-done", "ema-step",
                 "ema-step-done", "update-done"),
    "evaluation": ("evaluation-of-raw", "evaluation-of-ema"),
    "saving": ("half-a-checkpoint", "before-fsync", "after-fsync", "before-previous.pt", "after-previous.pt",
               "before-last.pt", "after-last.pt", "before-best.pt", "after-best.pt"),
    "metrics and curves": ("half-of-metrics.jsonl", "before-metrics.jsonl", "after-metrics.jsonl",
                           "half-of-summary.csv", "before-summary.csv", "after-summary.csv", "half-of-curves.png"),
}  # fmt: skip
KINDS = {place: kind for kind, places in PLACES.items() for place in places}
CODES = {"SIGKILL": -signal.SIGKILL, "SIGTERM": 143, "SIGINT": 130, "SIGUSR2": 143}
OFTEN = ("engine.checkpoint_minutes=0",)
CHAINS = {
    "while-it-restores": ("update-done:9:SIGKILL", "restoring:1:SIGKILL", "restoring:1:SIGTERM"),
    "again-while-it-saves": (
        "update:1:SIGTERM half-a-checkpoint:1:SIGTERM",
        "update:1:SIGTERM before-last.pt:1:SIGKILL",
    ),
    "ctrl-c-twice": ("update:3:SIGTERM", "update:1:SIGINT half-a-checkpoint:1:SIGINT"),
    "every-file": ("after-last.pt:1:SIGKILL", "half-of-metrics.jsonl:1:SIGKILL", "after-summary.csv:1:SIGKILL"),
}
# What CI tries; `make faults` tries all of them.
SELECTED = {
    "half-of-config.yaml-SIGKILL-often", "backward-SIGKILL-seldom", "ema-step-SIGKILL-often",
    "update-done-SIGKILL-often", "update-SIGTERM-seldom", "backward-SIGINT-often", "evaluation-of-raw-SIGKILL-often",
    "evaluation-of-ema-SIGTERM-often", "half-a-checkpoint-SIGKILL-often", "before-last.pt-SIGKILL-often",
    "before-last.pt-SIGINT-seldom", "before-best.pt-SIGKILL-often", "half-of-metrics.jsonl-SIGKILL-seldom",
    "half-of-curves.png-SIGKILL-seldom", "SIGKILL-1-process", "SIGTERM-1-group", "again-while-it-saves-seldom",
    "every-file-seldom",
}  # fmt: skip


def case(*values: Any, name: str) -> Any:
    """Returns a parameter set that is tried only by `make faults` unless it is selected."""
    return pytest.param(*values, id=name, marks=[] if name in SELECTED else whole)


def points() -> list[Any]:
    """Kills with few checkpoints and with one after each update, or with these in turn; and requests to stop."""
    found = [(place, "SIGKILL", often) for i, (place, kind) in enumerate(KINDS.items()) for often in (False, True)
             if kind in ("training", "evaluation", "saving") or often == (i % 2 == 1)]  # fmt: skip
    asked = [*PLACES["training"], *PLACES["evaluation"], "half-a-checkpoint", "before-last.pt", "half-of-metrics.jsonl"]
    found += [(place, signum, often) for i, place in enumerate(asked)
              for signum, often in (("SIGTERM", i % 2 == 1), ("SIGINT", i % 2 == 0))]  # fmt: skip
    found.append(("update", "SIGUSR2", True))
    return [case(*point, name=f"{point[0]}-{point[1]}-{'often' if point[2] else 'seldom'}") for point in found]


def check_continues(start: Start, done: int, overrides: tuple[str, ...], asked: bool = False) -> None:
    """Checks that a start went on from where it should, and did only what was left.

    Args:
        start: it has ended by itself.
        done: updates that had been finished when the run was interrupted.
        overrides: of the command.
        asked: the run had been asked to stop, so that it had saved.
    """
    at_most = 0 if asked else 1 if overrides == OFTEN else UPDATES
    assert 0 <= done - start.found <= at_most, f"went on from update {start.found}, and {done} were done"
    assert asked or overrides == OFTEN or start.found % UPDATES == 0
    assert start.counts.get("update-done", 0) == LAST - start.found
    assert "damaged" not in start.text()


@pytest.mark.parametrize(("place", "signum", "often"), points())
def test_at_a_place(
    lab: Lab, tmp_path: Path, tried: Tried, equal: Equal, place: str, signum: str, often: bool
) -> None:  # fmt: skip
    overrides = OFTEN if often else ()
    number = draw(f"{SEED} {place} {signum} {often}", lab.straight(*overrides).counts[place])
    tried(KINDS[place], f"{place}:{number}:{signum}")
    start = lab.start(tmp_path, *overrides, FAULTS=f"{place}:{number}:{signum}")
    (code,) = start.wait()
    again = lab.start(tmp_path, *overrides)
    assert again.wait() == [0], again.text()
    # Asked in the last evaluation or later, a run is over before it comes to stop.
    assert code == CODES[signum] or (code == 0 and signum != "SIGKILL" and again.found == LAST), start.text()
    check_continues(again, start.counts.get("update-done", 0), overrides, asked=signum != "SIGKILL")
    equal(tmp_path / "out", lab.straight())


def test_the_number_of_checkpoints_has_no_influence(lab: Lab, equal: Equal, tmp_path: Path) -> None:
    """Nor has the zygote: a straight run by the plain command, with a checkpoint after each update."""
    start = lab.start(tmp_path, *OFTEN, plain=True)
    assert start.wait() == [0], start.text()
    assert start.counts["after-last.pt"] > LAST
    equal(tmp_path / "out", lab.straight())


@pytest.mark.parametrize(
    ("place", "most"), [("training-worker", 60), pytest.param("evaluation-worker", 24, marks=whole)]
)
def test_in_a_loader_worker(lab: Lab, tmp_path: Path, tried: Tried, equal: Equal, place: str, most: int) -> None:
    """The worker is killed, not the run, which ends with an error."""
    number = draw(f"{SEED} {place}", most)
    tried("loader workers", f"{place}:{number}:SIGKILL")
    start = lab.start(tmp_path, FAULTS=f"{place}:{number}:SIGKILL")
    assert start.wait() == [1], start.text()
    assert "killed by signal" in start.text()
    again = lab.start(tmp_path)
    assert again.wait() == [0], again.text()
    check_continues(again, start.counts.get("update-done", 0), ())
    equal(tmp_path / "out", lab.straight())


@pytest.mark.parametrize(
    ("signum", "number", "group"),
    [
        case(signum, number, group, name=f"{signum}-{number}-{'group' if group else 'process'}")
        for signum in ("SIGKILL", "SIGTERM", "SIGINT")
        for number in range(2)
        for group in (False, True)
    ],
)
def test_by_the_clock(
    lab: Lab, tmp_path: Path, tried: Tried, equal: Equal, signum: str, number: int, group: bool
) -> None:  # fmt: skip
    """From outside, at any time after the first lines; number 0 by the plain command."""
    plain = number == 0
    delay = random.Random(f"{SEED} {signum} {number} {group}").uniform(0, lab.straight().seconds)
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        start = lab.start(folder, *OFTEN, plain=plain)
        start.wait_for("folder  out")
        time.sleep(delay)
        (os.killpg if group else os.kill)(start.processes[0].pid, signal.Signals[signum])
        (code,) = start.wait()
        if "Held-out top-1" not in start.text():  # else it was over before the signal came
            break
        delay /= 2
    tried("at a random time", f"{delay:.3f} s after the first lines: {signum}, {'group' if group else 'process'}")
    again = lab.start(folder, *OFTEN, plain=plain)
    assert again.wait() == [0], again.text()
    # Not yet in the loop: a signal ends the process as it ends any other.
    assert code in (CODES[signum], -signal.Signals[signum]), start.text()
    assert signum == "SIGKILL" or again.found == 0 or f"stopped after update {again.found} of {LAST}" in start.text()
    assert again.counts.get("update-done", 0) == LAST - again.found
    equal(folder / "out", lab.straight())


def random_chain(seed: str) -> tuple[str, ...]:
    """Three kills at early calls of any places, so that most of the starts come to them."""
    numbers, places = random.Random(seed), [place for place, kind in KINDS.items() if kind != "start"]
    return tuple(f"{numbers.choice(places)}:{numbers.randint(1, 3)}:SIGKILL" for _ in range(3))


@pytest.mark.parametrize(
    ("chain", "often"),
    [
        case(chain, often, name=f"{chain}-{'often' if often else 'seldom'}")
        for chain in (*CHAINS, *(f"random-{number}" for number in range(3)))
        for often in (False, True)
    ],
)
def test_several_times(lab: Lab, tmp_path: Path, tried: Tried, equal: Equal, chain: str, often: bool) -> None:
    """Kill, start again, kill again, ..."""
    overrides, done = OFTEN if often else (), 0
    for orders in CHAINS.get(chain) or random_chain(f"{SEED} {chain} {often}"):
        start = lab.start(tmp_path, *overrides, FAULTS=orders)
        (code,) = start.wait()
        done = start.found + start.counts.get("update-done", 0)
        *_, (place, number, signum) = (order.split(":") for order in orders.split())
        if start.counts.get(place, 0) < int(number):  # only a chain by chance may be over before
            assert (code, chain in CHAINS) == (0, False), start.text()
            break
        assert code == CODES[signum], start.text()
        tried("several times in one run", orders)
    again = lab.start(tmp_path, *overrides)
    assert again.wait() == [0], again.text()
    assert 0 <= done - again.found <= (1 if often else UPDATES)
    assert again.counts.get("update-done", 0) == LAST - again.found
    assert "damaged" not in again.text()
    equal(tmp_path / "out", lab.straight())


@pytest.mark.parametrize("update", [pytest.param(5, marks=whole), 11, pytest.param(17, marks=whole)])
def test_a_kill_loses_at_most_the_minutes_between_checkpoints(
    lab: Lab, tmp_path: Path, tried: Tried, equal: Equal, update: int
) -> None:  # fmt: skip
    """0.6 s here, in an epoch that takes longer."""
    seconds = 0.6
    overrides = (f"engine.checkpoint_minutes={seconds / 60}",)
    tried("between two checkpoints", f"update-done:{update}:SIGKILL")
    start = lab.start(tmp_path, *overrides, FAULTS=f"update-done:{update}:SIGKILL", FAULT_PAUSE="0.15")
    assert start.wait() == [CODES["SIGKILL"]], start.text()
    again = lab.start(tmp_path, *overrides)
    assert again.wait() == [0], again.text()
    assert update - UPDATES < again.found < update
    assert again.found % UPDATES
    told = start.told()
    times = told["update_times"]
    longest = max(b - a for a, b in zip(times[update - 5 :], times[update - 4 :], strict=False))
    # Of the update under way, and of the time that saving takes, nothing is promised.
    assert told["end"] - times[again.found - 1] < seconds + 2 * longest
    assert again.counts["update-done"] == LAST - again.found
    equal(tmp_path / "out", lab.straight())
