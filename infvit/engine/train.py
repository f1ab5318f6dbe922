"""One training run from configuration to result."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infvit.config import TrainConfig
from infvit.engine.device import backend_settings
from infvit.engine.folder import LOG, check_same_run, own_folder, write_record
from infvit.engine.loggers import build_loggers
from infvit.engine.loop import Run, fit, write_files
from infvit.engine.plan import Plan, dry_run_lines, import_modules, make_plan
from infvit.engine.processes import join_processes
from infvit.engine.setup import build_run, connect
from infvit.engine.signals import Interrupted, stop_request
from infvit.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """What came out of a run: its folder (None after a dry run) and the metrics of its last epoch."""

    folder: Path | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


def train(config: TrainConfig, after_epoch: Sequence[Callable[[Path], None]] = ()) -> Result:
    """Trains, or goes on training, or shows the result of a run that is finished.

    Args:
        config: what to do.
        after_epoch: called with the run folder after each epoch's metrics are written.

    Raises:
        UserError: whatever the user can mend.
        Interrupted: the run was asked to stop, and saved.
    """
    engine = config.engine
    processes = join_processes(engine.device, engine.timeout_minutes)
    plan = None
    with processes.together():
        import_modules(config.imports)
        if processes.first or not config.data.download:
            plan = make_plan(config, processes)
    with processes.together():  # what the first has downloaded is there for the others
        plan = plan or make_plan(config, processes)
    images = (len(plan.data.train), len(plan.data.val))
    processes.require_same(images, f"numbers of training and held-out images at data.root={config.data.root}")
    if config.dry_run:
        if processes.first:
            _announce(plan)
            print("\n".join(dry_run_lines(plan)))
        return Result()
    with ExitStack() as stack:
        with processes.together():
            if processes.first:
                stack.enter_context(own_folder(plan.folder, config.fresh))
                stack.enter_context(_log_file(plan.folder / LOG))
                check_same_run(config, plan.folder)
        _announce(plan)
        stop = stack.enter_context(stop_request(patient=processes.world_size > 1))
        stack.enter_context(backend_settings(config.deterministic, engine.tf32, engine.cudnn_benchmark))
        with processes.together():
            run = build_run(plan, stop, after_epoch)
        connect(run)
        if processes.first:
            write_record(config, plan.folder, plan.device)  # now nothing can keep the run from starting
        if run.finished:
            log.info("This run is finished; fresh=true starts it over.")
            if processes.first:
                write_files(run)
        else:
            with _logger(run):
                fit(run)
        metrics = run.state.history[-1]
        best = "" if run.state.best is None else f" (best {run.state.best:.2f} %)"
        ema = f", EMA {metrics['ema_top1']:.2f} %" if "ema_top1" in metrics else ""
        log.info("Held-out top-1 %.2f %%%s%s on %d images. All of it in %s", metrics["top1"], best, ema,
                 metrics["images"], plan.folder)  # fmt: skip
        return Result(plan.folder, metrics)


def _announce(plan: Plan) -> None:
    for line in plan.headline():
        log.info(line)


@contextmanager
def _logger(run: Run) -> Iterator[None]:
    """Opens the external loggers of a run, and closes them with the exit code of the run."""
    run.logger = build_loggers(run.config, run.folder, run.state) if run.processes.first else None
    if run.logger is None:
        yield
        return
    exit_code = 1
    try:
        yield
        exit_code = 0
    except Interrupted as interrupted:
        exit_code = interrupted.exit_code
        raise
    except KeyboardInterrupt:  # a second Ctrl-C
        exit_code = 130
        raise
    finally:
        run.logger.finish(exit_code)


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """Also writes the log, and the error that ended the run, to a file."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("infvit")
    logger.addHandler(handler)
    try:
        yield
    except BaseException as error:
        known = isinstance(error, UserError)
        trace = None if known else (type(error), error, error.__traceback__)
        handler.handle(logger.makeRecord(logger.name, logging.ERROR, __file__, 0, str(error), (), trace))
        raise
    finally:
        logger.removeHandler(handler)
        handler.close()
