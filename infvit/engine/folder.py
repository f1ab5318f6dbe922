"""The run folder: its name, its owner, and the record of what made it."""

import fcntl
import hashlib
import importlib.metadata
import itertools
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from infvit.config import CHANGEABLE, TrainConfig
from infvit.engine.record import replace_text
from infvit.errors import ConfigError

log = logging.getLogger(__name__)

# Keys that say where and how to run, not what to compute.
NOT_IDENTITY_OF_DATA = ("num_workers", "max_damaged")
NOT_IDENTITY = ("engine", "logger", "run_dir", "fresh", "dry_run", "debug", "profile", "allow_change")
LOG = "train.log"
STATUS = "status.json"
TRACEBACK = "traceback.txt"


class InUseError(ConfigError):
    """The run folder belongs to a living process."""


def identity(config: TrainConfig) -> dict[str, Any]:
    """Returns what makes two runs the same run: the configuration without engine, logger and the like."""
    plain = {name: value for name, value in asdict(config).items() if name not in NOT_IDENTITY}
    plain["data"] = {name: value for name, value in plain["data"].items() if name not in NOT_IDENTITY_OF_DATA}
    return plain


def default_folder(config: TrainConfig) -> Path:
    """Returns runs/MODEL-DATA-HASH; free of timestamps, so that the same command finds its run again."""
    digest = hashlib.sha1(json.dumps(identity(config), sort_keys=True).encode()).hexdigest()[:8]
    return Path("runs") / f"{config.model.name.replace('/', '-')}-{config.data.name}-{digest}"


@contextmanager
def own_folder(path: Path, fresh: bool) -> Iterator[Path]:
    """Creates the folder and holds its lock, which the system releases when the process ends, however it ends.

    A POSIX lock (`lockf`): unlike that of `flock`, loader workers that outlive a killed process do not inherit it.

    Args:
        path: the run folder.
        fresh: move an existing folder aside first.

    Raises:
        ConfigError: not writable.
        InUseError: owned by a living process.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / ".lock", "a+")  # noqa: SIM115 - held until the run ends
    except OSError as error:
        raise ConfigError(f"run_dir={path} cannot be written: {error.strerror}. Choose another run_dir=...") from error
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            raise InUseError(
                f"run_dir={path} is in use by {owner}. Wait for it or choose another run_dir=..."
            ) from error
        lock.seek(0)
        lock.truncate()
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        if fresh:
            _move_aside(path)
        yield path


def _move_aside(path: Path) -> None:
    """Moves the content of a folder to a sibling named by the time; lock and status are those of the new run."""
    content = [entry for entry in path.iterdir() if entry.name not in (".lock", STATUS)]
    if not content:
        return
    stem = f"{path.name}.old-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem if count == 0 else f"{stem}-{count}" for count in itertools.count())
    aside = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    aside.mkdir()
    for entry in content:
        entry.rename(aside / entry.name)


def check_same_run(config: TrainConfig, path: Path) -> None:
    """Compares the configuration with the record in the folder.

    Raises:
        ConfigError: the folder belongs to another configuration; the differing keys are named.
    """
    stored = read_config(path)
    if not stored:
        return
    changes(config, stored, path)
    for key, value in _flat(asdict(config.engine)).items():
        if stored.get("engine", {}).get(key, value) != value:
            log.warning("engine.%s was %s when this run started and is %s now.", key, stored["engine"][key], value)


def read_config(path: Path) -> dict[str, Any]:
    """Returns the configuration recorded in a run folder; empty where there is none.

    Raises:
        ConfigError: the record is damaged, after a power failure, say.
    """
    file = path / "config.yaml"
    if not file.is_file():
        return {}
    try:
        stored = yaml.safe_load(file.read_bytes())
    except (yaml.YAMLError, UnicodeDecodeError):
        stored = None
    if not isinstance(stored, dict):
        raise ConfigError(f"{file} is damaged; remove it, and start the run's command again, which writes it anew.")
    return stored


def changes(config: TrainConfig, stored: dict[str, Any], path: Path) -> list[str]:
    """Returns what `allow_change` changes in a run that was started with a stored configuration, as `key: old -> new`.

    Raises:
        ConfigError: something else differs.
    """
    old = _flat({name: value for name, value in stored.items() if name not in NOT_IDENTITY})
    for name in NOT_IDENTITY_OF_DATA:
        old.pop(f"data.{name}", None)
    new = _flat(identity(config))
    differing = {
        key: f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new)
        if old.get(key) != new.get(key)
    }
    allowed = [differing.pop(key) for key in config.allow_change if key in differing]
    if differing:
        changeable = [key for key in differing if key in CHANGEABLE]
        last = f", or allow_change=[{','.join(changeable)}] to go on anyway" if list(differing) == changeable else ""
        raise ConfigError(
            f"run_dir={path} holds another run ({'; '.join(differing.values())}). "
            f"Choose another run_dir=..., or fresh=true to move it aside{last}."
        )
    return allowed


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def write_record(config: TrainConfig, path: Path, device: torch.device) -> None:
    """Writes the resolved configuration, and versions, command, machine and git state."""
    replace_text(path / "config.yaml", yaml.safe_dump(asdict(config), sort_keys=False))
    packages = ("infvit", "torch", "torchvision", "timm", "hydra-core", "numpy", "pillow")
    record = {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "machine": {"host": socket.gethostname(), "platform": platform.platform(), "cpus": os.cpu_count()},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "git": git_state(Path(__file__).parent),
    }
    replace_text(path / "environment.json", json.dumps(record, indent=2) + "\n")


def git_state(folder: Path) -> dict[str, Any] | None:
    """Returns commit and cleanness of the checkout the code runs from, or None outside of one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
