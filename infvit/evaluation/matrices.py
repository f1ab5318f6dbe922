"""The mixing matrices of a model, image by image, and `eval=health`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from infvit.config import EvalConfig
from infvit.engine.processes import ALONE, Processes
from infvit.errors import DataError
from infvit.evaluation.files import result_path
from infvit.evaluation.rebuild import Rebuilt
from infvit.evaluation.samples import examine
from infvit.evaluation.tables import to_markdown, write_csv
from infvit.metrics.health import head_health
from infvit.models.inspect import AttentionCall, attention_calls

IMAGES = 16


def image_matrices(call: AttentionCall) -> Iterator[Tensor]:
    """Yields the mixing matrices of each image, (H, N, N), gamma included, in double precision on the CPU.

    One image at a time: those of a whole batch may take gigabytes.

    Raises:
        ConfigError: the mechanism has no such matrix.
        DataError: a matrix is not finite.
    """
    batch = len(call.q)
    for at in range(batch):
        one = slice(at, at + 1)
        bias, pairs = (
            x[one] if x is not None and x.ndim == 4 and len(x) == batch else x
            for x in (call.mask.bias, call.mask.pairs)
        )
        mask = replace(call.mask, bias=bias, pairs=pairs)
        matrix = replace(call, q=call.q[one], k=call.k[one], mask=mask).matrix()[0].cpu().double()
        if not matrix.isfinite().all():
            raise DataError(f"the mixing matrix of {call.name} is not finite: NaN or infinity in weights or images.")
        yield matrix


def evaluate_health(config: EvalConfig, rebuilt: Rebuilt, processes: Processes = ALONE) -> dict[str, Any]:
    """Counts heads and query rows that give 0, and computes spectral radii, per layer.

    Returns:
        `layers` and `heads` with the shares in %, mean and largest spectral radius, and what they depend on. Written
        too: `health_*.csv` (a row per layer and head) and `.md`.
    """

    def look(model: nn.Module, images: Tensor) -> list[Tensor]:
        layers = []
        for call in attention_calls(model, images):
            found = [head_health(matrix) for matrix in image_matrices(call)]
            layers.append(torch.stack([torch.stack([v.double() for v in health]) for health in found]))  # (B, 3, H)
        return list(torch.stack(layers, dim=1))

    samples = examine(config, rebuilt, processes, IMAGES, look)
    values = torch.stack(samples.found).movedim(2, 0)  # 3, images, L, H
    count, heads = values.shape[2:]
    result = {
        **samples.about,
        "layers": [{"layer": layer, **_summary(values[:, :, layer])} for layer in range(count)],
        "heads": [
            {"layer": layer, "head": head, **_summary(values[:, :, layer, head])}
            for layer in range(count) for head in range(heads)
        ],
    }  # fmt: skip
    if processes.first:
        table = to_markdown(result["layers"])
        print(table)
        path = result_path(config, rebuilt, "health", "heads", ".csv")
        write_csv(path, result["heads"])
        path.with_suffix(".md").write_text(table + "\n")
    return result


def _summary(values: Tensor) -> dict[str, float]:
    dead, rows, radius = values.unbind()
    return {
        "dead heads (%)": 100 * float(dead.mean()),
        "dead query rows (%)": 100 * float(rows.mean()),
        "spectral radius, mean": float(radius.mean()),
        "spectral radius, largest": float(radius.max()),
    }
