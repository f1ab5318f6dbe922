"""The metrics of a run as files, which are the record of truth."""

import csv
import io
import json
import math
import os
from pathlib import Path
from typing import Any


def write_history(history: list[dict[str, Any]], folder: Path) -> None:
    """Writes `metrics.jsonl` and `summary.csv` from the history, whole, so that a resumed run has each epoch once.

    Numbers that are not finite become null: bare NaN is not JSON.
    """
    rows = [{name: _plain(value) for name, value in row.items()} for row in history]
    replace_text(folder / "metrics.jsonl", "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = io.StringIO()
    writer = csv.DictWriter(table, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    replace_text(folder / "summary.csv", table.getvalue())


def replace_text(path: Path, text: str) -> None:
    """Writes a small file so that a reader finds the old content or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> Any:
    """Lists (one value per layer) become one cell; None becomes an empty one."""
    if not isinstance(value, list):
        return value
    return " ".join("nan" if v is None else f"{v:.6g}" for v in value)
