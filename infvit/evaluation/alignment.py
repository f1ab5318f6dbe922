"""`eval=alignment`: the weights of Linear InfSA against the Perron eigenvector (arXiv 2603.00175, Table 2)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from infvit.attention import LinearInfSA
from infvit.config import EvalConfig
from infvit.engine.processes import ALONE, Processes
from infvit.errors import ConfigError
from infvit.evaluation.files import result_path
from infvit.evaluation.rebuild import Rebuilt
from infvit.evaluation.samples import examine
from infvit.evaluation.spectral_figures import draw_alignment
from infvit.evaluation.tables import mean_sd, shown, to_markdown, write_csv
from infvit.metrics.alignment import REASONS, STATISTICS, alignment
from infvit.models.inspect import AttentionCall, attention_calls

IMAGES = 64
PUBLISHED = {"cosine": {"mean": 0.985, "sd": 0.036}, "spearman": {"mean": 0.937, "sd": 0.132}}
"""Of 512 per-head samples of a trained checkpoint."""


def evaluate_alignment(config: EvalConfig, rebuilt: Rebuilt, processes: Processes = ALONE) -> dict[str, Any]:
    """Compares weights and eigenvectors of every layer of Linear InfSA, head and image.

    Returns:
        Mean, standard deviation and count of each statistic over all of them, `layers` and `heads` with those of each,
        how many are excluded by reason, and what all this depends on. Written too: `alignment_*.csv` (a row per layer
        and head), `.md`, and histograms as `.png`.

    Raises:
        ConfigError: the model has no such layer, or its keys are not its queries.
    """
    activations: set[str] = set()

    def look(model: nn.Module, images: Tensor) -> list[dict[str, np.ndarray]]:
        linear = linear_calls(attention_calls(model, images), str(rebuilt.path))
        activations.update(mechanism.activation for _, mechanism in linear)
        parts = []
        for call, mechanism in linear:
            if not torch.equal(call.q.nan_to_num(), call.k.nan_to_num()):  # NaN is told of below
                raise ConfigError(
                    f"eval=alignment measures against phi(Q Q^T), but the keys of {call.name} are not its queries "
                    "(tie_key=false, or a norm of their own)."
                )
            found = alignment(call.q, call.token_map("weights"), mechanism.phi)
            parts.append({**found.values, **found.excluded, "mixed": found.mixed})
        stacked = {name: np.stack([part[name] for part in parts], axis=1) for name in parts[0]}  # (B, L, H)
        return [{name: values[at] for name, values in stacked.items()} for at in range(len(images))]

    samples = examine(config, rebuilt, processes, IMAGES, look)
    values = {name: np.stack([image[name] for image in samples.found]) for name in samples.found[0]}  # (images, L, H)

    def summary(where: Any) -> dict[str, Any]:
        part = {name: array[where].ravel() for name, array in values.items()}
        return {
            "samples": len(part["cosine"]),
            **{name: mean_sd(part[name]) for name in STATISTICS},
            "excluded": {reason: int(part[reason].sum()) for reason in REASONS},
            "mixed_sign": int(part["mixed"].sum()),
        }

    everywhere = slice(None)
    count, heads = values["cosine"].shape[1:]
    result = {
        **summary(everywhere),
        "published": PUBLISHED,
        "activation": ", ".join(sorted(activations)),
        **samples.about,
        "layers": [{"layer": layer, **summary((everywhere, layer))} for layer in range(count)],
        "heads": [
            {"layer": layer, "head": head, **summary((everywhere, layer, head))}
            for layer in range(count) for head in range(heads)
        ],
    }  # fmt: skip
    if processes.first:
        rows = [{"layer": "published", "samples": 512, **{name: _published(name) for name in STATISTICS}}]
        rows += [_row(row["layer"], row) for row in result["layers"]] + [_row("all", result)]
        table = to_markdown([{**dict.fromkeys(rows[-1]), **row} for row in rows])
        print(table)
        path = result_path(config, rebuilt, "alignment", "heads", ".csv")
        write_csv(path, [_flat(row) for row in result["heads"]])
        path.with_suffix(".md").write_text(table + "\n")
        draw_alignment(values, PUBLISHED, path.with_suffix(".png"))
    return result


def linear_calls(calls: Sequence[AttentionCall], model: str) -> list[tuple[AttentionCall, LinearInfSA]]:
    """Returns the calls of Linear InfSA, each with its mechanism.

    Raises:
        ConfigError: there is none.
    """
    linear = [(call, call.mechanism) for call in calls if isinstance(call.mechanism, LinearInfSA)]
    if not linear:
        others = ", ".join(sorted({call.mechanism.name for call in calls}))
        raise ConfigError(f"eval=alignment is about the weights of Linear InfSA; {model} has {others}.")
    return linear


def _published(name: str) -> str:
    return shown(PUBLISHED[name]) if name in PUBLISHED else "-"


def _row(layer: Any, row: dict[str, Any]) -> dict[str, Any]:
    excluded = sum(row["excluded"].values())
    return {
        "layer": layer,
        "samples": row["samples"],
        **{name: shown(row[name]) for name in STATISTICS},
        "excluded": excluded,
    }


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a summary without nesting, as a line of a CSV file."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= {f"{name}_{part}": v for part, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat
