"""A table as Markdown, CSV, LaTeX, HTML and a figure."""

import csv
import html
import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from infvit.reports.tables import Table

EXPLAINED = "Mean ± standard deviation over the seeds that are done, last epoch."


def to_markdown(table: Table) -> str:
    """Returns the table with what it is made of below it."""
    lines = [_row("", *table.columns), "|---" * (len(table.columns) + 1) + "|"]
    lines += [_row(row.label.strip(), *(cell.show(row.digits) for cell in row.cells)) for row in table.rows]
    lines.append(_row("runs", *table.progress))
    parts = [
        f"# {table.title}",
        "\n".join(lines),
        f"{table.explained or EXPLAINED} {table.note}",
        f"![figure]({table.figure})",
    ]
    if table.errors:
        parts.append("\n".join(f"- {_cell(error)}" for error in table.errors))
    return "\n\n".join(parts) + "\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def to_csv(table: Table) -> str:
    """Returns a line for each setting and metric, with all digits."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["setting", "metric", "mean", "sd", "count", "text", "runs"])
    for row in table.rows:
        for column, cell, progress in zip(table.columns, row.cells, table.progress, strict=True):
            numbers = ["" if value is None else repr(value) for value in (cell.mean, cell.sd)]
            text = cell.text if cell.mean is None else ""
            writer.writerow([column, row.metric, *numbers, cell.count, text, progress])
    return out.getvalue()


def to_latex(table: Table) -> str:
    """Returns a `tabular` that needs no package."""
    lines = [f"% {table.note}", f"\\begin{{tabular}}{{l{'c' * len(table.columns)}}}", "\\hline"]
    lines += [_latex("", *table.columns), "\\hline"]
    lines += [_latex(row.label.strip(), *(cell.show(row.digits) for cell in row.cells)) for row in table.rows]
    return "\n".join([*lines, _latex("runs", *table.progress), "\\hline", "\\end{tabular}"]) + "\n"


def _latex(*cells: str) -> str:
    escaped = (re.sub(r"([_%&#{}$])", r"\\\1", cell).replace("±", "$\\pm$") for cell in cells)
    return " & ".join(escaped) + " \\\\"


def to_html(table: Table) -> str:
    """Returns the table as part of a page, with a heading and what it is made of."""
    rows = [("", *table.columns), *((row.label, *(c.show(row.digits) for c in row.cells)) for row in table.rows)]
    cells = [[html.escape(cell.strip()) for cell in row] for row in (*rows, ("runs", *table.progress))]
    lines = [f"<tr><th>{'</th><th>'.join(cells[0])}</th></tr>"]
    lines += [f"<tr><th>{label}</th><td>{'</td><td>'.join(values)}</td></tr>" for label, *values in cells[1:]]
    note = html.escape(f"{table.explained or EXPLAINED} {table.note}")
    return "\n".join([f"<h2>{html.escape(table.title)}</h2>", "<table>", *lines, "</table>", f"<p>{note}</p>"])


def draw_ablation(table: Table, path: Path) -> None:
    """Draws top-1 over the settings with its standard deviation, and the published figures on an axis of their own."""
    rows = {row.metric: row for row in table.rows}
    longest = max((len(part) for column in table.columns for part in column.split(", ")), default=0)
    figure = Figure(figsize=(max(5.0, max(1.4, 0.1 * longest) * len(table.columns)), 3.6), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot: no global state, no display
    axes = figure.subplots()
    places = range(len(table.columns))
    ours = [(x, c.mean, c.sd or 0.0) for x, c in zip(places, rows["top1"].cells, strict=True) if c.mean is not None]
    if ours:
        x, mean, sd = zip(*ours, strict=True)
        axes.errorbar(x, mean, sd, fmt="o", color="tab:blue", capsize=4, label="measured")
    axes.set_ylabel("top-1 (%)", color="tab:blue")
    axes.set_xticks(list(places), [column.replace(", ", "\n") for column in table.columns])
    axes.set_xlim(-0.5, len(table.columns) - 0.5)
    axes.grid(axis="y", alpha=0.3)
    axes.set_title(table.title)
    if "top1_published" in rows:
        theirs = axes.twinx()
        known = [(x, c.mean) for x, c in zip(places, rows["top1_published"].cells, strict=True) if c.mean is not None]
        theirs.plot(*zip(*known, strict=True), "s--", color="tab:gray", label="published")
        theirs.set_ylabel("published top-1 (%)", color="tab:gray")
    _save(figure, path)


def draw_quality(table: Table, path: Path) -> None:
    """Draws the measures of attention quality as groups of bars, one bar for each model, as Fig. 5 of the paper does.

    Published figures are horizontal strokes over the bars, chance (a random order of removal, the prevalence of
    positives, a ROC of one half) dotted ones.
    """
    rows = {row.metric: row for row in table.rows}
    metrics = [name for name in ("morf", "lerf", "roc", "pr") if name in rows]
    figure = Figure(figsize=(max(9.0, 1.3 * len(table.columns) + 3.5), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / max(1, len(table.columns))
    for place, column in enumerate(table.columns):
        at = [x + (place - (len(table.columns) - 1) / 2) * width for x in range(len(metrics))]
        cells = [rows[metric].cells[place] for metric in metrics]
        heights, errors = [cell.mean or 0.0 for cell in cells], [cell.sd or 0.0 for cell in cells]
        axes.bar(at, heights, 0.92 * width, yerr=errors, capsize=3, label=column)
        for kind, style in (("published", "-"), ("chance", ":")):
            for x, metric in zip(at, metrics, strict=True):
                row = rows.get(f"{metric}_{kind}")
                height = None if row is None else row.cells[place].mean
                if height is not None:
                    axes.plot([x - width / 2, x + width / 2], [height, height], style, color="black")
    axes.set_xticks(range(len(metrics)), [rows[metric].label for metric in metrics])
    axes.set(ylim=(0, 100), title=table.title)
    axes.plot([], [], "-", color="black", label="published (another data set and size)")
    axes.plot([], [], ":", color="black", label="chance")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    _save(figure, path)


CURVES = (
    ("morf", "removed", "MoRF: most relevant first", "patches removed (%)", "score / intact score"),
    ("lerf", "removed", "LeRF: least relevant first", "patches removed (%)", "score / intact score"),
    ("roc", "rate", "patches in boxes: ROC", "false-positive rate", "true-positive rate"),
    ("pr", "rate", "patches in boxes: precision and recall", "recall", "precision"),
)
"""Curve, its x, and what stands on its panel."""


def draw_curves(results: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draws MoRF, LeRF, ROC and PR of several models, each panel with a line per model: Figs. 7 and 8 of the paper.

    Args:
        results: by label of the model what `eval=attention_quality` found for each seed. A line is the mean over the
            seeds, its band their standard deviation. Dashed: a random order of the same images; dotted: chance.
        path: of the PNG.
    """
    figure = Figure(figsize=(15, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, along, title, x_label, y_label) in zip(figure.subplots(1, 4), CURVES, strict=True):
        for number, (label, runs) in enumerate(results.items()):
            known = [run["curves"] for run in runs if name in run.get("curves", {})]
            if not known:
                continue
            color, x = f"C{number}", known[0][along]
            lines = np.array([curves[name] for curves in known])
            axes.plot(x, lines.mean(0), color=color, label=label)
            if len(lines) > 1:
                spread = lines.std(0, ddof=1)
                axes.fill_between(x, lines.mean(0) - spread, lines.mean(0) + spread, color=color, alpha=0.15)
            if along == "removed":
                axes.plot(x, np.mean([curves["random"] for curves in known], 0), "--", color=color, linewidth=0.8)
            elif name == "pr":
                prevalence = np.mean([run["prevalence"] for run in runs if name in run.get("curves", {})]) / 100
                axes.plot([0, 1], [prevalence, prevalence], ":", color=color, linewidth=0.8)
        axes.set(title=title, xlabel=x_label, ylabel=y_label, ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        if axes.lines:
            if name == "roc":
                axes.plot([0, 1], [0, 1], ":", color="gray", linewidth=0.8)
            handles, labels = axes.get_legend_handles_labels()
            handles.append(Line2D([], [], linestyle="--" if along == "removed" else ":", color="gray", linewidth=0.8))
            labels.append("random order" if along == "removed" else "chance")
            axes.legend(handles, labels, frameon=False, fontsize=7)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, dpi=110, format="png")
    os.replace(temporary, path)
