"""The process that measures: `python -m infvit.evaluation.efficiency.worker TASK.json RESULT.json`.

A fresh one for each measurement of memory: a peak cannot be reset in full, and what ran out of memory once leaves
fragments. All latencies that are compared are taken in one, in turn.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infvit
from infvit.engine.device import select_device, select_precision
from infvit.engine.plan import import_modules
from infvit.errors import ConfigError, UserError
from infvit.evaluation.efficiency.cells import Cell, Settings, Task
from infvit.evaluation.efficiency.check import Check, check_layer, deviation, judge
from infvit.evaluation.efficiency.subject import Subject, attention_layer, create, prepare, token_count
from infvit.metrics.energy import energy_per_call, open_meter
from infvit.metrics.memory import PeakMemory, available_memory, is_out_of_memory, limit_memory
from infvit.metrics.timing import interleave, synchronizer

OUT_OF_MEMORY, TOO_LONG = "out of memory", "time limit"
Runner = Callable[[Task], dict[str, Any]]


def perform(task: Task) -> dict[str, Any]:
    """Measures, in this process.

    Returns:
        Of `memory`: `mib`, `start_mib`, `method`, `limited`. Of the others `cells`, with what was found of each.
        Where memory ran out only `failed` and `detail`.
    """
    settings = task.settings
    import_modules(settings.imports)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = select_device(settings.device)
    precision = select_precision(settings.precision, device)
    try:
        if task.kind == "memory":
            return _memory(task.cells[0], settings, device, precision)
        if task.kind == "latency":
            return {"cells": _latency(task.cells, settings, device, precision)}
        return {"cells": [asdict(_check(cell, settings, device, precision)) for cell in task.cells]}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {"failed": OUT_OF_MEMORY, "detail": str(error).splitlines()[0][:300]}


def _memory(cell: Cell, settings: Settings, device: torch.device, precision: torch.dtype) -> dict[str, Any]:
    _wake(device)
    limited = settings.memory_limit is not None and limit_memory(device, settings.memory_limit)
    subject = prepare(cell, device, precision, settings.compile)
    if settings.compile:
        subject.call()  # the compiler's own memory is not the model's
    peak = PeakMemory(device)
    for _ in range(2 if cell.mode == "training" else 1):  # from its second step on, training holds AdamW's averages
        subject.call()
    return {**asdict(peak.read()), "limited": limited}


def _wake(device: torch.device) -> None:
    """Lets libraries allocate what they keep from their first call on, so that no model pays for it."""
    layer = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(), nn.Linear(32, 32)).to(device)
    layer(torch.randn(2, 3, 8, 8, device=device)).sum().backward()


def _latency(
    cells: list[Cell], settings: Settings, device: torch.device, precision: torch.dtype
) -> list[dict[str, Any]]:
    if settings.memory_limit is not None:
        limit_memory(device, settings.memory_limit)
    subjects = {str(i): prepare(cell, device, precision, settings.compile) for i, cell in enumerate(cells)}
    wait = synchronizer(device)
    work = {name: subject.call for name, subject in subjects.items()}
    latencies = interleave(work, settings.rounds, settings.warmup, settings.seconds, wait)
    found = []
    for name, subject in subjects.items():
        row: dict[str, Any] = {"latency": asdict(latencies[name]), "energy": None}
        if settings.energy_seconds:
            row["energy"] = asdict(energy_per_call(open_meter(device), subject.call, wait, settings.energy_seconds))
        if settings.compile and not subject.model.training:
            row["compiled"] = asdict(_check_compiled(subject, precision))
        found.append(row)
    return found


def _check_compiled(subject: Subject, precision: torch.dtype) -> Check:
    """Compares the compiled model's output with the plain one's."""
    return judge(deviation(subject.call().double(), subject.plain().double()), precision, None)


def _check(cell: Cell, settings: Settings, device: torch.device, precision: torch.dtype) -> Check:
    torch.manual_seed(0)
    model = create(cell)
    on_gpu = device.type == "cuda"
    memory = torch.cuda.mem_get_info(device)[0] if on_gpu else settings.memory_limit or available_memory()
    layer, tokens = attention_layer(model), token_count(model)
    return check_layer(layer, tokens, device, precision, cell.mode == "training", memory)


def in_a_process(task: Task, minutes: float) -> dict[str, Any]:
    """Measures in a fresh process.

    Returns:
        What `perform` returns; `failed` too where the process was killed for its memory or took too long.

    Raises:
        ConfigError: the process says what the user can mend.
        RuntimeError: it failed in another way; that is not taken for a lack of memory.
    """
    root = str(Path(infvit.__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory(prefix="infvit-") as name:
        asked, answered = Path(name, "task.json"), Path(name, "result.json")
        asked.write_text(json.dumps(task.plain()))
        command = [sys.executable, "-m", __name__, str(asked), str(answered)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60 * minutes)
        except subprocess.TimeoutExpired:
            return {"failed": TOO_LONG, "detail": f"not done after {minutes:g} minutes (efficiency.worker_minutes)"}
        if done.returncode == -9:
            return {"failed": OUT_OF_MEMORY, "detail": "the system killed the process"}
        result = json.loads(answered.read_text()) if answered.exists() else {}
    if "user_error" in result:
        raise ConfigError(result["user_error"])
    if done.returncode or not result:
        raise RuntimeError(f"measuring {task.cells[0]} failed with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return result


def _end_with(parent: int) -> None:
    """Ends this process as soon as the one that started it is gone, which may have been killed without a word."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main(asked: str, answered: str) -> None:
    """Reads a task, measures, writes the result."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        result = perform(Task.of(json.loads(Path(asked).read_text())))
    except UserError as error:
        result = {"user_error": str(error)}
    Path(answered).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
