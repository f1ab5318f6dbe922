"""One page of all runs: curves, tables, figures. A file by itself, without a server or a network."""

import base64
import html
import json
import time
from collections.abc import Sequence
from pathlib import Path
from string import Template

from infvit.engine.record import replace_text
from infvit.reports.formats import to_html
from infvit.reports.quality import compared, quality_table
from infvit.reports.runs import QUALITY, RunView
from infvit.reports.svg import COLORS, Series, line_chart

CHARTS = (
    ("top1", "held-out top-1 (%)"),
    ("ema_top1", "held-out top-1, EMA weights (%)"),
    ("train_loss", "training loss"),
    ("loss", "held-out loss"),
    ("lr", "learning rate"),
)
COLUMNS = ("run", "state", "model", "data", "seed", "epochs", "top-1 (%)", "EMA (%)", "loss", "MoRF", "LeRF", "ROC",
           "PR", "images/s", "error")  # fmt: skip
TEMPLATE = Template(Path(__file__).with_name("page.html").read_text())


def write_page(runs: Sequence[RunView], path: Path, every: float | None = None) -> int:
    """Writes the page.

    Args:
        runs: what to show.
        path: where to.
        every: seconds after which a browser reads it again; None: never.

    Returns:
        How many runs it shows.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, render(runs, every))
    return len(runs)


def render(runs: Sequence[RunView], every: float | None = None) -> str:
    """Returns the page."""
    colors = [COLORS[number % len(COLORS)] for number in range(len(runs))]
    charts = []
    for metric, title in CHARTS:
        series = [
            Series(str(i), run.name, color, run.series(metric))
            for i, (run, color) in enumerate(zip(runs, colors, strict=True))
        ]
        if any(line.points for line in series):
            charts.append(line_chart(title, series))
    measured = [run for run in runs if run.quality]
    return TEMPLATE.substitute(
        refresh=f'<meta http-equiv="refresh" content="{every:g}">' if every else "",
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        count=len(runs),
        charts="\n".join(charts),
        head="".join(f"<th><button>{html.escape(column)}</button></th>" for column in COLUMNS),
        body="\n".join(_row(i, run, color) for i, (run, color) in enumerate(zip(runs, colors, strict=True))),
        quality=to_html(quality_table(compared(measured))) if measured else "",
        figures="\n".join(_figures(i, run) for i, run in enumerate(runs)),
    )


def _row(number: int, run: RunView, color: str) -> str:
    config = run.config
    cells: list[tuple[str, float | str]] = [
        (run.name, run.name),
        (run.state, run.state),
        *((name, name) for name in (config[group]["name"] if config else "-" for group in ("model", "data"))),
        (str(run.seed), run.seed),
        (f"{run.epochs}/{config['epochs']}" if config else "-", run.epochs),
        *(_number(run.last(name), digits) for name, digits in _NUMBERS),
        (run.error, run.error),
    ]
    shown = "".join(
        f'<td data-key="{html.escape(json.dumps(key))}">{html.escape(text)}</td>' for text, key in cells[1:]
    )
    swatch = f'<span class="swatch" style="background:{color}"></span>'
    name = f'<td data-key="{html.escape(json.dumps(run.name))}">{swatch}{html.escape(run.name)}</td>'
    return f'<tr data-run="{number}" class="{run.state}" title="{html.escape(str(run.folder))}">{name}{shown}</tr>'


_NUMBERS = (
    *(("top1", 2), ("ema_top1", 2), ("loss", 4)),
    *((metric, 1) for metric in QUALITY),
    ("images_per_second", 0),
)


def _number(value: float | None, digits: int) -> tuple[str, float | str]:
    """Returns a number as it is shown and as it is sorted."""
    return ("-", "") if value is None else (f"{value:.{digits}f}", value)


def _figures(number: int, run: RunView) -> str:
    """Returns the figures of a run, inside the page; they open with a click on its name."""
    images = []
    for path in sorted(run.folder.glob("*.png")):
        data = base64.b64encode(path.read_bytes()).decode()
        images.append(f'<figure><img alt="{path.stem}" src="data:image/png;base64,{data}"></figure>')
    if not images:
        return ""
    return f'<details data-run="{number}"><summary>{html.escape(run.name)}</summary>{"".join(images)}</details>'
