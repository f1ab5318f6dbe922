"""The metrics of a run as files, which are the record of truth."""

import csv
import io
import json
import math
import os
from pathlib import Path
from typing import Any

from infvit.errors import UserError

METRICS = "metrics.jsonl"


def write_history(history: list[dict[str, Any]], folder: Path) -> None:
    """Writes `metrics.jsonl` and `summary.csv` from the history, whole, so that a resumed run has each epoch once.

    Numbers that are not finite become null: bare NaN is not JSON.
    """
    rows = [{name: _plain(value) for name, value in row.items()} for row in history]
    replace_text(folder / METRICS, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = io.StringIO()
    writer = csv.DictWriter(table, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    replace_text(folder / "summary.csv", table.getvalue())


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of `metrics.jsonl`, one per epoch; none where there is no such file.

    Raises:
        UserError: a line is not a row.
    """
    path = folder / METRICS
    rows: list[dict[str, Any]] = []
    if not path.is_file():
        return rows
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            row = json.loads(line, parse_constant=_refuse)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("epoch"), int):
            raise UserError(
                f"{path}, line {number} is damaged: {line[:40]!r} is not the row of an epoch. last.pt has all the "
                "run's rows: remove the file and start its command again, which writes it anew."
            )
        rows.append(row)
    return rows


def replace_text(path: Path, text: str) -> None:
    """Writes a small file so that a reader finds the old content or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> Any:
    """Lists (one value per layer) become one cell; None becomes an empty one."""
    if not isinstance(value, list):
        return value
    return " ".join("nan" if v is None else f"{v:.6g}" for v in value)
