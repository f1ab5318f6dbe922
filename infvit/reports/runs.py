"""What the files of a run folder say, also while it runs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infvit.engine.folder import STATUS, read_config
from infvit.engine.record import METRICS, read_history
from infvit.engine.status import SWEEP, Status, read_jobs, read_status
from infvit.errors import UserError
from infvit.evaluation.efficiency import RESULT as EFFICIENCY

QUALITY = {"morf": "morf_aoc", "lerf": "lerf_auc", "roc": "roc_auc", "pr": "pr_auc"}
"""Measures of attention quality as tables call them, and as `eval=attention_quality` writes them."""
QUALITY_FILES = "eval_attention_quality_"
"""How the names of its results begin."""
LATENCY = {"train_ms": "training", "infer_ms": "inference"}
"""Latencies as tables call them, and the modes of `eval=efficiency`."""
LATENCY_FOLDER = "efficiency"
"""Where in the folder of a sweep the result of `eval=efficiency` on its runs is looked for."""


@dataclass(frozen=True)
class RunView:
    """A run as its files show it.

    Attributes:
        folder: where it is, or will be.
        overrides: of a job of a sweep.
        status: of a job of a sweep that has begun.
        config: the resolved configuration; empty if the run was never started.
        rows: the metrics of its epochs.
        quality: what `eval=attention_quality` found, if it was run.
        latency: milliseconds by mode and where they were measured, of `eval=efficiency` on the runs of its sweep.
        damage: what is wrong with its files, if something is.
    """

    folder: Path
    overrides: tuple[str, ...] = ()
    status: Status | None = None
    config: dict[str, Any] = field(default_factory=dict)
    rows: tuple[dict[str, Any], ...] = ()
    quality: dict[str, Any] = field(default_factory=dict)
    latency: dict[str, Any] = field(default_factory=dict)
    damage: str = ""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def state(self) -> str:
        """`running`, `done`, `failed`, `preempted`; `missing` if it never began; of a single run `done` or `stopped`;
        `damaged` if its files do not say.

        A single run has no status, and one that runs looks like one that was stopped.
        """
        if self.damage:
            return "damaged"
        if self.status is not None:
            return self.status.state
        if not self.config:
            return "missing"
        updates = self.config.get("max_steps")
        over = self.rows and (self.epochs == self.config["epochs"] or self.rows[-1].get("update") == updates)
        return "done" if over else "stopped"

    @property
    def epochs(self) -> int:
        """How many are done."""
        return int(self.rows[-1]["epoch"]) if self.rows else 0

    @property
    def error(self) -> str:
        """The line that ended it, if one did."""
        return self.damage or (self.status and self.status.error) or ""

    @property
    def seed(self) -> int:
        """The seed of the run."""
        typed = [override.partition("=")[2] for override in self.overrides if override.startswith("seed=")]
        return int(self.config.get("seed", typed[-1] if typed else 0))

    def series(self, name: str) -> list[tuple[int, float]]:
        """Returns a metric as (epoch, value), without epochs that lack it."""
        return [(row["epoch"], row[name]) for row in self.rows if isinstance(row.get(name), int | float)]

    def last(self, name: str) -> float | None:
        """Returns the newest value of a metric, of an epoch or of the attention."""
        if metric := QUALITY.get(name):
            return self.quality.get(metric)
        if mode := LATENCY.get(name):
            return self.latency.get(mode)
        series = self.series(name)
        return series[-1][1] if series else None


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run, or of a job of a sweep."""
    return (folder / "config.yaml").is_file() or read_status(folder) is not None


def read_run(folder: Path, overrides: Sequence[str] | None = None) -> RunView:
    """Reads what there is of a run.

    Args:
        folder: its folder, which need not exist.
        overrides: what a sweep planned for it; by default those in its status.
    """
    status = read_status(folder)
    known = overrides if overrides is not None else status.overrides if status else ()
    try:
        if status is None and (folder / STATUS).exists():
            raise UserError(f"{folder / STATUS} is damaged; start the command again, which writes it anew.")
        config, rows = read_config(folder), tuple(read_history(folder))
        quality, latency = read_quality(folder), read_latency(folder)
        if status is not None and status.state == "done" and not rows:
            raise UserError(f"{folder} is done, but {METRICS} is gone; start the command again, which writes it anew.")
    except UserError as error:
        return RunView(folder, tuple(known), status, damage=str(error))
    return RunView(folder, tuple(known), status, config, rows, quality, latency)


def read_latency(folder: Path) -> dict[str, Any]:
    """Reads how long the model of a run takes, at the smallest size and batch of `SWEEP/efficiency`.

    Returns:
        Milliseconds by mode, and `where`: what they were measured on. Empty if they were not.

    Raises:
        UserError: the file is damaged.
    """
    path = folder.parent / LATENCY_FOLDER / EFFICIENCY
    if not path.is_file():
        return {}
    try:
        result = json.loads(path.read_text())
        rows = [row for row in result["rows"] if row["scope"] == "model" and row["latency"]]
        mine = [row for row in rows if Path(row["model"]).name == folder.name]
        smallest = min(((row["resolution"], row["batch"]) for row in mine), default=None)
        found = {r["mode"]: r["latency"]["median_ms"] for r in mine if (r["resolution"], r["batch"]) == smallest}
        machine = result["machine"].get("gpu") or result["machine"]["cpu"]
        where = f"{machine}, {result['settings']['precision']}, " + "{} px, batch {}".format(*smallest or ("", ""))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is damaged; remove it, and measure again.") from error
    return {**found, "where": where} if found else {}


def read_quality(folder: Path) -> dict[str, Any]:
    """Reads what `eval=attention_quality` left in a folder: of several results the newest, of raw weights if possible.

    Returns:
        The result; empty if there is none.

    Raises:
        UserError: one of them is damaged, or they are of several models.
    """
    found = []
    for path in folder.glob(f"{QUALITY_FILES}*.json"):
        try:
            found.append((path.stat().st_mtime, dict(json.loads(path.read_text()))))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged; remove it, and evaluate again.") from error
    files = {str(content.get("checkpoint", "")) for _, content in found}
    models = sorted({file if file.startswith("timm/") else str(Path(file).parent) for file in files})
    if len(models) > 1 and not is_run(folder):
        raise UserError(
            f"{folder} holds results of several models ({', '.join(models)}); give each an `output` of its own."
        )
    return max(found, key=lambda entry: (entry[1].get("weights") == "raw", entry[0]))[1] if found else {}


def find_runs(*roots: Path) -> list[RunView]:
    """Returns every run at and below some folders, with the planned jobs of sweeps that have not begun.

    What `fresh=true` moved aside is left out.

    Raises:
        UserError: a folder does not exist, or there is no run in any.
    """
    found: dict[Path, RunView] = {}
    for root in roots:
        if not root.is_dir():
            raise UserError(f"there is no folder {root}; name a run, a sweep, or a folder of them, e.g. runs.")
        planned: dict[Path, list[str]] = {}
        for file in sorted(root.rglob(SWEEP)):
            planned |= read_jobs(file.parent)
        folders = {path.parent for name in ("config.yaml", "status.json") for path in root.rglob(name)}
        runs = {path for path in folders if is_run(path) and not _hidden(path.relative_to(root))}
        for folder in sorted(runs | planned.keys()):
            found[folder.resolve()] = read_run(folder, planned.get(folder))
    if not found:
        raise UserError(f"there is no run in {', '.join(map(str, roots))}: none has a config.yaml or status.json.")
    return list(found.values())


def _hidden(path: Path) -> bool:
    """Whether a run lies in a folder of another purpose: W&B's, or one that was moved aside."""
    return any(part == "wandb" or part.startswith(".") or ".old-" in part for part in path.parts)
