"""`eval=attention_quality`: does the model need the patches that its attention points at, and are the objects there?

One intact pass gives class and map of each image. Perturbation (MoRF, LeRF, a random order) and localisation (ROC, PR
against boxes) both start from that map. Images pass intact in batches that depend neither on `batch_size` nor on the
number of processes, since the order of patches is a decision that rounding could tip.
"""

import csv
import hashlib
import json
import logging
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infvit.config import EvalConfig
from infvit.data import build_eval_loader, eval_transform
from infvit.engine.device import autocast, select_device, select_precision
from infvit.engine.processes import ALONE, Processes
from infvit.errors import ConfigError, DataError
from infvit.evaluation.chosen import Chosen, choose, place_boxes
from infvit.evaluation.files import result_path
from infvit.evaluation.perturb import CURVES, Perturber, probabilities
from infvit.evaluation.quality_figures import draw_localization, draw_perturbation
from infvit.evaluation.rebuild import Rebuilt
from infvit.evaluation.relevance import about, relevance
from infvit.evaluation.scoring import crop, settings
from infvit.metrics import Ranking, energy_in_boxes
from infvit.metrics.perturbation import SHARES, area_under, fill, normalised_curves
from infvit.models.inspect import observe, patch_layout

INTACT_BATCH = 16
"""Images of an intact pass."""
RATES = np.linspace(0, 1, 101)
"""Where mean ROC and PR curves are kept."""
PERTURBATION = ("morf_aoc", "lerf_auc", "random_aoc", "random_auc", "deletion", "insertion")
LOCALIZATION = ("roc_auc", "pr_auc", "prevalence", "energy")

log = logging.getLogger(__name__)


@dataclass
class _Seen:
    """What is known of each image, by index, and of images that were lost on the way, by reason."""

    maps: dict[int, np.ndarray] = field(default_factory=dict)
    classes: dict[int, tuple[int, float]] = field(default_factory=dict)
    scores: dict[int, np.ndarray] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    def merged(self, processes: Processes) -> "_Seen":
        """Returns that of all processes, in the order of the indices."""
        whole = _Seen()
        for part in processes.gather(self):
            for name in ("maps", "classes", "scores"):
                getattr(whole, name).update(getattr(part, name))
            whole.damaged += part.damaged
            whole.about = whole.about or part.about
        for name in ("maps", "classes", "scores"):
            setattr(whole, name, dict(sorted(getattr(whole, name).items())))
        whole.damaged.sort()
        return whole


def evaluate_attention_quality(config: EvalConfig, rebuilt: Rebuilt, processes: Processes = ALONE) -> dict[str, Any]:
    """Measures perturbation and localisation, and writes the values of each image, the curves and their figures.

    Args:
        config: `quality`, device, precision, batch size.
        rebuilt: the model and its data.
        processes: this one and the others, which share the images.

    Returns:
        Means and standard deviations over the images, in %; numbers of images used and left out; all settings.

    Raises:
        ConfigError: the model has no maps that can be read.
        DataError: no image is left, or one is damaged that is not to be excluded.
    """
    quality = config.quality
    transform = eval_transform(*crop(config, rebuilt), rebuilt.data, rebuilt.img_size, rebuilt.crop_mode)
    with processes.together():
        _, grid = patch_layout(rebuilt.model, (rebuilt.img_size, rebuilt.img_size))
        if rebuilt.img_size % grid[0] or rebuilt.img_size % grid[1]:
            raise ConfigError(f"{grid[0]} x {grid[1]} patches do not fill images of {rebuilt.img_size} px evenly.")
        chosen = choose(config, rebuilt)
        number = quality.localization_images
        annotated = place_boxes(chosen, transform, rebuilt.img_size, grid, number) if number else []
        perturbed = chosen.first(quality.perturbation_images) if quality.perturbation_images else []
        indices = sorted({*perturbed, *chosen.labels})
        if not indices:
            raise DataError(f"no image is left to look at ({_counts(chosen.excluded) or 'none was asked for'}).")
    names = [chosen.name(index, rebuilt.data.root) for index in indices]
    digest = hashlib.sha1("\n".join(names).encode()).hexdigest()
    processes.require_same(digest, f"images at data.root={rebuilt.data.root}")
    with processes.together():
        seen = _look(config, rebuilt, processes, chosen, indices, set(perturbed), grid)
    seen = seen.merged(processes)
    excluded, excluded_boxes = Counter[str](), Counter(chosen.excluded)
    rows = _rows(chosen, seen, set(perturbed), excluded, excluded_boxes)
    if not any(name in row for row in rows.values() for name in (*PERTURBATION, *LOCALIZATION)):
        raise processes.everywhere(
            DataError(f"no image could be measured: {_counts(excluded + excluded_boxes)}; is the model finite?")
        )
    result = {
        **_summary(rows.values(), PERTURBATION),
        "perturbation_images": sum("morf_aoc" in row for row in rows.values()),
        "perturbation_excluded": dict(sorted((+excluded).items())),
        **_summary(rows.values(), LOCALIZATION),
        "localization_images": sum("roc_auc" in row for row in rows.values()),
        "localization_annotated": len(annotated),
        "localization_excluded": dict(sorted((+excluded_boxes).items())),
        "boxes_dropped": dict(sorted((+chosen.dropped).items())),
        "constant_maps": sum(float(np.ptp(seen.maps[index])) == 0 for index in rows),
        **seen.about,
        "heads": quality.heads,
        "fill": quality.fill,
        **({"blur_sigma": quality.blur_sigma} if quality.fill == "blur" else {}),
        "seed": quality.seed,
        "images_sha1": digest,
        "annotations": quality.annotations,
        "data": rebuilt.data.name,
        "root": rebuilt.data.root,
        "split": rebuilt.data.val_split,
        **settings(config, rebuilt),
        "curves": _curves(chosen, seen, rows),
    }
    if processes.first:
        _write(config, rebuilt, chosen, seen, rows, result)
        for what, reasons in (("perturbation", excluded), ("localisation", excluded_boxes)):
            if +reasons:
                log.info("left out of %s: %s", what, _counts(reasons))
    return result


def _look(
    config: EvalConfig,
    rebuilt: Rebuilt,
    processes: Processes,
    chosen: Chosen,
    indices: Sequence[int],
    perturbed: set[int],
    grid: tuple[int, int],
) -> _Seen:
    """Runs this process's share of the images through the model, intact and perturbed."""
    device = select_device(config.device)
    precision = select_precision(config.precision, device)
    transform = eval_transform(*crop(config, rebuilt), rebuilt.data, rebuilt.img_size, rebuilt.crop_mode)
    loader = build_eval_loader(
        chosen.selection(indices), transform, INTACT_BATCH, rebuilt.data.num_workers, device.type == "cuda",
        processes.rank, processes.world_size, config.on_damaged == "exclude", whole_batches=True,
    )  # fmt: skip
    model, quality, data = rebuilt.model.to(device), config.quality, rebuilt.data

    def logits_of(images: Tensor) -> Tensor:
        with torch.no_grad(), autocast(device, precision):
            return model(images)

    def filling(images: Tensor) -> Tensor:
        return fill(images, quality.fill, data.mean, data.std, quality.blur_sigma)

    perturber = Perturber(logits_of, config.batch_size, grid, filling, quality.seed)
    seen = _Seen(scores=perturber.scores)
    for batch in loader:
        seen.damaged += batch.damaged
        if not len(batch.targets):
            continue
        images = batch.images.to(device)
        with torch.no_grad(), autocast(device, precision):
            logits, calls = observe(model, images)
        maps = relevance(calls, config).flatten(1)
        seen.about = about(calls, config)
        places = [indices[at] for at in batch.indices.tolist()]
        seen.maps.update(zip(places, maps.cpu().numpy(), strict=True))
        best = probabilities(logits)
        seen.classes.update(
            (place, (int(row.argmax()), float(row.max()))) for place, row in zip(places, best, strict=True)
        )
        finite = maps.isfinite().all(1) & logits.isfinite().all(1)
        rows = [row for row, place in enumerate(places) if place in perturbed and finite[row]]
        if rows:
            perturber.add(images[rows], logits[rows], maps[rows], [places[row] for row in rows])
    perturber.finish()
    return seen


Row = dict[str, float]


def _rows(
    chosen: Chosen, seen: _Seen, perturbed: set[int], excluded: Counter[str], excluded_boxes: Counter[str]
) -> dict[int, Row]:
    """Returns the values of each image, and counts those that have none."""
    rows: dict[int, Row] = {}
    usable = []
    excluded["damaged"] += sum(index not in seen.maps for index in perturbed)
    excluded_boxes["damaged"] += sum(index not in seen.maps for index in chosen.labels)
    for index, relevance_of in seen.maps.items():
        row = rows.setdefault(index, {})
        finite = bool(np.isfinite(relevance_of).all())
        if index in perturbed:
            scores = seen.scores.get(index)
            if not finite:
                excluded["map not finite"] += 1
            elif scores is None or not np.isfinite(scores).all():
                excluded["score not finite"] += 1
            else:
                row |= perturbation_values(scores)
        if index in chosen.labels:
            if finite:
                usable.append(index)
            else:
                excluded_boxes["map not finite"] += 1
    if usable:
        labels, maps = (np.stack([where[index] for index in usable]) for where in (chosen.labels, seen.maps))
        ranking = Ranking.of(labels, maps)
        values = (ranking.roc_auc(), ranking.average_precision(), labels.mean(1), energy_in_boxes(labels, maps))
        for name, column in zip(LOCALIZATION, values, strict=True):
            for index, value in zip(usable, column.tolist(), strict=True):
                rows[index][name] = 100 * value
    return rows


def perturbation_values(scores: np.ndarray) -> Row:
    """Returns the measures of one image in %.

    Args:
        scores: Probabilities of its class, float (curves, points), rows as `CURVES`.

    Returns:
        By name. `deletion` and `insertion` (RISE, Petsiuk et al. 2018, here by patches) are the same areas without the
        division by the intact score: what LeRF has left at a share x is what insertion has put in at 1 - x.
    """
    morf, lerf, random = area_under(normalised_curves(scores)).tolist()
    raw = area_under(scores).tolist()
    values = (1 - morf, lerf, 1 - random, random, raw[0], raw[1])
    return {name: 100 * value for name, value in zip(PERTURBATION, values, strict=True)}


def _summary(rows: Any, names: Sequence[str]) -> dict[str, float | None]:
    """Returns mean and standard deviation over the images that have a value; null where there is none."""
    summary: dict[str, float | None] = {}
    for name in names:
        values = [row[name] for row in rows if name in row and row[name] == row[name]]
        summary[name] = statistics.fmean(values) if values else None
        summary[f"{name}_sd"] = statistics.stdev(values) if len(values) > 1 else None
    return summary


def _curves(chosen: Chosen, seen: _Seen, rows: Mapping[int, Row]) -> dict[str, Any]:
    """Returns mean and standard deviation of the curves."""
    curves: dict[str, Any] = {}
    used = [seen.scores[index] for index, row in rows.items() if "morf_aoc" in row]
    if used:
        shares = normalised_curves(np.stack(used))
        curves["removed"] = list(SHARES)
        for place, name in enumerate(CURVES):
            curves[name] = shares[:, place].mean(0).tolist()
            curves[f"{name}_sd"] = shares[:, place].std(0, ddof=1).tolist() if len(used) > 1 else None
    located = [index for index, row in rows.items() if "roc_auc" in row]
    if located:
        labels, maps = (np.stack([where[index] for index in located]) for where in (chosen.labels, seen.maps))
        ranking = Ranking.of(labels, maps)
        curves["rate"] = RATES.tolist()
        curves["roc"], curves["pr"] = ranking.mean_roc(RATES).tolist(), ranking.mean_precision(RATES).tolist()
    return curves


def _write(
    config: EvalConfig,
    rebuilt: Rebuilt,
    chosen: Chosen,
    seen: _Seen,
    rows: Mapping[int, Row],
    result: Mapping[str, Any],
) -> None:
    """Writes the values of each image as CSV, and the figures."""

    def path(kind: str, suffix: str) -> Path:
        return result_path(config, rebuilt, kind, "attention_quality", suffix)

    with path("images", ".csv").open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(["image", "prediction", "probability", *PERTURBATION, *LOCALIZATION, "boxes"])
        for index, row in rows.items():
            place, probability = seen.classes[index]
            boxes = chosen.boxes[index].tolist() if index in chosen.boxes else None
            numbers = [f"{row[name]:.9g}" if name in row else "" for name in (*PERTURBATION, *LOCALIZATION)]
            out.writerow(
                [chosen.name(index, rebuilt.data.root), rebuilt.classes[place], f"{probability:.9g}", *numbers,
                 "" if boxes is None else json.dumps(boxes)]
            )  # fmt: skip
    if "removed" in result["curves"]:
        draw_perturbation(result, path("perturbation", ".png"))
    if "rate" in result["curves"]:
        draw_localization(result, path("localization", ".png"))


def _counts(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()) if count)
