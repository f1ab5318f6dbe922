"""`eval.py`: rebuilds a model and runs the evaluations asked for."""

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infvit.config import EvalConfig
from infvit.engine.device import select_device, select_precision
from infvit.engine.plan import import_modules
from infvit.engine.processes import Processes, join_processes
from infvit.errors import ConfigError, did_you_mean
from infvit.evaluation.accuracy import accuracy
from infvit.evaluation.rebuild import Rebuilt, rebuild

log = logging.getLogger(__name__)

EVALUATIONS: dict[str, Callable[[EvalConfig, Rebuilt, Processes], dict[str, Any]]] = {"accuracy": accuracy}


def evaluate(config: EvalConfig) -> dict[str, dict[str, Any]]:
    """Runs each evaluation of the configuration and writes its result as JSON.

    Returns:
        The results by name of the evaluation, on all processes; the first writes and shows them.

    Raises:
        UserError: whatever the user can mend.
    """
    processes = join_processes(config.device, config.timeout_minutes)
    with processes.together():
        import_modules(config.imports)
        for name in config.eval:
            if name not in EVALUATIONS:
                raise ConfigError(f"unknown eval={name}. {did_you_mean(name, EVALUATIONS)}")
        device = select_device(config.device)
        select_precision(config.precision, device)
        rebuilt = rebuild(str(config.checkpoint), config.weights, config.data)
        folder = Path(config.output) if config.output else rebuilt.path.parent
        if processes.first:
            _require_writable(folder)
    for note in rebuilt.notes:
        log.info("note  %s", note)
    results = {}
    for name in config.eval:
        results[name] = EVALUATIONS[name](config, rebuilt, processes)
        if not processes.first:
            continue
        path = folder / f"eval_{name}_{config.weights}_{rebuilt.img_size}px_{_digest(config, rebuilt)}.json"
        path.write_text(json.dumps(results[name], indent=2, allow_nan=False) + "\n")
        print(_table(results[name]))
        log.info("written to %s", path)
    return results


def _require_writable(folder: Path) -> None:
    """Makes the folder of the results, before anything is computed.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"results cannot be written to {folder}: {error.strerror}. Choose output=...") from error


def _digest(config: EvalConfig, rebuilt: Rebuilt) -> str:
    """Returns a short hash of what the result depends on, so that another evaluation gets another file."""
    depends = {**asdict(rebuilt.data), "precision": config.precision, "checkpoint": rebuilt.path.name}
    depends |= {"crop_pct": config.crop_pct, "interpolation": config.interpolation}
    depends.pop("num_workers")
    return hashlib.sha1(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:6]


def _table(result: dict[str, Any]) -> str:
    """Returns a result as lines of name and value; floats are shortened, the JSON file has all digits."""

    def shown(value: Any) -> str:
        return f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)

    return "\n".join(f"{name:<14} {shown(value)}" for name, value in result.items())
