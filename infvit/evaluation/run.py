"""`eval.py`: rebuilds a model and runs the evaluations asked for."""

import json
import logging
from collections.abc import Callable
from functools import partial
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
from infvit.evaluation.efficiency import efficiency
from infvit.evaluation.files import require_writable, result_folder, result_path
from infvit.evaluation.imagenet import open_sets, require_known, score_set, show
from infvit.evaluation.maps import evaluate_maps
from infvit.evaluation.markov import evaluate_markov
from infvit.evaluation.matrices import evaluate_health
from infvit.evaluation.oversmoothing import evaluate_oversmoothing
from infvit.evaluation.possible import require_possible
from infvit.evaluation.rebuild import Rebuilt, use_inference_form
from infvit.evaluation.tables import write_csv

log = logging.getLogger(__name__)

Evaluation = Callable[[EvalConfig, Rebuilt, Processes], dict[str, Any]]
ANALYSES: dict[str, Evaluation] = {
    "alignment": evaluate_alignment,
    "attention_quality": evaluate_attention_quality,
    "health": evaluate_health,
    "maps": evaluate_maps,
    "markov": evaluate_markov,
    "oversmoothing": evaluate_oversmoothing,
}
"""What looks into the model, which is as it was trained."""
EVALUATIONS: dict[str, Evaluation] = {**ANALYSES, "accuracy": accuracy}
"""What can be evaluated besides the sets of ImageNet, which share a table. Like these, what is no analysis scores the
model's form for inference."""


def evaluate(config: EvalConfig, report: Callable[[Path], str] | None = None) -> dict[str, dict[str, Any]]:
    """Runs each evaluation of the configuration and writes its result as JSON; a table of ImageNet sets as CSV too.

    Args:
        config: what to evaluate.
        report: makes tables and figures of the folder of `eval=efficiency`, and returns what to show of them.

    Returns:
        The results by name of the evaluation, on all processes; the first writes and shows them.

    Raises:
        UserError: whatever the user can mend.
    """
    processes = join_processes(config.device, config.timeout_minutes)
    with processes.together():
        require_known(config.eval, [*EVALUATIONS, *STANDALONE])
        if config.eval[0] in STANDALONE:
            alone: dict[str, Callable[[EvalConfig, Processes], dict[str, Any]]] = {
                "check": check, "compare": compare, "efficiency": partial(efficiency, report=report)
            }  # fmt: skip
            return alone[config.eval[0]](config, processes)
        import_modules(config.imports)
        device = select_device(config.device)
        select_precision(config.precision, device)
        rebuilt = open_model(config)
        sets = open_sets(config, rebuilt, [name for name in config.eval if name in NAMES])
        if processes.first:
            require_writable(result_folder(config, rebuilt))
        require_possible(config, rebuilt, config.eval)
    results = {name: _run(name, config, rebuilt, processes) for name in config.eval if name in ANALYSES}
    if config.reparameterize and len(results) < len(config.eval):
        use_inference_form(rebuilt)
    for note in rebuilt.notes:
        log.info("note  %s", note)
    scores = [name for name in config.eval if name in EVALUATIONS and name not in ANALYSES]
    results |= {name: _run(name, config, rebuilt, processes) for name in scores}
    rows = [score_set(config, rebuilt, entry, processes) for entry in sets]
    if rows and processes.first:
        print(show(rows))
        path = result_path(config, rebuilt, "table", "imagenet", ".json")
        write_csv(path.with_suffix(".csv"), rows)
        _write(path, rows)
    return results | {row["set"]: row for row in rows}


def _run(name: str, config: EvalConfig, rebuilt: Rebuilt, processes: Processes) -> dict[str, Any]:
    result = EVALUATIONS[name](config, rebuilt, processes)
    if processes.first:
        print(_lines(result))
        _write(result_path(config, rebuilt, "eval", name, ".json"), result)
    return result


def _write(path: Path, result: Any) -> None:
    path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    log.info("written to %s", path)


def _lines(result: dict[str, Any]) -> str:
    """Returns a result as lines of name and value; floats are shortened, the JSON file has all digits.

    Values that are tables are left out: who makes them shows them.
    """

    def shown(value: Any) -> str:
        return f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)

    lines = {name: shown(value) for name, value in result.items() if not isinstance(value, dict | list)}
    width = max(map(len, lines), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())
