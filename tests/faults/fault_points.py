"""A user's module (`imports=[fault_points]`) that sends signals to its own process at chosen places of a run.

`FAULTS="backward:7:SIGKILL update:2:SIGTERM"` does so at the 7th backward pass and at the 2nd update, each counted
from the start of the process. `FAULT_RANK` says which of several processes does it. `FAULT_REPORT` names a file that
gets the counts of all places, just before a signal is sent and again when the process ends by itself. `FAULT_PAUSE`
makes each update last that many seconds longer.

Without orders it only counts. It is imported by the straight run as well: nothing here changes what is computed.
"""

import atexit
import functools
import importlib
import io
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from timm.utils import ModelEmaV3
from torch.utils.data import get_worker_info

from infvit.data.loader import EvalDataset, TrainDataset
from infvit.engine import loop
from infvit.engine.state import RunState
from infvit.metrics import ClassificationScores

RECORD = ("metrics.jsonl", "summary.csv", "config.yaml", "environment.json")
CHECKPOINTS = ("previous.pt", "last.pt", "best.pt")

_main = os.getpid()
_counts: Counter[str] = Counter()
_update_times: list[float] = []
_scored = "raw"


def _orders() -> dict[tuple[str, int], int]:
    """Reads which signal to send at which call of which place."""
    if os.environ.get("RANK", "0") != os.environ.get("FAULT_RANK", "0"):
        return {}
    orders = (order.split(":") for order in os.environ.get("FAULTS", "").split())
    return {(place, int(number)): signal.Signals[name] for place, number, name in orders}


_todo = _orders()


@atexit.register
def _report() -> None:
    if os.getpid() == _main and "FAULT_REPORT" in os.environ:
        report = {"counts": _counts, "update_times": _update_times, "end": time.monotonic()}
        Path(f"{os.environ['FAULT_REPORT']}-{os.environ.get('RANK', '0')}").write_bytes(json.dumps(report).encode())


def reached(place: str) -> None:
    """Counts a place, and sends the signal that is due there."""
    _counts[place] += 1
    signum = _todo.get((place, _counts[place]))
    if signum is not None:
        _report()
        os.kill(os.getpid(), signum)


def around(owner: Any, name: str, before: str | None = None, after: str | None = None) -> None:
    """Makes a function two places: where it begins and where it has returned."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before:
            reached(before)
        result = original(*args, **kwargs)
        if after:
            reached(after)
        return result

    setattr(owner, name, wrapped)


def _update(original: Callable[..., Any], *args: Any) -> Any:
    time.sleep(float(os.environ.get("FAULT_PAUSE", "0")))
    reached("update")
    result = original(*args)
    _update_times.append(time.monotonic())
    reached("update-done")
    return result


def _training_loss(original: Callable[..., Any], logits: Any, *args: Any) -> Any:
    logits.register_hook(lambda gradient: reached("backward"))  # by autograd, with half of the backward pass to come
    loss = original(logits, *args)
    reached("forward-done")
    return loss


def _validate(original: Callable[..., Any], model: Any, *args: Any) -> Any:
    global _scored
    _scored = "raw" if model.training else "ema"  # the average is never in training mode
    return original(model, *args)


def _add_scores(original: Callable[..., Any], *args: Any) -> Any:
    reached(f"evaluation-of-{_scored}")
    return original(*args)


def _in_two(file: Any, content: Any, place: str) -> None:
    """Writes a file so that half of it is really there when the place is reached."""
    file.write(content[: len(content) // 2])
    file.flush()
    reached(place)
    file.write(content[len(content) // 2 :])


def _torch_save(original: Callable[..., Any], content: Any, file: Any) -> None:
    memory = io.BytesIO()
    original(content, memory)
    _in_two(file, memory.getvalue(), "half-a-checkpoint")


def _write_text(original: Callable[..., Any], path: Path, text: str, **options: Any) -> Any:
    name = path.name.removesuffix(".tmp")
    if name not in RECORD:
        return original(path, text, **options)
    with open(path, "w") as file:
        _in_two(file, text, f"half-of-{name}")


def _savefig(original: Callable[..., Any], figure: Figure, path: Path, **options: Any) -> None:
    memory = io.BytesIO()
    original(figure, memory, **options)
    with open(path, "wb") as file:
        _in_two(file, memory.getvalue(), f"half-of-{path.name}")


def _replace(original: Callable[..., Any], source: Any, target: Any) -> None:
    name = Path(target).name
    known = name in CHECKPOINTS + RECORD
    if known:
        reached(f"before-{name}")
    original(source, target)
    if known:
        reached(f"after-{name}")


def _item(place: str, original: Callable[..., Any], dataset: Any, *which: Any) -> Any:
    worker = get_worker_info()
    if worker is not None and worker.id == 0:
        reached(place)
    return original(dataset, *which)


def instead(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Puts a function, which is given the original first, in place of another."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(lambda *args, **kwargs: function(original, *args, **kwargs)))


around(importlib.import_module("infvit.engine.train"), "build_run", before="start")
around(RunState, "load_state_dict", before="restoring")
instead(loop, "train_update", _update)
instead(loop, "training_loss", _training_loss)
around(torch.amp.GradScaler, "step", before="optimizer-step", after="optimizer-step-done")
around(ModelEmaV3, "update", before="ema-step", after="ema-step-done")
instead(loop, "validate", _validate)
instead(ClassificationScores, "update", _add_scores)
instead(torch, "save", _torch_save)
around(os, "fsync", before="before-fsync", after="after-fsync")
instead(os, "replace", _replace)
instead(Path, "write_text", _write_text)
instead(Figure, "savefig", _savefig)
instead(TrainDataset, "views_of", functools.partial(_item, "training-worker"))
instead(EvalDataset, "__getitem__", functools.partial(_item, "evaluation-worker"))
