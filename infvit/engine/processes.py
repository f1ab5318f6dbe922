"""The processes of one run: who they are, and the few things they tell each other.

torchrun and submitit start the processes; torch carries what they say (gloo between CPUs, NCCL between GPUs). One of
them, the first, owns the run folder and does all the talking; on a single process nothing here costs anything.
"""

import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from textwrap import shorten
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from infvit.errors import ConfigError, DataError, MissingExtraError, UserError

T = TypeVar("T")
E = TypeVar("E", bound=UserError)


@dataclass(frozen=True)
class Processes:
    """This process among those of its run.

    Attributes:
        rank: index among all processes.
        world_size: number of processes.
        local_rank: index among those of this machine, and so of its GPU.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this process writes and reports."""
        return self.rank == 0

    def table(self, numbers: Sequence[float]) -> torch.Tensor:
        """Returns the numbers of all processes, float64 (world_size, len(numbers)): the same on each of them."""
        mine = torch.tensor(list(numbers), dtype=torch.float64)
        if self.world_size == 1:
            return mine[None]
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(rows, mine)
        return torch.stack(rows)

    def gather(self, value: T) -> list[T]:
        """Returns the values of all processes, by rank. Also a barrier."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """Runs a block without collective operations on every process, and raises the error of one of them on all.

        Thus none waits for another that has given up, and the user reads one line, from the first.
        """
        mine: UserError | None = None
        try:
            yield
        except UserError as error:
            if self.world_size == 1:
                raise
            mine = error
        errors = self.gather(None if mine is None else str(mine))
        rank = next((rank for rank, message in enumerate(errors) if message is not None), None)
        if rank is not None:
            theirs = UserError(f"process {rank}: {errors[rank]}")
            raise self.everywhere(mine if mine is not None and rank == self.rank else theirs) from mine

    def require_same(self, value: object, what: str) -> None:
        """Makes sure that all processes have the same value; on several machines they may not.

        Raises:
            DataError: they have not.
        """
        values = self.gather(value)
        if any(other != values[0] for other in values):
            found = ", ".join(f"process {rank}: {other}" for rank, other in enumerate(values))
            raise self.everywhere(DataError(f"the processes see different {what} ({found})."))

    def everywhere(self, error: E) -> E:
        """Marks an error that is raised on all processes, so that only the first shows it."""
        error.shown_elsewhere = not self.first
        return error


ALONE = Processes()
"""The only process of its run."""


def join_processes(device: str, timeout_minutes: float) -> Processes:
    """Joins the other processes of this run, if it was started with several; once for all jobs of a sweep.

    Args:
        device: `engine.device`: auto, cpu, cuda or mps.
        timeout_minutes: how long a process waits for another before it gives up with an error.

    Raises:
        ConfigError: several processes that cannot work together.
    """
    if "WORLD_SIZE" not in os.environ:
        _read_cluster()
    world_size, rank, local_rank = (int(os.environ.get(k, d)) for k, d in
                                    (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0")))  # fmt: skip
    if world_size == 1:
        return ALONE
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE={world_size} asks for several processes, but {', '.join(missing)} is not set: start them "
                "with torchrun --nproc-per-node=N train.py ..."
            )
        cuda = torch.cuda.is_available() and device in ("auto", "cuda")
        if device == "mps" or (device == "auto" and not cuda and torch.backends.mps.is_available()):
            raise ConfigError("several processes cannot share MPS; use engine.device=cpu, or one process.")
        if cuda:
            if local_rank >= torch.cuda.device_count():
                raise ConfigError(
                    f"process {local_rank} of this machine has no GPU of its own: there are "
                    f"{torch.cuda.device_count()}. Start as many processes as GPUs (--nproc-per-node)."
                )
            torch.cuda.set_device(local_rank)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(minutes=timeout_minutes))
    if rank:
        logging.getLogger("infvit").setLevel(logging.ERROR)  # the first process tells what is the same on all
    return Processes(rank, world_size, local_rank)


def _read_cluster() -> None:
    """Translates what submitit knows of its tasks into the variables that torchrun would set."""
    if "SUBMITIT_EXECUTOR" in os.environ:
        try:
            from submitit.helpers import TorchDistributedEnvironment
        except ImportError as error:
            raise MissingExtraError("a task of submitit", "slurm") from error
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    elif int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        raise ConfigError(
            f"this Slurm step has {os.environ['SLURM_STEP_NUM_TASKS']} tasks, which would each train by themselves: "
            "start one task per node with `srun torchrun ...`, or use hydra/launcher=slurm (docs/cluster.md)."
        )


def is_first() -> bool:
    """Whether this process is the first of its run, by what started it: also before `join_processes`."""
    known = ("RANK", "SLURM_PROCID", "SUBMITIT_LOCAL_GLOBALID")
    return int(next((os.environ[name] for name in known if os.environ.get(name)), "0")) == 0


def have_joined() -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized()


def lost_another(error: Exception) -> str | None:
    """Returns one line for the error that torch raises when another process has gone or does not answer, else None."""
    text = " ".join(str(error).split())
    if have_joined() and re.search(r"onnection (closed|reset|refused)|[Tt]imed? ?out|NCCL|Broken pipe", text):
        return (
            f"another process of this run has ended or does not answer; what it said tells why. ({shorten(text, 150)})"
        )
    return None


def leave_processes(code: int) -> NoReturn:
    """Ends this process with an exit code.

    After an error at once: the others notice that it is gone, and nothing here waits for them.
    """
    if have_joined():
        if code == 1:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        dist.destroy_process_group()
    sys.exit(code)
