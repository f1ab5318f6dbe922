"""One training run from configuration to result."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infvit.config import TrainConfig
from infvit.engine.device import backend_settings
from infvit.engine.folder import check_same_run, own_folder, write_record
from infvit.engine.loop import Run, fit, write_files
from infvit.engine.plan import Plan, dry_run_lines, import_modules, make_plan
from infvit.engine.record import build_logger
from infvit.engine.setup import build_run
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
    import_modules(config.imports)
    plan = make_plan(config)
    if config.dry_run:
        _announce(plan)
        print("\n".join(dry_run_lines(plan)))
        return Result()
    engine = config.engine
    with own_folder(plan.folder, config.fresh) as folder, _log_file(folder / "train.log"):
        check_same_run(config, folder)
        _announce(plan)
        with stop_request() as stop, backend_settings(config.deterministic, engine.tf32, engine.cudnn_benchmark):
            run = build_run(plan, stop, after_epoch)
            write_record(config, folder, plan.device)  # now nothing can keep the run from starting
            if run.finished:
                log.info("This run is finished; fresh=true starts it over.")
                write_files(run)
            else:
                with _logger(run):
                    fit(run)
        metrics = run.state.history[-1]
        best = "" if run.state.best is None else f" (best {run.state.best:.2f} %)"
        ema = f", EMA {metrics['ema_top1']:.2f} %" if "ema_top1" in metrics else ""
        log.info("Held-out top-1 %.2f %%%s%s on %d images. All of it in %s", metrics["top1"], best, ema,
                 metrics["images"], folder)  # fmt: skip
        return Result(folder, metrics)


def _announce(plan: Plan) -> None:
    for line in plan.headline():
        log.info(line)


@contextmanager
def _logger(run: Run) -> Iterator[None]:
    """Opens the external logger of a run, and closes it with the exit code of the run."""
    run.logger = build_logger(run.config.logger, run.folder, asdict(run.config), run.state.logger_id)
    if run.logger is None:
        yield
        return
    run.state.logger_id = run.logger.id
    exit_code = 1
    try:
        yield
        exit_code = 0
    except Interrupted as interrupted:
        exit_code = interrupted.exit_code
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
