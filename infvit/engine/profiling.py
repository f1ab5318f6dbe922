"""Where the time of a training step goes."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

TRACE = "trace.json"
FIRST = 3  # the update that is profiled first: those before it allocate and choose kernels

log = logging.getLogger(__name__)


@contextmanager
def profiling(wanted: bool, folder: Path, device: torch.device) -> Iterator[Callable[[], None]]:
    """Profiles updates 3 to 7: trace.json for chrome://tracing and a table of the ten costliest operations.

    Yields:
        What to call after each update.
    """
    if not wanted:
        yield lambda: None
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    updates = 0

    def write(profiler: torch.profiler.profile) -> None:
        if updates < FIRST:
            return
        profiler.export_chrome_trace(str(folder / TRACE))
        key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        averages = profiler.key_averages()
        # Marks around operations are none themselves; in place, as the list holds what `table` needs besides.
        averages[:] = [event for event in averages if not event.key.startswith(("ProfilerStep", "enumerate("))]
        table = averages.table(sort_by=key, row_limit=10)
        (folder / "profile.txt").write_text(table)
        log.info("Profile in %s\n%s", folder / TRACE, table)

    def after_update() -> None:
        nonlocal updates
        updates += 1
        profiler.step()

    schedule = torch.profiler.schedule(wait=1, warmup=FIRST - 2, active=5, repeat=1)
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write) as profiler:
        yield after_update
    if updates < FIRST:
        log.warning(
            "profile=true: nothing was written, for these were %d updates; the first to count is the third.", updates
        )
