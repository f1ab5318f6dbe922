"""One pass of a model over a source: the scores, and what it said about each image."""

import csv
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from infvit.config import EvalConfig
from infvit.data import EvalBatch, Source, build_eval_loader, eval_transform
from infvit.engine.device import select_device, select_precision
from infvit.engine.processes import ALONE, Processes
from infvit.engine.validate import validate
from infvit.errors import DataError
from infvit.evaluation.rebuild import Rebuilt
from infvit.metrics.classification import NothingScoredError

COLUMNS = ("image", "label", "prediction", "probability", "top1", "top5", "top5_classes")
"""Of a file of predictions. `top1` and `top5` are 1 where the image counts as right; lists are separated by `|`."""

log = logging.getLogger(__name__)


class Restricted(nn.Module):
    """A model of which only some of the logits count."""

    def __init__(self, model: nn.Module, columns: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        self.columns: Tensor
        self.register_buffer("columns", torch.tensor(columns))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images)
        return logits[:, self.columns]


@dataclass(frozen=True)
class Answers:
    """What a model said about n images, in their order; images left out as damaged are not among them.

    Attributes:
        indices: Which images of the source, (n,).
        ranked: Their most probable classes, the best first, (n, at most 5); -1 where the logits are not finite.
        probabilities: Of those classes, (n, at most 5).
        damaged: A message, naming the file, for each image left out.
    """

    indices: np.ndarray
    ranked: np.ndarray
    probabilities: np.ndarray
    damaged: list[str]

    def hits(self, labels: Sequence[Sequence[int]]) -> np.ndarray:
        """Returns whether each answer is right, bool (n, 2): the best one, any of the best five.

        Args:
            labels: The accepted classes of each image of the source.
        """
        accepted = [labels[i] for i in self.indices.tolist()]
        right = [[bool({*row[:1]} & {*some}), bool({*row} & {*some})] for row, some in
                 zip(self.ranked.tolist(), accepted, strict=True)]  # fmt: skip
        return np.array(right, dtype=bool).reshape(-1, 2)


class _Collector:
    """Takes the batches of one process."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, list[int], list[float]]] = []
        self.damaged: list[str] = []

    def add(self, batch: EvalBatch, logits: Tensor) -> None:
        """An `observe` of `validate`."""
        self.damaged += batch.damaged
        logits = logits.detach().cpu().double()
        ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices  # not of probabilities, many of which may be 0
        probabilities = logits.softmax(1).gather(1, ranked)
        if len(batch.targets):
            ranked = ranked.where(logits.isfinite().all(1, keepdim=True), -1)
        self.rows += zip(batch.indices.tolist(), ranked.tolist(), probabilities.tolist(), strict=True)

    def answers(self, processes: Processes) -> Answers:
        """Returns those of all processes."""
        rows = sorted(row for rows in processes.gather(self.rows) for row in rows)
        damaged = sorted(message for messages in processes.gather(self.damaged) for message in messages)
        indices, ranked, probabilities = zip(*rows, strict=True)
        return Answers(np.array(indices), np.array(ranked), np.array(probabilities), damaged)


def score(
    config: EvalConfig, rebuilt: Rebuilt, source: Source, processes: Processes = ALONE, columns: Sequence[int] = ()
) -> tuple[dict[str, float | int], Answers]:
    """Scores the model on a source.

    Args:
        config: device, precision, batch size, what to do with damaged images; crop and interpolation where they are not
            the recipe's.
        rebuilt: the model.
        source: the images. A target is an index into `columns`, where these are given.
        processes: this one and the others, which share the images.
        columns: logits that count; none: all.

    Returns:
        `validate`'s scores, and the answers; the same on all processes.

    Raises:
        DataError: a damaged image that is not to be excluded, or nothing but damaged images.
    """
    device = select_device(config.device)
    precision = select_precision(config.precision, device)
    transform = eval_transform(*crop(config, rebuilt), rebuilt.data, rebuilt.img_size, rebuilt.crop_mode)
    workers, pin, exclude = rebuilt.data.num_workers, device.type == "cuda", config.on_damaged == "exclude"
    loader = build_eval_loader(
        source, transform, config.batch_size, workers, pin, processes.rank, processes.world_size, exclude
    )
    model = rebuilt.model if tuple(columns) in ((), tuple(range(len(rebuilt.classes)))) else \
        Restricted(rebuilt.model, columns)  # fmt: skip
    collector = _Collector()
    try:
        scores = validate(model.to(device), loader, device, precision, processes=processes, observe=collector.add)
    except NothingScoredError as error:
        raise processes.everywhere(
            DataError(f"all {len(source)} images are damaged: {source.locate(0)} ...")
        ) from error
    answers = collector.answers(processes)
    for message in answers.damaged:
        log.warning("Left out: %s", message)
    return scores, answers


def crop(config: EvalConfig, rebuilt: Rebuilt) -> tuple[float, str]:
    """Returns crop and interpolation: those asked for, else those of the recipe."""
    return config.crop_pct or rebuilt.recipe.crop_pct, config.interpolation or rebuilt.recipe.interpolation


def write_predictions(
    path: Path,
    source: Source,
    root: str | None,
    classes: Sequence[str],
    answers: Answers,
    labels: Sequence[Sequence[int]],
) -> None:
    """Writes a row for each image, see `COLUMNS`; images are named by their path below `root`."""
    hits = answers.hits(labels)

    def named(indices: Sequence[int]) -> str:
        return "|".join(classes[i] for i in indices if i >= 0)

    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for at, index in enumerate(answers.indices.tolist()):
            ranked = answers.ranked[at].tolist()
            image = relative(source.locate(index), root)
            probability = f"{answers.probabilities[at, 0]:.9g}"
            right = [int(hit) for hit in hits[at]]
            rows.writerow([image, named(labels[index]), named(ranked[:1]), probability, *right, named(ranked)])


def relative(image: str, root: str | None) -> str:
    """Returns how an image is called below a root, so that two machines call it alike."""
    return os.path.relpath(image, root) if root and image.startswith(root.rstrip("/") + "/") else image


def settings(config: EvalConfig, rebuilt: Rebuilt) -> dict[str, Any]:
    """Returns what a score depends on besides the images."""
    crop_pct, interpolation = crop(config, rebuilt)
    precision = select_precision(config.precision, select_device(config.device))
    return {
        "resolution": rebuilt.img_size,
        "crop_pct": crop_pct,
        "interpolation": interpolation,
        "weights": config.weights,
        "precision": str(precision).removeprefix("torch."),
        "checkpoint": str(rebuilt.path),
    }
