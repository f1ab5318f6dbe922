"""The metrics of a run as files, which are the record of truth, and Weights & Biases beside them."""

import csv
import io
import json
import logging
import math
import os
import secrets
from pathlib import Path
from typing import Any

from infvit.config import LoggerConfig
from infvit.errors import MissingExtraError

log = logging.getLogger(__name__)


def write_history(history: list[dict[str, Any]], folder: Path) -> None:
    """Writes `metrics.jsonl` and `summary.csv` from the history, whole, so that a resumed run has each epoch once.

    Numbers that are not finite become null: bare NaN is not JSON.
    """
    rows = [{name: _plain(value) for name, value in row.items()} for row in history]
    replace_text(folder / "metrics.jsonl", "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = io.StringIO()
    writer = csv.DictWriter(table, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    replace_text(folder / "summary.csv", table.getvalue())


def replace_text(path: Path, text: str) -> None:
    """Writes a small file so that a reader finds the old content or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> Any:
    """Lists (one value per layer) become one cell; None becomes an empty one."""
    if not isinstance(value, list):
        return value
    return " ".join("nan" if v is None else f"{v:.6g}" for v in value)


class WandbLogger:
    """Weights & Biases. Whatever fails here is one warning; the run goes on.

    Raises:
        MissingExtraError: wandb is not installed.
    """

    def __init__(self, config: LoggerConfig, folder: Path, run_config: dict[str, Any], run_id: str | None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("logger=wandb", "wandb") from error
        self._wandb = wandb
        self._run: Any = None
        self.id = run_id or secrets.token_hex(4)
        modes: Any = (config.wandb_mode, "offline")
        for attempt in dict.fromkeys(modes):
            try:
                if attempt == "online" and not wandb.login(prompt=False, verify=False):
                    raise RuntimeError("no API key")
                self._run = wandb.init(
                    project=config.project,
                    entity=config.entity,
                    name=config.run_name or folder.name,
                    tags=config.tags,
                    config=run_config,
                    dir=str(folder),
                    id=self.id,
                    resume="allow" if attempt == "online" else None,
                    mode=attempt,
                    reinit="finish_previous",
                    settings=wandb.Settings(init_timeout=30, silent=True),
                )
                self._run.define_metric("*", step_metric="epoch")
                return
            except Exception as error:  # W&B must never stop a run, and raises errors of many kinds
                offline = f"logging offline, upload later with: wandb sync {folder / 'wandb'}/offline-run-*"
                then = "training goes on without it" if attempt == "offline" else offline
                log.warning("W&B: %s mode failed (%s); %s.", attempt, " ".join(str(error).split())[:200], then)

    def row(self, row: dict[str, Any]) -> None:
        """Logs the metrics of one epoch."""
        if self._run is None:
            return
        flat = {k: v for k, v in row.items() if not isinstance(v, list)}
        flat |= {f"{k}/{i}": v for k, values in row.items() if isinstance(values, list) for i, v in enumerate(values)}
        try:
            self._run.log(flat)
        except Exception as error:  # as above
            log.warning("W&B: %s. Logging to it stops, training goes on.", error)
            self._run = None

    def finish(self, exit_code: int) -> None:
        """Closes the W&B run."""
        if self._run is not None:
            try:
                self._run.finish(exit_code=exit_code)
            except Exception as error:  # as above
                log.warning("W&B: %s.", error)
            self._run = None


def build_logger(
    config: LoggerConfig, folder: Path, run_config: dict[str, Any], run_id: str | None
) -> WandbLogger | None:
    """Builds the external logger of a run, if one is asked for and installed."""
    if not config.wandb:
        return None
    try:
        return WandbLogger(config, folder, run_config, run_id)
    except MissingExtraError as error:
        log.warning("%s. Training goes on without it.", error)
        return None
