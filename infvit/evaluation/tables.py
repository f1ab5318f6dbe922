"""Rows of numbers as Markdown and CSV."""

import csv
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def mean_sd(values: Iterable[float]) -> dict[str, Any]:
    """Returns mean, standard deviation (n - 1) and number of the values that are not NaN; None where there is none."""
    known = [float(value) for value in values if not math.isnan(value)]
    return {
        "mean": statistics.fmean(known) if known else None,
        "sd": statistics.stdev(known) if len(known) > 1 else None,
        "count": len(known),
    }


def shown(summary: Mapping[str, Any], digits: int = 3) -> str:
    """Returns what `mean_sd` gave as text."""
    if summary["mean"] is None:
        return "-"
    return f"{summary['mean']:.{digits}f}" + ("" if summary["sd"] is None else f" ± {summary['sd']:.{digits}f}")


def to_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of rows with the same keys; floats have four digits, None is a dash."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(map(_text, row.values())) + " |" for row in rows]
    return "\n".join(lines)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows with the same keys, with all digits; None and NaN are empty."""
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(rows[0])
        out.writerows(["" if value is None or value != value else value for value in row.values()] for row in rows)


def _text(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")
