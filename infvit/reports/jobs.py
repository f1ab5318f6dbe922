"""The jobs of a sweep in a table for the terminal."""

from collections.abc import Sequence
from pathlib import Path

from infvit.reports.runs import RunView

NOT_BEGUN = "not begun"


def jobs_table(runs: Sequence[RunView], sweep: Path) -> str:
    """Returns a line for each job: name, state, epochs, held-out top-1 (raw and EMA weights), and the error."""
    header = ("job", "state", "epochs", "top-1", "EMA", "")
    lines = [header] + [_line(run, sweep) for run in runs]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in lines
    )


def _line(run: RunView, sweep: Path) -> tuple[str, ...]:
    name = run.name if run.folder.parent == sweep else str(run.folder)
    epochs = f"{run.epochs}/{run.config['epochs']}" if run.config else "-"
    scores = ("-" if value is None else f"{value:.2f} %" for value in (run.last("top1"), run.last("ema_top1")))
    return (name, NOT_BEGUN if run.state == "missing" else run.state, epochs, *scores, run.error)
