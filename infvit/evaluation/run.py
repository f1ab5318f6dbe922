"""`eval.py`: rebuilds a model and runs the evaluations asked for."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infvit.config import STANDALONE, EvalConfig
from infvit.data.imagenet_sets import NAMES
from infvit.engine.device import select_device, select_precision
from infvit.engine.plan import import_modules
from infvit.engine.processes import Processes, join_processes
from infvit.evaluation.accuracy import accuracy
from infvit.evaluation.alignment import evaluate_alignment
from infvit.evaluation.attention_quality import evaluate_attention_quality
from infvit.evaluation.baseline import open_model
from infvit.evaluation.check import check
from infvit.evaluation.compare import compare
from infvit.evaluation.files import require_writable, result_folder, result_path
from infvit.evaluation.imagenet import open_sets, require_known, score_set, show, write_csv
from infvit.evaluation.maps import evaluate_maps
from infvit.evaluation.markov import evaluate_markov
from infvit.evaluation.matrices import evaluate_health
from infvit.evaluation.oversmoothing import evaluate_oversmoothing
from infvit.evaluation.rebuild import Rebuilt

log = logging.getLogger(__name__)

EVALUATIONS: dict[str, Callable[[EvalConfig, Rebuilt, Processes], dict[str, Any]]] = {
    "accuracy": accuracy,
    "alignment": evaluate_alignment,
    "attention_quality": evaluate_attention_quality,
    "health": evaluate_health,
    "maps": evaluate_maps,
    "markov": evaluate_markov,
    "oversmoothing": evaluate_oversmoothing,
}
"""What can be evaluated besides the sets of ImageNet, which share a table."""


def evaluate(config: EvalConfig) -> dict[str, dict[str, Any]]:
    """Runs each evaluation of the configuration and writes its result as JSON; a table of ImageNet sets as CSV too.

    Returns:
        The results by name of the evaluation, on all processes; the first writes and shows them.

    Raises:
        UserError: whatever the user can mend.
    """
    processes = join_processes(config.device, config.timeout_minutes)
    with processes.together():
        require_known(config.eval, [*EVALUATIONS, *STANDALONE])
        if config.eval[0] in STANDALONE:
            return {"check": check, "compare": compare}[config.eval[0]](config, processes)
        import_modules(config.imports)
        device = select_device(config.device)
        select_precision(config.precision, device)
        rebuilt = open_model(config)
        sets = open_sets(config, rebuilt, [name for name in config.eval if name in NAMES])
        if processes.first:
            require_writable(result_folder(config, rebuilt))
    for note in rebuilt.notes:
        log.info("note  %s", note)
    results = {}
    for name in config.eval:
        if name not in NAMES:
            results[name] = EVALUATIONS[name](config, rebuilt, processes)
            if processes.first:
                print(_lines(results[name]))
                _write(result_path(config, rebuilt, "eval", name, ".json"), results[name])
    rows = [score_set(config, rebuilt, entry, processes) for entry in sets]
    if rows and processes.first:
        print(show(rows))
        path = result_path(config, rebuilt, "table", "imagenet", ".json")
        write_csv(path.with_suffix(".csv"), rows)
        _write(path, rows)
    return results | {row["set"]: row for row in rows}


def _write(path: Path, result: Any) -> None:
    path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    log.info("written to %s", path)


def _lines(result: dict[str, Any]) -> str:
    """Returns a result as lines of name and value; floats are shortened, the JSON file has all digits.

    Values that are tables are left out: who makes them shows them.
    """

    def shown(value: Any) -> str:
        return f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)

    return "\n".join(f"{name:<14} {shown(v)}" for name, v in result.items() if not isinstance(v, dict | list))
