"""ImageNet and its relatives in one table."""

import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from infvit.config import EvalConfig
from infvit.data.imagenet_sets import (
    CORRUPTED,
    FAMILIES,
    NAMES,
    SETS,
    STANDARD_CORRUPTIONS,
    OpenSet,
    find_sets,
    open_set,
)
from infvit.engine.processes import Processes
from infvit.errors import ConfigError, did_you_mean
from infvit.evaluation.files import result_path
from infvit.evaluation.rebuild import Rebuilt
from infvit.evaluation.scoring import score, settings, write_predictions
from infvit.metrics import wilson_interval

Row = dict[str, Any]
log = logging.getLogger(__name__)


def open_sets(config: EvalConfig, rebuilt: Rebuilt, names: list[str]) -> list[OpenSet]:
    """Opens every set that is asked for, before the first is scored.

    Raises:
        ConfigError: a root for a set that is not asked for.
        DataError: a set is missing or not what it should be.
    """
    for name in config.roots:
        if name not in names and not (name == "imagenet" and "imagenet_real" in names):
            raise ConfigError(f"roots.{name} has no effect: eval={name} is not asked for. {did_you_mean(name, names)}")
    opened = []
    for name in names:
        # Only a reader given for this evaluation: that of the run's own data reads other images.
        reader = config.data.get("reader") if name in ("imagenet", "imagenet_real") else None
        if reader is not None:
            found = [(SETS[name], Path())]
        else:
            found = find_sets(name, rebuilt.data, root_of(name, config.roots), alone=len(names) == 1)
        absent = [variant for variant in FAMILIES.get(name, ()) if variant not in [spec.name for spec, _ in found]]
        if absent:
            log.warning("not scored, since not there: %s", ", ".join(absent))
        data = replace(rebuilt.data, reader=reader)
        opened += [open_set(spec, path, data, rebuilt.classes, config.data.get("classes")) for spec, path in found]
    for entry in opened:
        for line in entry.source.warnings:
            log.warning("%s: %s", entry.spec.name, line)
    return opened


def root_of(name: str, roots: dict[str, str]) -> str | None:
    """Returns the root given for a set; ReaL labels the images of `imagenet`, so it takes theirs."""
    return roots.get(name, roots.get("imagenet") if name == "imagenet_real" else None)


def score_set(config: EvalConfig, rebuilt: Rebuilt, entry: OpenSet, processes: Processes) -> Row:
    """Scores one set and saves what the model said about each image; returns its row of the table."""
    classes = hashlib.sha1(" ".join(entry.classes).encode()).hexdigest()
    processes.require_same((len(entry.source), classes), f"images or classes in {entry.path}")
    if entry.spec.name.startswith(f"{CORRUPTED.name}/") and config.crop_pct is None:
        config = replace(config, crop_pct=1.0)  # its images are cropped already, to 224 px
    _, answers = score(config, rebuilt, entry.source, processes, entry.columns)
    if processes.first:
        path = result_path(config, rebuilt, "predictions", entry.spec.name, ".csv")
        write_predictions(path, entry.source, entry.path, entry.classes, answers, entry.labels)
    hits = answers.hits(entry.labels)
    low, high = wilson_interval(int(hits[:, 0].sum()), len(hits))
    whole = len(entry.classes) == len(entry.spec.classes)
    row = {
        "set": entry.spec.name,
        "top1": 100 * float(hits[:, 0].mean()),
        "top5": 100 * float(hits[:, 1].mean()),
        "top1_low": low,
        "top1_high": high,
        "images": len(hits),
        "expected": entry.spec.images if whole else None,
        "classes": len(entry.classes),
        "classes_with_images": len({label for labels in entry.labels for label in labels}),
        "unlabelled": entry.unlabelled,
        "outside": entry.outside,
        "damaged": len(answers.damaged),
        "root": entry.path,
    }
    if whole and len(hits) != entry.spec.images:
        log.warning("%s: %d images scored; the whole set has %d", entry.spec.name, len(hits), entry.spec.images)
    return row | settings(config, rebuilt)


def show(rows: list[Row]) -> str:
    """Returns the table as text: a line for each set, then ImageNet-C by corruption and severity."""
    plain = [row for row in rows if not row["set"].startswith(f"{CORRUPTED.name}/")]
    corrupted = [row for row in rows if row["set"].startswith(f"{CORRUPTED.name}/")]
    lines = []
    if plain:
        lines.append(f"{'set':<30}{'top-1':>8}{'top-5':>8}   {'95 % interval':<18}{'images':>8}  left out")
    for row in plain:
        interval = f"[{row['top1_low']:.2f}, {row['top1_high']:.2f}]"
        left_out = [f"{row[why]} {why}" for why in ("unlabelled", "outside", "damaged") if row[why]]
        lines.append(
            f"{row['set']:<30}{row['top1']:>8.2f}{row['top5']:>8.2f}   {interval:<18}{row['images']:>8}  "
            + (", ".join(left_out) or "-")
        )
    return "\n".join(lines + (_severities(corrupted) if corrupted else []))


def _severities(rows: list[Row]) -> list[str]:
    """Returns top-1 by corruption and severity, with the means of whole corruptions.

    A corruption that lacks a severity has no mean: the severities are not equally hard.
    """
    top1 = {tuple(row["set"].split("/")[1:]): row["top1"] for row in rows}
    lines = [
        f"{'imagenet_c, top-1, severity':<30}" + "".join(f"{severity:>8}" for severity in range(1, 6)) + "    mean"
    ]
    means = {}
    for name in sorted({name for name, _ in top1}, key=lambda name: (name not in STANDARD_CORRUPTIONS, name)):
        scores = [top1.get((name, str(severity))) for severity in range(1, 6)]
        there = [value for value in scores if value is not None]
        whole = len(there) == len(scores)
        if whole and name in STANDARD_CORRUPTIONS:
            means[name] = sum(there) / len(there)
        cells = [*scores, sum(there) / len(there) if whole else None]
        shown = name if name in STANDARD_CORRUPTIONS else f"{name} (extra)"
        lines.append(f"{shown:<30}" + "".join(f"{'-':>8}" if cell is None else f"{cell:>8.2f}" for cell in cells))
    if means:
        number = len(STANDARD_CORRUPTIONS)
        which = f"all {number} corruptions" if len(means) == number else f"{len(means)} of the {number} corruptions"
        lines.append(f"{f'mean of {which}, extra ones apart':<70}{sum(means.values()) / len(means):>8.2f}")
    return lines


def require_known(names: list[str], others: list[str]) -> None:
    """Raises `ConfigError` for a name that is neither a set nor among the others."""
    for name in names:
        if name not in NAMES and name not in others:
            raise ConfigError(f"unknown eval={name}. {did_you_mean(name, [*others, *NAMES])}")
