"""The same for a run on two processes: whichever of them is killed, and where, the rerun is the straight run."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from fault_lab import LAST, SECONDS, SEED, UPDATES, Equal, Lab, Start, Tried, draw, processes_in, wait_until_empty

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="finds the processes of a run in Linux's /proc"),
]

COMMON = ("data.num_workers=1", "engine.checkpoint_minutes=0")
WAYS = {"ddp": COMMON, "fsdp": (*COMMON, "engine.parallel=fsdp", "recipe.ema_decay=null")}
whole = pytest.mark.whole
POINTS = [
    ("ddp", "update", "SIGKILL", 0, whole),
    ("ddp", "backward", "SIGKILL", 1, whole),
    ("ddp", "evaluation-of-ema", "SIGKILL", 1, whole),
    ("ddp", "half-a-checkpoint", "SIGKILL", 0, whole),
    ("ddp", "after-best.pt", "SIGKILL", 0, whole),
    ("ddp", "update-done", "SIGTERM", 1, []),
    ("ddp", "evaluation-of-raw", "SIGINT", 1, whole),
    ("fsdp", "backward", "SIGKILL", 0, whole),
    ("fsdp", "optimizer-step-done", "SIGKILL", 1, whole),
    ("fsdp", "half-a-checkpoint", "SIGKILL", 0, whole),
    ("fsdp", "update", "SIGTERM", 1, whole),
]


@pytest.mark.parametrize(
    ("way", "place", "signum", "rank"),
    [pytest.param(*point, marks=marks, id="-".join(map(str, point))) for *point, marks in POINTS],
)
def test_at_a_place(
    lab: Lab, tmp_path: Path, tried: Tried, equal: Equal, way: str, place: str, signum: str, rank: int
) -> None:  # fmt: skip
    """A signal to one of them. The other ends by itself: with an error, or as it was asked to."""
    straight = lab.straight(*WAYS[way], ranks=2)
    number = draw(f"{SEED} {way} {place} {signum}", straight.counts[place])
    tried(f"two processes, {way}", f"{place}:{number}:{signum} on process {rank}")
    start = lab.start(tmp_path, *WAYS[way], ranks=2, FAULTS=f"{place}:{number}:{signum}", FAULT_RANK=str(rank))
    codes = start.wait()
    if signum == "SIGKILL":
        assert codes[rank] == -signal.SIGKILL
        assert codes[1 - rank] == 1, start.text()
    else:
        assert codes == [{"SIGTERM": 143, "SIGINT": 130}[signum]] * 2, start.text()
    again = lab.start(tmp_path, *WAYS[way], ranks=2)
    assert again.wait() == [0, 0], again.text()
    assert abs(start.told(rank)["counts"].get("update-done", 0) - again.found) <= 1  # the other may be ahead of it
    assert again.counts.get("update-done", 0) == LAST - again.found
    equal(tmp_path / "out", straight)


def ranks_of(start: Start) -> dict[int, int]:
    """Process ids of the ranks that torchrun has started."""
    found: dict[int, int] = {}
    for pid in processes_in(start.log.parent):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        if parent == start.processes[0].pid:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found |= {int(entry[5:]): pid for entry in environment if entry.startswith(b"RANK=")}
    return found


@pytest.mark.parametrize(
    ("way", "who", "signum"),
    [
        ("ddp", "rank 1", "SIGKILL"),
        *(
            pytest.param(*point, marks=whole)
            for point in (
                ("ddp", "rank 0", "SIGKILL"),
                ("ddp", "torchrun", "SIGKILL"),
                ("ddp", "torchrun", "SIGTERM"),
                ("ddp", "torchrun", "SIGINT"),
                ("fsdp", "rank 0", "SIGKILL"),
            )
        ),
    ],
)
def test_under_torchrun(lab: Lab, tmp_path: Path, tried: Tried, equal: Equal, way: str, who: str, signum: str) -> None:
    """The command of a user, and a signal from outside at a random update. What is left ends by itself."""
    straight = lab.straight(*WAYS[way], ranks=2)
    numbers = random.Random(f"{SEED} {way} {who} {signum}")
    epoch, update = numbers.randint(1, 2), numbers.randint(1, UPDATES - 1)
    tried("two processes, torchrun", f"epoch {epoch}, update {update}: {signum} to {who}")
    start = lab.start(tmp_path, *WAYS[way], ranks=2, plain=True, FAULT_PAUSE="0.05")
    start.wait_for(f"epoch {epoch}/3  update {update}/{UPDATES}")
    victim: Any = start.processes[0].pid if who == "torchrun" else ranks_of(start)[int(who[-1])]
    os.kill(victim, signal.Signals[signum])
    (code,) = start.wait()
    assert code != 0
    assert wait_until_empty(tmp_path, SECONDS) == [], start.text()
    again = lab.start(tmp_path, *WAYS[way], ranks=2, plain=True)
    assert again.wait() == [0], again.text()
    assert again.found >= (epoch - 1) * UPDATES + update - 1
    assert again.counts.get("update-done", 0) == LAST - again.found
    equal(tmp_path / "out", straight)
