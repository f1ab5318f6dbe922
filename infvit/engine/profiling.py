"""Where the time of a training step goes."""

import logging
from pathlib import Path

import torch

log = logging.getLogger(__name__)


def start_profiler(folder: Path, device: torch.device) -> torch.profiler.profile:
    """Profiles updates 3 to 7: `trace.json` for chrome://tracing and a table of the ten costliest operations.

    Returns:
        A running profiler; call `step` after each update and `stop` at the end.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def write(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(folder / "trace.json"))
        key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=10)
        (folder / "profile.txt").write_text(table)
        log.info("Profile in %s\n%s", folder / "trace.json", table)

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=5, repeat=1)
    profiler = torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write)
    profiler.start()
    return profiler
