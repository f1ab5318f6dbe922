"""Checkpoint files: plain types only, written beside and renamed, the one before kept."""

import contextlib
import logging
import os
import zipfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from infvit.engine.record import METRICS
from infvit.errors import CheckpointError, TrainingError

LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"
FORMAT = 2
_WRAPPERS = ("module.", "_orig_mod.")

log = logging.getLogger(__name__)


def save(content: dict[str, Any], path: Path, previous: Path | None = None) -> None:
    """Writes a checkpoint so that a reader finds the old file or the new one, never a part.

    Args:
        content: tensors and plain types.
        path: where to.
        previous: what the file that is there becomes; only once the new one is safely written.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch's writer hides the one behind the other
        cause = next((e for e in (error, error.__cause__, error.__context__) if isinstance(e, OSError)), None)
        reason = cause.strerror if cause is not None else "it could not be written whole"
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise CheckpointError(f"cannot write {path}: {reason}. Free space or change run_dir=...") from error


def read(path: Path) -> dict[str, Any]:
    """Reads a checkpoint of ours or of timm's, or a safetensors file, on the CPU, without running code from it.

    Raises:
        CheckpointError: missing, damaged, or holding more than tensors and plain types.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is no file." if path.exists() else f"no checkpoint at {path}.")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        if zipfile.is_zipfile(path):  # not so the files of old versions of torch
            with zipfile.ZipFile(path) as archive:
                if broken := archive.testzip():  # torch does not look at the checksums
                    raise zipfile.BadZipFile(f"the checksum of {broken} is wrong")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # the readers raise errors of many kinds
        kind = type(error).__name__
        raise CheckpointError(
            f"checkpoint {path} is damaged, or holds more than tensors and plain types ({kind})."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"checkpoint {path} holds a {type(content).__name__}, not a dictionary.")
    return content


def read_last(folder: Path) -> dict[str, Any] | None:
    """Reads the newest usable checkpoint of a run folder; None when there is none at all.

    Raises:
        CheckpointError: there are checkpoints, but none is usable; or there are none, where there must have been some.
    """
    damaged: CheckpointError | None = None
    for path in (folder / LAST, folder / PREVIOUS):
        if not path.exists():
            continue
        try:
            content = read(path)
        except CheckpointError as error:
            log.warning("%s", error)
            damaged = error
        else:
            if damaged:
                log.warning("Going on from the older %s.", path)
            return content
    if damaged:
        raise CheckpointError(f"{damaged} No older one is usable; fresh=true moves the folder aside and starts over.")
    if (folder / METRICS).exists():  # written after the first checkpoint
        raise CheckpointError(
            f"{folder} has metrics of a run but neither {LAST} nor {PREVIOUS}. Put one back, or use fresh=true, which "
            "moves the folder aside and starts over."
        )
    return None


def find(path: str | Path) -> Path:
    """Returns the checkpoint file that a run folder (its best, else its last) or a file path stands for.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        if not path.exists():
            raise CheckpointError(f"no run folder or checkpoint at {path}.")
        return path
    for name in (BEST, LAST, PREVIOUS):
        if (path / name).exists():
            return path / name
    raise CheckpointError(f"{path} holds no checkpoint ({BEST} or {LAST}).")


def unwrapped(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns a state dict without the prefixes that wrappers (DDP, torch.compile) put before its names."""
    cleaned = {}
    for name, value in state_dict.items():
        while name.startswith(_WRAPPERS):
            name = name.split(".", 1)[1]
        cleaned[name] = value
    return cleaned


def require_finite(weights: dict[str, torch.Tensor]) -> None:
    """Refuses to save weights that are not finite.

    Raises:
        TrainingError: names the first such tensor.
    """
    for name, value in weights.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise TrainingError(
                f"{name} is not finite; nothing was saved. Lower recipe.lr or use engine.precision=fp32."
            )
