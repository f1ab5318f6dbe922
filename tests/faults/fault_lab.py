"""Runs `train.py` as a real process, interrupts it, and compares what it leaves with what the straight run left."""

import csv
import json
import math
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image

from infvit.data.digits import digit_arrays

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
SECONDS = 90
"""How long anything may take before it counts as hanging."""
SEED = os.environ.get("FAULTS_SEED", "0")
TIMING = ("images_per_second", "data_wait", "train_seconds", "eval_seconds")
EPOCHS, UPDATES = 3, 6
LAST = EPOCHS * UPDATES
# Everything random is switched on; 50 images, 6 updates an epoch of two micro-batches. The best epoch is the second.
COMMAND = (
    "model=infvit_linear_mini", "+model.args.depth=2", "+model.args.embed_dim=24", "+model.args.num_heads=2",
    "data=folder", "data.img_size=16", "data.num_workers=2", "data.micro_batch_size=4", "batch_size=8",
    f"epochs={EPOCHS}", "seed=12", "recipe.lr=0.02", "recipe.warmup_epochs=0", "recipe.smoothing=0.1",
    "recipe.drop_path=0.1", "recipe.drop=0.1", "recipe.mixup=0.8", "recipe.cutmix=1.0", "recipe.mixup_prob=0.5",
    "recipe.ema_decay=0.8", "recipe.repeated_aug=3", "recipe.auto_augment=rand-m9-mstd0.5-inc1",
    "recipe.scale=[0.7,1.0]", "recipe.reprob=0.2", "recipe.hflip=0.5", "recipe.clip_grad=1.0", "engine.device=cpu",
    "engine.log_seconds=0", "engine.timeout_minutes=1", "imports=[fault_points]", "run_dir=out",
)  # fmt: skip
ENVIRONMENT = {"PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


class Process(Protocol):
    """A process that was started."""

    pid: int

    def wait(self, timeout: float) -> int:
        """Returns its exit code, negative for the signal that ended it."""
        ...


class Zygote:
    """The other end of zygote.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py"), str(ROOT / "train.py")], text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **ENVIRONMENT},
        )  # fmt: skip

    def ask(self, order: object, timeout: float = SECONDS) -> int:
        """Sends an order and returns the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        assert select.select([self._process.stdout], [], [], timeout)[0], f"no answer to {order}"
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """Ends it; what it started is not touched."""
        self._process.kill()
        self._process.communicate()


@dataclass
class Forked:
    """A process of the zygote."""

    zygote: Zygote
    pid: int

    def wait(self, timeout: float) -> int:
        """Returns the exit code."""
        return self.zygote.ask(self.pid, timeout)


@dataclass
class Start:
    """One start of the command: its processes, one unless there are ranks, its log and what it counted."""

    processes: Sequence[Process]
    log: Path
    report: Path

    def wait(self, timeout: float = SECONDS) -> list[int]:
        """Returns the exit codes; processes that do not end are killed, which fails the test."""
        try:
            return [process.wait(timeout) for process in self.processes]
        except (AssertionError, subprocess.TimeoutExpired) as error:
            for pid in processes_in(self.log.parent):
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"does not end: {self.text()}") from error

    def wait_for(self, pattern: str) -> None:
        """Returns once the log shows a pattern."""
        deadline = time.monotonic() + SECONDS
        while not re.search(pattern, self.text()):
            assert time.monotonic() < deadline, self.text()
            assert any(Path(f"/proc/{process.pid}/cwd").exists() for process in self.processes), self.text()
            time.sleep(0.01)

    def text(self) -> str:
        """Returns the log so far."""
        return self.log.read_text() if self.log.exists() else ""

    @property
    def found(self) -> int:
        """The update it went on from."""
        numbers = re.findall(r"Found the state after update (\d+) in out", self.text())
        return int(numbers[0]) if numbers else 0

    def told(self, rank: int = 0) -> dict[str, Any]:
        """What a process counted."""
        return json.loads(Path(f"{self.report}-{rank}").read_text())

    @property
    def counts(self) -> dict[str, int]:
        """How often the first process reached each place."""
        return self.told()["counts"]


def processes_in(folder: Path) -> list[int]:
    """Ids of the living processes whose working folder is at or below this one: all that a run ever started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                where = os.readlink(entry / "cwd")
            except OSError:  # gone, or a zombie
                continue
            if Path(where).is_relative_to(folder):
                found.append(int(entry.name))
    return found


def wait_until_empty(folder: Path, seconds: float) -> list[int]:
    """Waits until all processes of a folder have ended by themselves; returns those that have not."""
    deadline = time.monotonic() + seconds
    while (left := processes_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def make_data(root: Path) -> None:
    """Class folders with 50 training and 24 held-out digits, 16 x 16 grey PNG."""
    for split, name, count in (("train", "train", 50), ("val", "validation", 24)):
        images, labels = digit_arrays(split)
        for i in [i for i, label in enumerate(labels) if label < 3][:count]:
            folder = root / name / str(labels[i])
            folder.mkdir(parents=True, exist_ok=True)
            pixels = Image.fromarray((images[i] * 255).round().astype("uint8"))
            pixels.resize((16, 16), Image.Resampling.NEAREST).save(folder / f"{i:04}.png")


@dataclass(frozen=True)
class Straight:
    """What an unbroken run left, how often it reached each place, and how long it took after its first lines."""

    outcome: dict[str, Any]
    counts: dict[str, int]
    seconds: float


Tried = Callable[[str, str], None]
Equal = Callable[[Path, Straight], None]


class Lab:
    """Starts runs, and keeps what the straight ones left."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.zygote = Zygote()
        self._straight: dict[tuple[tuple[str, ...], int], Straight] = {}
        make_data(base / "data")

    def start(self, folder: Path, *overrides: str, ranks: int = 1, plain: bool = False, **environment: str) -> Start:
        """Starts the command in a folder: forked from the zygote, or as a user does; then several by torchrun."""
        folder.mkdir(exist_ok=True)
        number = len(list(folder.glob("log-*")))
        log, report = folder / f"log-{number}", folder / f"report-{number}"
        argv = [*COMMAND, f"data.root={self.base / 'data'}", *overrides]
        added = {**ENVIRONMENT, **environment, "FAULT_REPORT": str(report)}
        if plain:
            with open(log, "w") as file:
                process = subprocess.Popen(
                    [sys.executable, *(TORCHRUN if ranks > 1 else ()), str(ROOT / "train.py"), *argv], cwd=folder,
                    env={**os.environ, **added}, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                    start_new_session=True,
                )  # fmt: skip
            return Start([process], log, report)
        if ranks > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                added |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                          "MASTER_PORT": str(free.getsockname()[1])}  # fmt: skip
        processes = []
        for rank in range(ranks):
            mine = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            where = log if rank == 0 else log.with_name(f"rank-{rank}-{log.name}")
            order = {"argv": argv, "cwd": str(folder), "env": {**added, **mine}, "log": str(where)}
            processes.append(Forked(self.zygote, self.zygote.ask(order)))
        return Start(processes, log, report)

    def straight(self, *overrides: str, ranks: int = 1) -> "Straight":
        """Returns the unbroken run of a command."""
        key = (overrides, ranks)
        if key not in self._straight:
            folder = self.base / f"straight-{len(self._straight)}"
            start = self.start(folder, *overrides, ranks=ranks)
            start.wait_for("folder  out")
            begin = time.monotonic()
            assert start.wait() == [0] * ranks, start.text()
            self._straight[key] = Straight(outcome(folder / "out"), start.counts, time.monotonic() - begin)
        return self._straight[key]

    def close(self) -> None:
        """Ends what the tests left, and refuses to pass over it."""
        left = wait_until_empty(self.base.parent, 15)
        folders = [os.readlink(f"/proc/{pid}/cwd") for pid in left]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self.zygote.close()
        assert not left, f"processes of {folders} were still there"


def draw(seed: str, most: int) -> int:
    """Returns a number in 1..most that is the same whenever the seed is."""
    return random.Random(seed).randint(1, most)


def outcome(folder: Path) -> dict[str, Any]:
    """Returns everything a run leaves that must not depend on how often it was interrupted."""
    result: dict[str, Any] = {}
    for name in ("last.pt", "best.pt"):
        content = torch.load(folder / name, map_location="cpu", weights_only=True)
        content["history"] = [_untimed(row) for row in content["history"]]
        del content["config"]  # names the folder
        result[name] = content
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    result["metrics.jsonl"] = [_untimed(json.loads(line, parse_constant=_refuse)) for line in lines]
    with open(folder / "summary.csv", newline="") as file:
        result["summary.csv"] = [_untimed(row) for row in csv.DictReader(file)]
    result["curves.png"] = (folder / "curves.png").read_bytes()
    result["files"] = sorted(path.name for path in folder.iterdir())
    return result


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def _untimed(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in TIMING}


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Names the places at which two trees differ: tensors bitwise, NaN equal to NaN."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [found for key in a for found in differences(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [found for i, (x, y) in pairs for found in differences(x, y, f"{where}/{i}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [where]
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return [] if both_nan or (type(a) is type(b) and a == b) else [f"{where}: {str(a)[:80]} != {str(b)[:80]}"]
