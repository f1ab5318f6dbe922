"""Looking at other processes."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path


def wait_for(what: Callable[[], bool], seconds: float = 600) -> bool:
    """Returns whether something became true in time: much of it, as four busy processes may share two slow cores."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def members(group: int) -> set[int]:
    """Returns the living processes of a process group."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                found.add(int(stat.parent.name))
    return found
