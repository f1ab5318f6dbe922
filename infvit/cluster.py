"""Sweeps whose jobs run in other processes: what Hydra's submitit launcher leaves out.

By itself it says nothing of a job that went well, raises at the first one that was killed and so loses the others, and
tells neither Slurm nor the shell that a job failed.
"""

import functools
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import submitit
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from submitit.core.utils import UncompletedJobError, cloudpickle_dump, temporary_save_path
from submitit.helpers import as_completed

from infvit.engine.processes import leave_processes
from infvit.errors import UserError

Job = submitit.Job[int]


def report_jobs(exit_codes: list[int]) -> None:
    """Makes the launcher submit through `ReportingExecutor`, which adds the exit code of every job to the list."""
    submitit.AutoExecutor = functools.partial(ReportingExecutor, exit_codes)  # type: ignore[assignment,misc]


@dataclass(frozen=True)
class Ended:
    """A job that has ended, as the launcher looks at it: without an exception."""

    code: int

    def results(self) -> list[JobReturn]:
        """Returns the exit code as what Hydra's function returned."""
        return [JobReturn(status=JobStatus.COMPLETED, _return_value=self.code)]


class ReportingExecutor(submitit.AutoExecutor):
    """Tells how each job ended as soon as it has."""

    def __init__(self, exit_codes: list[int], *args: Any, **kwargs: Any) -> None:
        self.exit_codes = exit_codes
        with _one_line():
            super().__init__(*args, **kwargs)

    def update_parameters(self, **kwargs: Any) -> None:
        """Takes the launcher's keys."""
        with _one_line():
            super().update_parameters(**kwargs)

    def map_array(self, fn: Callable[..., JobReturn], *iterable: Iterable[Any]) -> list[Any]:  # type: ignore[override]
        """Submits the jobs of the launcher, whose overrides and numbers are in the iterables, and waits for all."""
        overrides, _, numbers, *_ = iterable
        names = [f"#{number} {what}".strip() for number, what in zip(numbers, differences(overrides), strict=True)]
        with _one_line():
            jobs = super().map_array(functools.partial(run_task, sys.argv, fn), *iterable)
        for name, job in zip(names, jobs, strict=True):
            _say(f"{name} is job {job.job_id}, what it writes is in {job.paths.folder}")
        codes = [0] * len(jobs)
        try:
            for job in as_completed(jobs, poll_frequency=1):
                at = jobs.index(job)
                codes[at], words = ending(job)
                _say(f"{names[at]}: {words}")
        except KeyboardInterrupt:
            if self.cluster == "slurm":
                _say(f"The jobs go on without being waited for; scancel {jobs[0].job_id.split('_')[0]} ends them.")
            raise
        self.exit_codes += codes
        return [Ended(code) for code in codes]


def differences(jobs: Iterable[Sequence[str]]) -> list[str]:
    """Returns, for each list of overrides, those of them that not all lists have."""
    lists = [filter_overrides(overrides) for overrides in jobs]
    common = set.intersection(*map(set, lists))
    return [" ".join(override for override in overrides if override not in common) for overrides in lists]


def run_task(argv: list[str], launcher: Callable[..., JobReturn], *arguments: Any) -> NoReturn:
    """Runs in the process of a task, of which a job may have several, and ends it with the exit code of the job.

    Thus srun ends the other tasks (--kill-on-bad-exit) and Slurm shows a failed job as failed. submitit would end it
    with 0, since nothing was raised, and write no result where a process exits by itself.

    Args:
        argv: the command line that the user typed, which the record of the run shows.
        launcher: of Hydra; a call of it runs the job.
        arguments: of the launcher.
    """
    sys.argv = argv
    logging.getLogger("submitit").propagate = False  # it has its own handlers
    code = int(launcher(*arguments).return_value)
    with temporary_save_path(submitit.JobEnvironment().paths.result_pickle) as path:
        cloudpickle_dump(("success", code), path)
    leave_processes(code)


def ending(job: Job) -> tuple[int, str]:
    """Returns the exit code of a job that has ended, that of its first failed task, and what it said last."""
    tasks = [job.task(number) for number in range(job.num_tasks)]
    # submitit waits a while for a result that is not there: ask last for those of tasks that were ended by another one.
    for task in sorted(tasks, key=lambda task: not task.paths.result_pickle.exists()):
        try:
            code = task.result()
        except UncompletedJobError:
            return 1, f"ended without a result; last it said {_last_line([task])!r} ({task.paths.stderr})"
        if code:
            return code, _last_line(
                tasks, r"(process \d+: )?(error|interrupted): "
            ) or f"{_last_line([task])} ({task.paths.stderr})"
    return 0, _last_line(tasks[:1]) or "done"


def _last_line(tasks: Sequence[Job], start: str = "") -> str:
    """Returns the last line that tasks wrote to stderr, of those with a start; the last task's comes first."""
    lines = [line for task in tasks for line in (task.stderr() or "").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if re.match(start, line)), "")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _one_line() -> Iterator[None]:
    """Turns submitit's complaints, about Slurm or about the launcher's keys, into an error for the user."""
    try:
        yield
    except (RuntimeError, ValueError, NameError, AssertionError) as error:
        raise UserError(f"The jobs could not be submitted: {' '.join(str(error).split())}") from error
