"""`eval=compare`: two runs on the same images, from their files of predictions."""

import csv
import json
import logging
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from infvit.config import EvalConfig
from infvit.engine.processes import ALONE, Processes
from infvit.errors import DataError
from infvit.evaluation.scoring import COLUMNS
from infvit.metrics import compare_hits

log = logging.getLogger(__name__)


def compare(config: EvalConfig, processes: Processes = ALONE) -> dict[str, dict[str, Any]]:
    """Compares the top-1 of two runs on every set that both have predictions for.

    Args:
        config: `runs` names two run folders or two files `predictions_*.csv`; `output` a folder for the result as JSON.
        processes: this one and the others; the first shows and writes.

    Returns:
        For each set a `Difference` as a dictionary, with the two files.

    Raises:
        DataError: no common set, several files to choose from, or other images or labels in one than in the other.
    """
    first, second = (_files(run) for run in config.runs)
    if "" in first or "" in second:  # a file stands for itself, whatever it is of
        common = {"predictions": (_only(first, config.runs[0]), _only(second, config.runs[1]))}
    else:
        common = {name: (first[name], second[name]) for name in first if name in second}
    if not common:
        raise DataError(
            f"{config.runs[0]} has predictions for {', '.join(first)}, {config.runs[1]} for {', '.join(second)}: "
            "no set in common; evaluate both on the same."
        )
    results = {name: _compared(*files) for name, files in common.items()}
    if processes.first:
        print(_shown(results))
        if config.output:
            path = Path(config.output) / "compare.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(results, indent=2) + "\n")
            log.info("written to %s", path)
    return results


def _files(run: str) -> dict[str, Path]:
    """Returns the files of predictions by set; a single file under the name ``."""
    folder = Path(run).expanduser()
    if folder.is_file():
        return {"": folder}
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("predictions_*.csv")):
        name = path.name.removeprefix("predictions_").rsplit("_", 3)[0]
        if name in found:
            several = f"{found[name].name}, {path.name}"
            raise DataError(f"{folder} has several predictions for {name} ({several}): name the file in runs=[...].")
        found[name] = path
    if not found:
        raise DataError(f"no predictions in {folder}; python eval.py checkpoint=... eval=... writes them.")
    return found


def _only(files: dict[str, Path], run: str) -> Path:
    if len(files) > 1:
        raise DataError(f"{run} has predictions for {', '.join(files)}: name one file of them in runs=[...].")
    return next(iter(files.values()))


def _compared(first: Path, second: Path) -> dict[str, Any]:
    ours, theirs = _read(first), _read(second)
    if ours.keys() != theirs.keys():  # one of them from another layout of the same images, in a tar file, say
        ours, theirs = _by_file_name(ours), _by_file_name(theirs)
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        raise DataError(
            f"{first} and {second} are not of the same images: {len(odd)} are in one of them only, e.g. {odd[0]!r}; "
            "evaluate both on the same."
        )
    for image, (label, _) in ours.items():
        if label != theirs[image][0]:
            raise DataError(f"{first} and {second} have different labels for {image!r}: {label}, {theirs[image][0]}.")
    hits, others = (np.array([rows[image][1] for image in ours]) for rows in (ours, theirs))
    return {**asdict(compare_hits(hits, others)), "files": [str(first), str(second)]}


def _by_file_name(rows: dict[str, tuple[str, bool]]) -> dict[str, tuple[str, bool]]:
    """Leaves the folders out of the names of the images, where that confuses none."""
    short = {PurePosixPath(image).name: row for image, row in rows.items()}
    return short if len(short) == len(rows) else rows


def _read(path: Path) -> dict[str, tuple[str, bool]]:
    """Returns label and top-1 of each image."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        if tuple(rows.fieldnames or ()) != COLUMNS:
            raise DataError(f"{path} is no file of predictions; its first line must be {','.join(COLUMNS)}.")
        found = {row["image"]: (row["label"], row["top1"] == "1") for row in rows}
    if not found:
        raise DataError(f"{path} holds no predictions.")
    return found


def _shown(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        f"{'set':<30}{'images':>8}{'first':>8}{'second':>8}{'difference':>12}  {'95 % interval':<18}{'p (McNemar)':>12}"
    ]
    for name, row in results.items():
        interval = f"[{row['low']:+.2f}, {row['high']:+.2f}]"
        lines.append(
            f"{name:<30}{row['images']:>8}{row['first']:>8.2f}{row['second']:>8.2f}{row['difference']:>+12.2f}  "
            f"{interval:<18}{row['p_value']:>12.3g}"
        )
    return "\n".join(lines)
