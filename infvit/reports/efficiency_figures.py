"""The figures of `eval=efficiency`, from its result; published numbers are in none of them."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from infvit.metrics.growth import exponent
from infvit.reports.tables import significant

Rows = list[dict[str, Any]]
MARKERS = {"linear": "o", "quadratic": "s", "unknown": "^"}
LAYERS = re.compile(r"_(4|24)l(?=_|:|$)")


def draw_all(result: dict[str, Any], folder: Path) -> list[str]:
    """Draws what the result has the numbers for.

    Returns:
        The names of the files, in the order in which they should be looked at.
    """
    figures: dict[str, Callable[[dict[str, Any]], Figure | None]] = {
        "dashboard": _dashboard,
        "throughput_energy": _throughput_energy,
        "depth": _depth,
        "latency_resolution": _latency_resolution,
        "memory_tokens": _memory_tokens,
    }
    names = []
    for stem, draw in figures.items():
        path = folder / f"{stem}.png"
        figure = draw(result)
        if figure is None:
            path.unlink(missing_ok=True)  # of an earlier result
            continue
        temporary = path.with_name(path.name + ".tmp")
        figure.savefig(temporary, dpi=110, format="png")
        os.replace(temporary, path)
        names.append(path.name)
    return names


def _panels(width: float, height: float, columns: int, title: str) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot: no global state, no display
    figure.suptitle(title)
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _models(result: dict[str, Any]) -> Rows:
    """Returns the rows of whole models at the smallest batch size."""
    rows = [row for row in result["rows"] if row["scope"] == "model"]
    smallest = min((row["batch"] for row in rows), default=0)
    return [row for row in rows if row["batch"] == smallest]


def _colors(result: dict[str, Any]) -> dict[str, Any]:
    names = list(dict.fromkeys(row["model"] for row in result["rows"]))
    palette = colormaps["tab10" if len(names) <= 10 else "tab20"].colors  # type: ignore[attr-defined]
    return {name: palette[i % len(palette)] for i, name in enumerate(names)}


def _where(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"{machine.get('gpu') or machine['cpu']}, {result['settings']['precision']}"


def _measured(row: dict[str, Any]) -> bool:
    """Whether a row may be drawn: it has a latency and is not wrong."""
    return row["latency"] is not None and row["check"]["state"] != "wrong"


def _plain_ticks(*axes: Axis) -> None:
    """Labels logarithmic axes at 1, 2 and 5, as plain numbers: most span less than a power of ten."""
    for axis in axes:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_minor_formatter(NullFormatter())


def _dashboard(result: dict[str, Any]) -> Figure | None:
    """Fig. 4: images per second over the first baseline's, each mode at its largest size that has any ratio."""
    baseline = result["settings"]["baselines"][0]
    groups = []
    for mode in result["settings"]["modes"]:
        rows = [r for r in _models(result) if r["mode"] == mode and not isinstance(r["speedup"][baseline], str)]
        if rows:
            size = max(row["resolution"] for row in rows)
            groups.append((mode, size, [row for row in rows if row["resolution"] == size]))
    if not groups:
        return None
    extra = bool(result["highest"])
    figure, panels = _panels(
        4.6 * (len(groups) + extra), 3.8, len(groups) + extra, f"over {baseline}; {_where(result)}"
    )
    colors = _colors(result)
    for axes, (mode, size, rows) in zip(panels, groups, strict=False):
        values = [row["speedup"][baseline] for row in rows]
        _bars(axes, [row["model"] for row in rows], values, [colors[row["model"]] for row in rows], "{:.2f}x")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set(title=f"{mode}, {size} px, batch {rows[0]['batch']}", xlabel="images/s over the baseline's")
    if extra:
        mode = result["settings"]["modes"][0]
        found = [h for h in result["highest"] if h["mode"] == mode]
        values = [h["resolution"] or 0 for h in found]
        _bars(panels[-1], [h["model"] for h in found], values, [colors[h["model"]] for h in found], "{:.0f}")
        panels[-1].set(title=f"highest resolution, {mode}", xlabel="pixels")
    return figure


def _bars(axes: Axes, names: Sequence[str], values: Sequence[float], colors: Sequence[Any], shown: str) -> None:
    bars = axes.barh(range(len(names)), values, color=colors)
    axes.bar_label(bars, [shown.format(value) for value in values], padding=3)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.25)


def _throughput_energy(result: dict[str, Any]) -> Figure | None:
    """Fig. 2b: images per second against joules per image; the marker tells how the FLOPs grow with the tokens."""
    rows = [row for row in _models(result) if row["mode"] == "inference" and _measured(row)]
    if not rows:
        return None
    measured = all(row["energy_j"] is not None for row in rows)
    energy, label = (
        ("energy_j", "measured") if measured else ("papers_convention_j", "paper's convention, not measured")
    )
    size = max(row["resolution"] for row in rows)
    rows = [row for row in rows if row["resolution"] == size]
    figure, (axes,) = _panels(6.4, 4.2, 1, f"inference, {size} px, batch {rows[0]['batch']}; {_where(result)}")
    colors = _colors(result)
    for row in rows:
        growth = result["complexity"].get(row["model"], "unknown")
        name = f"{row['model']} ({growth})"
        axes.plot(row[energy], row["images_per_s"], MARKERS[growth], color=colors[row["model"]], label=name, ms=9)
    axes.set(xscale="log", yscale="log", xlabel=f"J/image ({label})", ylabel="images/s")
    _plain_ticks(axes.xaxis, axes.yaxis)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def _depth(result: dict[str, Any]) -> Figure | None:
    """Fig. 9: models of 4 layers beside the same ones of 24, inference latency and memory."""
    rows = [row for row in _models(result) if row["mode"] == "inference" and _measured(row)]
    families: dict[str, dict[str, dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["resolution"]):
        if found := LAYERS.search(row["model"]):
            family = f"{LAYERS.sub('', row['model'])}, {row['resolution']} px"
            families.setdefault(family, {})[found[1]] = row
    families = {name: pair for name, pair in families.items() if len(pair) == 2}
    if not families:
        return None
    figure, panels = _panels(10, 1.6 + 0.5 * len(families), 2, f"4 and 24 layers, inference; {_where(result)}")
    values: tuple[tuple[Callable[[dict[str, Any]], float], str], ...] = (
        (lambda row: row["latency"]["median_ms"], "latency (ms)"),
        (lambda row: row["memory_mib"] or 0.0, "memory above the weights (MiB)"),
    )
    for axes, (value, label) in zip(panels, values, strict=True):
        for offset, layers in ((-0.2, "4"), (0.2, "24")):
            heights = [value(pair[layers]) for pair in families.values()]
            bars = axes.barh([y + offset for y in range(len(families))], heights, 0.4, label=f"{layers} layers")
            axes.bar_label(bars, [significant(height) for height in heights], padding=3)
        axes.set_yticks(range(len(families)), list(families))
        axes.set(xlabel=label)
        axes.invert_yaxis()
        axes.margins(x=0.25)
        axes.legend(frameon=False)
    return figure


def _latency_resolution(result: dict[str, Any]) -> Figure | None:
    """Fig. 11: latency against resolution, a panel for each mode, with quartiles."""
    rows = [row for row in _models(result) if _measured(row)]
    return _lines(result, rows, "resolution", "resolution (px)", "latency (ms)")


def _memory_tokens(result: dict[str, Any]) -> Figure | None:
    """Memory against the number of tokens, with the fitted exponents."""
    rows = [row for row in _models(result) if row["tokens"] and row["memory_mib"]]
    return _lines(result, rows, "tokens", "tokens N", "memory (MiB)")


def _lines(result: dict[str, Any], rows: Rows, x: str, x_label: str, y_label: str) -> Figure | None:
    modes = [mode for mode in result["settings"]["modes"] if any(row["mode"] == mode for row in rows)]
    if not modes or len({row[x] for row in rows}) < 2:
        return None
    colors = _colors(result)
    width = 5.4 if len(colors) <= 6 else 8
    figure, panels = _panels(width * len(modes), 4.2, len(modes), f"batch {rows[0]['batch']}; {_where(result)}")
    for axes, mode in zip(panels, modes, strict=True):
        for model, color in colors.items():
            mine = sorted((r for r in rows if (r["mode"], r["model"]) == (mode, model)), key=lambda r: r[x])
            if not mine:
                continue
            xs = [row[x] for row in mine]
            if x == "tokens":
                ys = [row["memory_mib"] for row in mine]
                power = exponent(list(zip(xs, ys, strict=True)))
                axes.plot(xs, ys, "o-", color=color, label=model + ("" if power is None else f": N^{power:.2f}"))
                continue
            times = [row["latency"] for row in mine]
            ys = [t["median_ms"] for t in times]
            spread = [
                [y - t["low_ms"] for y, t in zip(ys, times, strict=True)],
                [t["high_ms"] - y for y, t in zip(ys, times, strict=True)],
            ]
            axes.errorbar(xs, ys, spread, fmt="o-", color=color, label=model, capsize=3)
        axes.set(xscale="log", yscale="log", xlabel=x_label, ylabel=y_label, title=mode)
        ticks = sorted({row[x] for row in rows})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        _plain_ticks(axes.yaxis)
        axes.grid(alpha=0.3)
        if len(colors) > 6:  # beside the lines, not over them
            axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        else:
            axes.legend(frameon=False)
    return figure
