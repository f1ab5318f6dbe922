"""What became of each job of a sweep: `status.json` in its folder, and `sweep.json`, the list of all of them."""

import json
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha1
from pathlib import Path

from infvit.engine.folder import NOT_IDENTITY, NOT_IDENTITY_OF_DATA, STATUS
from infvit.engine.record import replace_text

SWEEP = "sweep.json"
STATES = ("running", "done", "failed", "preempted")
LONGEST_NAME = 200  # file systems allow 255, and a moved folder gets a date


def now() -> str:
    """Returns the time, with its zone."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


@dataclass(frozen=True)
class Status:
    """What a job says of itself.

    Attributes:
        state: running, done, failed or preempted (it was asked to stop and has saved its state).
        overrides: what was typed for this job.
        exit_code: that of `train.py`; None while it runs.
        error: the line that was shown, if there was one.
        started: when.
        ended: when; None while it runs.
        host: the machine it runs on.
        pid: its process there.
    """

    state: str
    overrides: list[str]
    exit_code: int | None = None
    error: str | None = None
    started: str = field(default_factory=now)
    ended: str | None = None
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    @property
    def gone(self) -> bool:
        """Whether it says that it runs, and its process on this machine is no more. Of other machines nobody knows."""
        if self.state != "running" or self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False


def write_status(folder: Path, status: Status) -> None:
    """Writes the status whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / STATUS, json.dumps(asdict(status), indent=2) + "\n")


def read_status(folder: Path) -> Status | None:
    """Returns the status of a job, or None if it has not begun.

    A job whose process was killed could not say so: it is returned as preempted.
    """
    try:
        content = json.loads((folder / STATUS).read_text())
        known = {f.name for f in fields(Status)}
        status = Status(**{name: value for name, value in content.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    if status.gone:
        return Status(**{**asdict(status), "state": "preempted", "error": "ended without a word; was it killed?"})
    return status


def job_name(overrides: Sequence[str], sweep: str = "") -> str:
    """Returns the name of a job's folder: its overrides, without `=`, commas, spaces and the like.

    Overrides that do not change what is computed (engine, logger) are left out, so that a job is found again with them.

    Args:
        overrides: those of the job.
        sweep: name of the sweep's folder; an experiment of that name need not be said again.
    """
    parts, kept, lossy = [], [], False
    for override in overrides:
        name, _, value = override.lstrip("+~").partition("=")
        left_out = name.split(".")[0] in NOT_IDENTITY or name.removeprefix("data.") in NOT_IDENTITY_OF_DATA
        if left_out or name.startswith("hydra") or (name, value) == ("experiment", sweep):
            continue
        clean = re.sub(r"[^A-Za-z0-9.+_-]+", "-", value).strip("-." if value[:1] != "-" else ".")
        lossy |= clean != value
        kept.append(f"{name}={value}")
        parts.append(f"{name.replace('/', '-')}-{clean}")
    name = "_".join(sorted(parts)) or "default"
    if lossy or len(name) > LONGEST_NAME:
        digest = sha1("\n".join(sorted(kept)).encode()).hexdigest()[:6]
        name = f"{name[: LONGEST_NAME - 7]}_{digest}"
    return name


def add_jobs(sweep: Path, jobs: Mapping[Path, Sequence[str]]) -> None:
    """Adds jobs, their overrides by folder, to the list of a sweep."""
    sweep.mkdir(parents=True, exist_ok=True)
    known: dict[Path, Sequence[str]] = {**read_jobs(sweep), **jobs}
    content = {os.path.relpath(folder, sweep): list(overrides) for folder, overrides in known.items()}
    replace_text(sweep / SWEEP, json.dumps({"jobs": content}, indent=2) + "\n")


def read_jobs(sweep: Path) -> dict[Path, list[str]]:
    """Returns the jobs that a sweep was ever asked for, their overrides by folder."""
    try:
        content = json.loads((sweep / SWEEP).read_text())["jobs"]
    except (OSError, ValueError, KeyError):
        return {}
    return {Path(os.path.normpath(sweep / folder)): list(overrides) for folder, overrides in content.items()}
