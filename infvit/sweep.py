"""Sweeps: where each job goes, what became of it, and the table at the end. Hydra only makes and launches the jobs.

A job may run in this process, in one of joblib's, or in one that Slurm starts: all they share is the sweep's folder.
`SweepCallback` writes there which jobs there are, before the first; each job keeps its own `status.json`.
"""

import contextlib
import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from infvit.config import TrainConfig
from infvit.engine.folder import LOG, TRACEBACK, InUseError, check_same_run
from infvit.engine.processes import is_first
from infvit.engine.status import Status, add_jobs, job_name, now, read_jobs, read_status, write_status
from infvit.reports.ablation import write_ablation
from infvit.reports.jobs import jobs_table
from infvit.reports.runs import read_run

log = logging.getLogger("infvit")
_planned: list["Sweep"] = []  # that of this process, which Hydra gives no other way to


@dataclass(frozen=True)
class Sweep:
    """The jobs of one command."""

    folder: Path
    jobs: tuple[Path, ...]

    def finish(self) -> list[int]:
        """Shows the table of all jobs, writes the report of the sweep, and returns the exit code of each job.

        Those are from the status files, the only word there is of jobs in other processes. A job that has not begun has
        none: why it has not, another one knows.
        """
        if is_first():
            known = read_jobs(self.folder)
            print(jobs_table([read_run(job, known.get(job)) for job in self.jobs], self.folder))
            report = write_ablation(self.folder)
            print(f"The whole sweep: {report} (also .csv, .tex, .png)")
        ended = [read_status(job) for job in self.jobs]
        return [status.exit_code or 1 for status in ended if status is not None and status.state != "done"]


class SweepCallback(Callback):
    """Hydra calls it with the configuration of a sweep before the first job."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Writes down the jobs of the sweep."""
        if config.get("dry_run") or not config.hydra.sweeper._target_.endswith(".BasicSweeper"):
            return
        folder = Path(config.hydra.sweep.dir)
        try:
            jobs = {place(overrides, config, folder): overrides for overrides in planned_overrides(config)}
        except (HydraException, OmegaConfBaseException):
            return  # Hydra makes the same jobs next, and tells
        if is_first():
            with contextlib.suppress(OSError):  # Hydra makes the same folder next, and tells
                add_jobs(folder, jobs)
        _planned.append(Sweep(folder, tuple(jobs)))


def planned_overrides(config: DictConfig) -> list[list[str]]:
    """Returns the overrides of each job, as Hydra's own sweeper makes them out of files and command line."""
    in_files = [f"{name}={value}" for name, value in (config.hydra.sweeper.params or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    typed: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)  # `${...}` is of each job
    overrides = parser.parse_overrides([*in_files, *typed])
    return BasicSweeper.split_arguments(overrides, None)[0]


def place(overrides: Sequence[str], config: DictConfig, sweep: Path) -> Path:
    """Returns the folder of a job: what `run_dir` says, else one in the sweep's folder named by the overrides."""
    job = GlobalHydra.instance().config_loader().load_sweep_config(config, list(overrides))
    return sweep / job_name(overrides, sweep.name) if job.run_dir is None else Path(job.run_dir)


def forget_sweep() -> None:
    """Forgets the sweep of an earlier command in this process."""
    _planned.clear()


def finish_sweep() -> list[int]:
    """Finishes the sweep of this process, if it is one; see `Sweep.finish`."""
    codes = [code for sweep in _planned for code in sweep.finish()]
    _planned.clear()
    return codes


@dataclass
class Job:
    """A job of a sweep, in the process that runs it."""

    folder: Path
    status: Status
    before: Status | None = None

    def is_done(self, config: TrainConfig) -> bool:
        """Whether it was done by an earlier command.

        Raises:
            ConfigError: its folder holds another run.
        """
        status = read_status(self.folder)
        if status is None or status.state != "done" or config.fresh:
            return False
        check_same_run(config, self.folder)
        top1 = read_run(self.folder).last("top1")
        score = "" if top1 is None else f" Held-out top-1 {top1:.2f} %."
        log.info("%s is done.%s fresh=true starts it over.", self.folder, score)
        return True

    def begin(self) -> None:
        """Says that it runs."""
        if is_first():
            self.before = read_status(self.folder)
            (self.folder / TRACEBACK).unlink(missing_ok=True)
            write_status(self.folder, self.status)

    def end(self, code: int, error: BaseException | None = None) -> None:
        """Says how it ended, and writes the traceback of what went wrong.

        One that went wrong before the run had its log gets a log all the same.
        """
        if not is_first():
            return
        if isinstance(error, InUseError) and self.before is not None:
            write_status(self.folder, self.before)  # that of another process, which goes on
            return
        state = "done" if code == 0 else "preempted" if code >= 128 else "failed"
        line = None if error is None else " ".join(str(error).split()) or type(error).__name__
        write_status(self.folder, replace(self.status, state=state, exit_code=code, error=line, ended=now()))
        if state == "failed" and error is not None:
            (self.folder / TRACEBACK).write_text("".join(traceback.format_exception(error)))
            if not (self.folder / LOG).exists():
                (self.folder / LOG).write_text(f"error: {line}\n")


def this_job(cfg: DictConfig) -> Job | None:
    """Returns the job of a sweep that this is, with its run folder in the tree; None where it is a single run.

    Args:
        cfg: the composed tree of the job.
    """
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN or cfg.get("dry_run"):
        return None
    hydra = HydraConfig.get()
    typed: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)  # as in the list of the sweep's jobs
    overrides, sweep = list(typed), Path(hydra.sweep.dir)
    if cfg.run_dir is None:
        cfg.run_dir = str(sweep / job_name(overrides, sweep.name))
    return Job(Path(cfg.run_dir), Status("running", overrides))
