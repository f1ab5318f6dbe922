"""From a configuration to `efficiency.json`: which cells, in which order, and what of them may be compared."""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from infvit.config import EvalConfig
from infvit.engine.device import select_device, select_precision
from infvit.engine.plan import import_modules
from infvit.engine.processes import ALONE, Processes
from infvit.engine.record import replace_text
from infvit.errors import ConfigError, UserError
from infvit.evaluation.efficiency.cells import Cell, Settings, Task
from infvit.evaluation.efficiency.check import NO_REFERENCE, RIGHT, WRONG
from infvit.evaluation.efficiency.cost import complexity, cost
from infvit.evaluation.efficiency.machine import describe
from infvit.evaluation.efficiency.search import highest
from infvit.evaluation.efficiency.subject import blueprint, runs_in
from infvit.evaluation.efficiency.worker import Runner, in_a_process
from infvit.metrics.memory import available_memory
from infvit.models.build import patch_size

RESULT = "efficiency.json"
FORMAT = 1
Report = Callable[[Path], str]

log = logging.getLogger(__name__)


def efficiency(
    config: EvalConfig, processes: Processes = ALONE, report: Report | None = None, runner: Runner | None = None
) -> dict[str, Any]:
    """Measures every model in every mode and size, and writes `efficiency.json` after each group of cells.

    Args:
        config: what to measure.
        processes: must be one: several would disturb each other.
        report: makes tables and figures of the folder and returns what to show.
        runner: does a task; by default a fresh process.

    Returns:
        What the file holds.

    Raises:
        ConfigError: a model or size that cannot be; found before anything is measured.
        UserError: a mechanism's result is wrong; raised at the end, when all is written.
    """
    if processes.world_size > 1:
        raise ConfigError("eval=efficiency measures in one process; start it without torchrun.")
    import_modules(config.imports)
    asked = config.efficiency
    device = select_device(config.device)
    settings = _settings(config, device.type)
    runner = runner or partial(in_a_process, minutes=asked.worker_minutes)
    groups = list(product(asked.scopes, asked.modes, config.resolutions, asked.batch_sizes))
    models = [run for model in config.models for run in runs_in(model)]
    searches = [] if asked.highest is None else list(product(asked.modes, asked.batch_sizes, models))
    if unknown := [name for name in asked.baselines if name not in models]:
        raise ConfigError(f"efficiency.baselines: {unknown[0]} is not among models={models}.")
    patches = {model: patch_size(blueprint(model).config) for model in models}
    # All of them before the first is measured: a mistake in the last would cost hours.
    form = config.reparameterize
    costs = {
        (scope, mode, size, model): cost(Cell(model, mode, size, 1, scope, form))
        for scope, mode, size, model in product(asked.scopes, asked.modes, config.resolutions, models)
    }
    growth = {model: complexity(model, patches[model]) for model in models}
    folder = Path(config.output or "runs/efficiency")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output={folder} cannot be written: {error.strerror}.") from error
    result: dict[str, Any] = {
        "format": FORMAT,
        "machine": describe(device, asked.threads),
        "settings": {**asdict(asked), "precision": str(select_precision(config.precision, device)).split(".")[1],
                     "baselines": asked.baselines or models[:1], "memory_limit": settings.memory_limit,
                     "reparameterize": form},
        "complexity": growth,
        "to_do": len(groups) * len(models) + len(searches),  # what a report says while it is not 0
        "rows": [],
        "highest": [],
    }  # fmt: skip

    def save() -> None:
        replace_text(folder / RESULT, json.dumps(result, indent=1, allow_nan=False) + "\n")
        log.info("  in %s now; %d cells and searches to do", folder / RESULT, result["to_do"])

    for number, (scope, mode, size, batch) in enumerate(groups, 1):
        log.info("group %d of %d: %s, %s, %d px, batch %d", number, len(groups), scope, mode, size, batch)
        cells = [Cell(model, mode, size, batch, scope, form) for model in models]
        rows = _measure(cells, settings, runner)
        for cell, row in zip(cells, rows, strict=True):
            known = costs[scope, mode, size, cell.model]
            watts = asked.training_watts if mode == "training" else asked.inference_watts
            result["rows"].append(_row(cell, known, row, watts))
        _compare(result["rows"][-len(cells) :], result["settings"]["baselines"])
        result["to_do"] -= len(cells)
        save()
    for mode, batch, model in searches:
        result["highest"].append(_highest(config, settings, runner, model, mode, batch, patches[model]))
        result["to_do"] -= 1
        save()
    if report is not None:
        print(report(folder))
    log.info("written to %s", folder / RESULT)
    wrong = sorted({row["model"] for row in result["rows"] if row["check"]["state"] == WRONG})
    if wrong:
        raise UserError(f"wrong result against the reference: {', '.join(wrong)}; see check in {folder / RESULT}.")
    return result


def _settings(config: EvalConfig, device: str) -> Settings:
    asked = config.efficiency
    limit = None if asked.memory_limit_gib is None else asked.memory_limit_gib * 2**30
    if limit is None and device == "cpu" and (available := available_memory()) is not None:
        limit = 0.9 * available  # beyond it the machine would swap, or kill
    names = ("rounds", "warmup", "seconds", "energy_seconds", "compile", "threads")
    options = {name: getattr(asked, name) for name in names}
    return Settings(device, config.precision, memory_limit=limit, imports=config.imports, **options)


def _measure(cells: list[Cell], settings: Settings, runner: Runner) -> list[dict[str, Any]]:
    """Measures cells that differ in the model only: memory each alone, latency of those that fit, then the check."""
    rows: list[dict[str, Any]] = []
    for cell in cells:
        found = runner(Task("memory", [cell], settings))
        log.info(
            "  %s: %s",
            cell.model,
            found.get("failed") or f"{found['mib']:.1f} MiB" if found.get("mib") else "memory unknown",
        )
        rows.append({"memory": found})
    fitting = [(cell, row) for cell, row in zip(cells, rows, strict=True) if "failed" not in row["memory"]]
    if fitting:
        found = runner(Task("latency", [cell for cell, _ in fitting], settings))
        for i, (_, row) in enumerate(fitting):
            row["latency"] = {"failed": f"{found['failed']} with all models in one process"} if "failed" in found else (
                found["cells"][i]
            )  # fmt: skip
        checks = runner(Task("check", [replace(cell, batch=1) for cell, _ in fitting], settings))
        for i, (_, row) in enumerate(fitting):
            row["check"] = (
                {"state": "unchecked", "reason": checks["failed"]} if "failed" in checks else checks["cells"][i]
            )
    return rows


def _row(cell: Cell, known: dict[str, Any], found: dict[str, Any], watts: float) -> dict[str, Any]:
    """Returns one row of the result; what could not be measured is null, with the reason beside it."""
    memory, timed = found["memory"], found.get("latency", {})
    latency = timed.get("latency")
    reason = "efficiency.energy_seconds=0" if latency else None
    energy: dict[str, Any] = timed.get("energy") or {"joules": None, "source": "unavailable", "reason": reason}
    median = latency["median_ms"] if latency else None
    return {
        **asdict(cell),
        **known,
        "latency": latency,
        "images_per_s": None if median is None else 1e3 * cell.batch / median,
        "memory_mib": memory.get("mib"),
        "memory_start_mib": memory.get("start_mib"),
        "memory_method": memory.get("method"),
        "energy_j": None if energy["joules"] is None else energy["joules"] / cell.batch,
        "energy_source": energy["source"],
        "energy_reason": energy["reason"],
        "papers_convention_j": None if median is None else median / 1e3 * watts / cell.batch,
        "check": _verdict(found.get("check"), timed.get("compiled")),
        "failed": memory.get("failed") or timed.get("failed"),
        "detail": memory.get("detail"),
    }


def _verdict(check: dict[str, Any] | None, compiled: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the check of a cell; that of the compiled model's output, if it is wrong."""
    if compiled is not None and compiled["state"] == WRONG:
        return {**compiled, "reason": "the compiled model differs from the plain one"}
    return check or {"state": "unchecked", "reason": "not measured"}


def _compare(rows: list[dict[str, Any]], baselines: list[str]) -> None:
    """Adds to the rows of one group how many times the images per second of each baseline they reach.

    A ratio is refused, with a word in its place, where one of the two is missing, wrong or unchecked.
    """
    by_model = {row["model"]: row for row in rows}
    for row in rows:
        row["speedup"] = {name: _ratio(row, by_model[name]) for name in baselines}


def _ratio(row: dict[str, Any], base: dict[str, Any]) -> float | str:
    for one in (row, base):
        if one["failed"]:
            return str(one["failed"]) if one is row else f"{one['model']}: {one['failed']}"
        state = one["check"]["state"]
        if state not in (RIGHT, NO_REFERENCE):
            return ("wrong result" if state == WRONG else state) + ("" if one is row else f": {one['model']}")
    return float(row["images_per_s"] / base["images_per_s"])


def _highest(
    config: EvalConfig, settings: Settings, runner: Runner, model: str, mode: str, batch: int, patch: int | None
) -> dict[str, Any]:
    asked = config.efficiency
    assert asked.highest is not None

    def fits(size: int) -> str | None:
        found = runner(Task("memory", [Cell(model, mode, size, batch, reparameterize=config.reparameterize)], settings))
        log.info("  %s, %s, %d px: %s", model, mode, size, found.get("failed") or "fits")
        return found.get("failed")

    found = highest(fits, min(config.resolutions), asked.highest, asked.highest_step, patch or 1)
    return {"model": model, "mode": mode, "batch": batch, **found}
