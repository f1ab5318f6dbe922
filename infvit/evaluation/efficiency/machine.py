"""What a measurement was taken on."""

import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import timm
import torch

from infvit.engine.folder import git_state
from infvit.metrics.memory import available_memory
from infvit.version import __version__


def describe(device: torch.device, threads: int | None) -> dict[str, Any]:
    """Returns machine, versions and state of the code."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = available_memory()
    return {
        "measured": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpu": _cpu_name(),
        "cores": cores,
        "threads": threads or torch.get_num_threads(),
        "memory_available_gib": None if memory is None else round(memory / 2**30, 1),
        "device": device.type,
        **(_gpu(device) if device.type == "cuda" else {}),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "timm": timm.__version__,
        "infvit": __version__,
        "git": git_state(Path(__file__).parent),
    }


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "gpu_uuid": f"GPU-{properties.uuid}",
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None
