"""Figures of attention quality: curves (Figs. 7 and 8 of arXiv 2603.00175), and maps beside images (Figs. 1 and 10)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle


def draw_perturbation(result: Mapping[str, Any], path: Path) -> None:
    """Draws the mean curves of MoRF, LeRF and the random order, with a band of one standard deviation."""
    curves = result["curves"]
    figure = _figure(5.6, 3.8)
    axes = figure.subplots()
    labels = {
        "morf": f"MoRF, AOC {result['morf_aoc']:.1f} %",
        "lerf": f"LeRF, AUC {result['lerf_auc']:.1f} %",
        "random": f"random order, AUC {result['random_auc']:.1f} %",
    }
    for (name, label), color in zip(labels.items(), ("tab:red", "tab:blue", "tab:gray"), strict=True):
        mean, sd = np.array(curves[name]), curves[f"{name}_sd"]
        axes.plot(curves["removed"], mean, color=color, label=label)
        if sd is not None:
            axes.fill_between(curves["removed"], mean - sd, mean + sd, color=color, alpha=0.12, linewidth=0)
    axes.set(xlabel="patches removed (%)", ylabel="score / intact score", xlim=(0, 100), ylim=(0, 1.02))
    images = f"{result['perturbation_images']} images (band: ± 1 standard deviation over them)"
    axes.set_title(f"{result['mechanism']}, {result['map']}, {images}", fontsize=8)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


def draw_localization(result: Mapping[str, Any], path: Path) -> None:
    """Draws the mean ROC and precision-recall curves, with what a map of no use would give."""
    curves = result["curves"]
    figure = _figure(8.0, 3.8)
    roc, pr = figure.subplots(1, 2)
    roc.plot(curves["rate"], curves["roc"], label=f"AUC {result['roc_auc']:.1f} %")
    roc.plot([0, 1], [0, 1], ":", color="tab:gray", label="chance")
    roc.set(xlabel="false-positive rate", ylabel="true-positive rate", title="patches in boxes: ROC")
    pr.plot(curves["rate"], curves["pr"], label=f"average precision {result['pr_auc']:.1f} %")
    pr.axhline(result["prevalence"] / 100, linestyle=":", color="tab:gray", label="chance (prevalence)")
    pr.set(xlabel="recall", ylabel="precision", title="precision and recall")
    for axes in (roc, pr):
        axes.set(xlim=(0, 1), ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(f"{result['mechanism']}, {result['map']}, {result['localization_images']} images", fontsize=10)
    figure.savefig(path, dpi=110)


@dataclass(frozen=True)
class MapView:
    """What one model sees in one image: pixels in [0, 1] (height, width, channels), a map (rows, columns), boxes."""

    title: str
    pixels: np.ndarray
    relevance: np.ndarray
    boxes: np.ndarray


def draw_maps(views: Sequence[Sequence[MapView]], names: Sequence[str], path: Path) -> None:
    """Draws image, heat map and overlay side by side, a row for each image; of several models one beside the other.

    A heat map goes from its own smallest to its own largest value; a map without any difference is marked as constant.

    Args:
        views: for each image one for each model.
        names: of the images.
        path: of the figure.
    """
    models = len(views[0])
    figure = _figure(1.9 * (1 + 2 * models), 2.05 * len(views) + 0.4)
    grid = figure.subplots(len(views), 1 + 2 * models, squeeze=False)
    for row, (line, name) in enumerate(zip(views, names, strict=True)):
        _show(grid[row, 0], line[0].pixels, line[0].boxes, "image" if row == 0 else "")
        grid[row, 0].set_ylabel(short(name), fontsize=6)
        for column, view in enumerate(line):
            heat, overlay = grid[row, 1 + 2 * column], grid[row, 2 + 2 * column]
            height, width = view.pixels.shape[:2]
            scaled = _scaled(view.relevance)
            extent = (0, width, height, 0)
            heat.imshow(scaled, cmap="inferno", vmin=0, vmax=1, extent=extent, interpolation="nearest")
            _show(heat, None, view.boxes, view.title if row == 0 else "")
            if not np.ptp(view.relevance):
                heat.text(width / 2, height / 2, "constant", color="white", ha="center", va="center")
            _show(overlay, view.pixels.mean(-1), view.boxes, "")
            overlay.imshow(scaled, cmap="inferno", vmin=0, vmax=1, extent=extent, alpha=0.55, interpolation="bilinear")
    figure.savefig(path, dpi=110)


def _show(axes: Axes, pixels: np.ndarray | None, boxes: np.ndarray, title: str) -> None:
    if pixels is not None:
        height, width = pixels.shape[:2]
        axes.imshow(pixels.squeeze(), cmap="gray", vmin=0, vmax=1, extent=(0, width, height, 0))
    for x0, y0, x1, y1 in boxes:
        axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor="lime", linewidth=1))
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, fontsize=7)


def _scaled(relevance: np.ndarray) -> np.ndarray:
    low, high = float(relevance.min()), float(relevance.max())
    return (relevance - low) / (high - low) if high > low else np.zeros_like(relevance)


def short(name: str) -> str:
    """Returns a name that fits over a panel: of a long one both ends, as paths of two models may differ in either."""
    name = name.split(" (")[0]
    return name if len(name) <= 28 else f"{name[:10]}...{name[-15:]}"


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot: no global state, no display
    return figure
