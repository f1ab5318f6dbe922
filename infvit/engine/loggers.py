"""Loggers beside the files of a run: Weights & Biases and TensorBoard. Training never depends on them."""

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import yaml
from PIL import Image

from infvit.config import TrainConfig
from infvit.engine.state import RunState
from infvit.errors import MissingExtraError

log = logging.getLogger(__name__)


class Logger(Protocol):
    """One external logger. It may raise what it likes: `Loggers` catches it."""

    name: str

    def row(self, row: dict[str, float], figures: dict[str, Image.Image]) -> None:
        """Logs the metrics of one epoch, `row["epoch"]`, and the figures that are new with it."""

    def finish(self, exit_code: int) -> None:
        """Closes the logger of a run that ends with this exit code."""


class WandbLogger:
    """A Weights & Biases run with an id of ours, so that a resumed run is the same one.

    Args:
        config: the configuration of the run, which W&B gets whole.
        folder: the run folder; W&B writes to `wandb` in it.
        run_id: the id.

    Raises:
        MissingExtraError: wandb is not installed.
        RuntimeError: W&B did not even start offline.
    """

    name = "W&B"

    def __init__(self, config: TrainConfig, folder: Path, run_id: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("logger=wandb", "wandb") from error
        self._image = wandb.Image
        modes: Any = (config.logger.wandb_mode, "offline")
        for mode in dict.fromkeys(modes):
            try:
                if mode == "online" and not wandb.login(prompt=False, verify=False):
                    raise RuntimeError("no API key")
                self._run = wandb.init(
                    project=config.logger.project,
                    entity=config.logger.entity,
                    name=config.logger.run_name or folder.name,
                    tags=config.logger.tags,
                    config=asdict(config),
                    dir=str(folder.absolute()),  # the process that writes may work in another directory
                    id=run_id,
                    resume="allow" if mode == "online" else None,
                    mode=mode,
                    reinit="finish_previous",
                    # Without `finish_timeout` a network that went away while training would keep the process for ever.
                    settings=wandb.Settings(init_timeout=30, finish_timeout=300, silent=True),
                )
                self._run.define_metric("*", step_metric="epoch")
                return
            except Exception as error:  # W&B raises errors of many kinds
                reason = f"{mode} mode failed ({' '.join(str(error).split())[:200]})"
                if mode == "offline":
                    raise RuntimeError(reason) from error
                log.warning("W&B: %s; logging offline, upload later with: wandb sync %s", reason, folder / "wandb")
                wandb.teardown()  # its service still holds the id of the failed start

    def row(self, row: dict[str, float], figures: dict[str, Image.Image]) -> None:
        """Logs an epoch as one step."""
        images = {name: self._image(figure) for name, figure in figures.items()}
        # Steps only ever rise: with the epoch as the step, the server drops an epoch that comes a second time. `commit`
        # writes it now and not with the next epoch, before which the process may be killed.
        self._run.log({**images, **row}, step=int(row["epoch"]), commit=True)

    def finish(self, exit_code: int) -> None:
        """Closes the W&B run; uploads for 300 seconds at most what is not there yet."""
        self._run.finish(exit_code=exit_code)


class TensorboardLogger:
    """TensorBoard event files in `tensorboard` in the run folder, the epoch as their step.

    Args:
        config: the configuration of the run, shown as text.
        folder: the run folder.
        epochs: how many are done. What a killed process logged beyond them is hidden, since those epochs come again.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    name = "TensorBoard"

    def __init__(self, config: TrainConfig, folder: Path, epochs: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("logger=tensorboard", "tensorboard") from error
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=epochs + 1)
        text = yaml.safe_dump(asdict(config), sort_keys=False)
        self._writer.add_text("config", f"```yaml\n{text}```", epochs + 1)

    def row(self, row: dict[str, float], figures: dict[str, Image.Image]) -> None:
        """Logs an epoch and writes it to the disk."""
        epoch = int(row["epoch"])
        for name, value in row.items():
            self._writer.add_scalar(name, value, epoch)
        for name, figure in figures.items():
            self._writer.add_image(name, np.asarray(figure), epoch, dataformats="HWC")
        self._writer.flush()

    def finish(self, exit_code: int) -> None:
        """Closes the event file, which has no place for an exit code."""
        self._writer.close()


class Loggers:
    """The external loggers of a run. What fails in one of them is a warning, and it gets no more epochs.

    Args:
        loggers: the loggers; at least one.
        folder: the run folder, whose PNG files are the figures.
    """

    def __init__(self, loggers: Sequence[Logger], folder: Path) -> None:
        self._all, self._listening, self._folder = loggers, list(loggers), folder
        self._drawn: dict[Path, int] = {}

    def row(self, row: dict[str, Any]) -> None:
        """Logs the metrics of one epoch (lists as one number per layer) and the figures drawn since the last call."""
        numbers: dict[str, float] = {}
        for name, value in row.items():
            values = {f"{name}/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {name: value}
            numbers |= {name: v for name, v in values.items() if isinstance(v, int | float)}
        figures = self._new_figures()
        for logger in list(self._listening):
            try:
                logger.row(numbers, figures)
            except Exception as error:  # of whatever kind, it must not stop the run
                log.warning("%s: %s. Logging to it stops, training goes on.", logger.name, error)
                self._listening.remove(logger)

    def finish(self, exit_code: int) -> None:
        """Closes all loggers, also those that failed before.

        Args:
            exit_code: that of the run: 0 done, 1 failed, 128 + signal when it was stopped.
        """
        for logger in self._all:
            try:
                logger.finish(exit_code)
            except Exception as error:  # as above
                log.warning("%s: %s.", logger.name, error)

    def _new_figures(self) -> dict[str, Image.Image]:
        """Reads the PNG files that are new or drawn anew since the last call.

        With the epoch rather than once at the end: a killed run has its figures too, and the loggers show how a figure
        changed. It is cheap, since whoever draws a figure decides how often it is logged.
        """
        figures = {}
        for path in sorted(self._folder.glob("*.png")):
            try:
                if self._drawn.get(path) == (drawn := path.stat().st_mtime_ns):
                    continue
                self._drawn[path] = drawn
                with Image.open(path) as image:
                    figures[path.stem] = image.convert("RGB")
            except (OSError, SyntaxError) as error:  # another command is just writing it, say
                log.warning("%s cannot be read and is not logged: %s.", path, error)
        return figures


def build_loggers(config: TrainConfig, folder: Path, state: RunState) -> Loggers | None:
    """Opens the external loggers that are asked for; one that is not installed, or fails, is one warning.

    Of several processes only the first may call this.

    Args:
        config: the configuration of the run.
        folder: the run folder.
        state: the state of the run. It keeps the id of the run at W&B, and gets a new one if it has none.

    Returns:
        The loggers, or None if there are none.
    """
    openers: dict[str, Callable[[], Logger]] = {}
    if config.logger.wandb:
        state.logger_id = run_id = state.logger_id or secrets.token_hex(4)
        openers[WandbLogger.name] = lambda: WandbLogger(config, folder, run_id)
    if config.logger.tensorboard:
        openers[TensorboardLogger.name] = lambda: TensorboardLogger(config, folder, len(state.history))
    loggers = []
    for name, opener in openers.items():
        try:
            loggers.append(opener())
        except Exception as error:  # as above
            log.warning("%s: %s. Training goes on without it.", name, error)
    return Loggers(loggers, folder) if loggers else None
