"""Figures of the evaluations of attention as a graph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from matplotlib.ticker import MaxNLocator

from infvit.attention.mechanism import NO_MASK
from infvit.attention.pure import pure_infsa_matrix
from infvit.evaluation.quality_figures import short
from infvit.metrics.markov import absorption, is_chain, katz, kernel_name, neumann_kernel

EDGES = 24
"""How many edges are drawn on an image, the heaviest ones."""


@dataclass(frozen=True)
class Graph:
    """An image as a graph of its patches.

    Attributes:
        image: (H, W, C) in [0, 1].
        weights: of the edges from row to column, (N, N), patches row by row.
        maps: by title a value per patch, (rows, columns); NaN where it is not defined.
    """

    image: np.ndarray
    weights: np.ndarray
    maps: dict[str, np.ndarray]


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot: no global state, no display
    return figure


def draw_alignment(values: Mapping[str, np.ndarray], published: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draws histograms of the statistics, a colour for each layer, with the published mean and standard deviation.

    Args:
        values: by name of the statistic (images, L, H); those that are NaN are left out.
        published: mean and sd by name.
        path: of the PNG.
    """
    names = ("cosine", "spearman", "pearson", "uniform_cosine", "column_cosine")
    titles = ("cosine (v, a)", "Spearman (v, a)", "Pearson (v, a)", "control: cosine (v, uniform)",
              "control: cosine (v, column sums)")  # fmt: skip
    figure = _figure(16, 3.4)
    for axes, name, title in zip(figure.subplots(1, len(names)), names, titles, strict=True):
        layers = [layer[np.isfinite(layer)] for layer in values[name].swapaxes(0, 1)]
        least = min((float(layer.min()) for layer in layers if len(layer)), default=0.0)
        bins = np.linspace(min(least, 0.9), 1, 31)
        axes.hist([layer.ravel() for layer in layers], bins=list(bins), stacked=True,
                  label=[f"layer {at}" for at in range(len(layers))])  # fmt: skip
        if name in published:
            mean, sd = published[name]["mean"], published[name]["sd"]
            axes.axvline(mean, color="black", linestyle="--", label="published mean ± sd")
            axes.axvspan(mean - sd, min(mean + sd, 1), color="black", alpha=0.08)
        axes.set(title=title, ylabel="samples" if name == names[0] else None)
        if name == names[0]:
            axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=110)


def draw_smoothing(models: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draws a line per model over the layers, with its standard deviation over images; see `eval=oversmoothing`."""
    panels = (
        ("log_amplitude", "high frequencies: log amplitude against the input"),
        ("token_cosine", "mean cosine between two tokens"),
        ("effective_rank", "effective rank"),
    )
    figure = _figure(14, 3.8)
    for axes, (name, title) in zip(figure.subplots(1, 3), panels, strict=True):
        for label, layers in models.items():
            known = [(row["layer"], row[name]["mean"], row[name]["sd"] or 0) for row in layers if row[name]["count"]]
            if known:
                x, mean, sd = map(np.array, zip(*known, strict=True))
                (line,) = axes.plot(x, mean, marker=".", label=short(label))  # a long one would leave the axes no room
                axes.fill_between(x, mean - sd, mean + sd, color=line.get_color(), alpha=0.15)
        axes.set(title=title, xlabel="layer (0: input of the first)")
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if axes.lines:
            axes.legend(frameon=False, fontsize="small")
    figure.suptitle("mean over the images, bands: ± 1 standard deviation", fontsize="small")
    figure.savefig(path, dpi=110)


def draw_graphs(graphs: Sequence[Graph], path: Path) -> None:
    """Draws a row per image: the image with its heaviest edges, then its maps, each with its range in the title."""
    figure = _figure(2.3 * (1 + len(graphs[0].maps)), 2.5 * len(graphs))
    grid = figure.subplots(len(graphs), 1 + len(graphs[0].maps), squeeze=False)
    for row, graph in zip(grid, graphs, strict=True):
        _image(row[0], graph)
        row[0].set_title(f"{EDGES} heaviest edges", fontsize="small")
        for axes, (title, values) in zip(row[1:], graph.maps.items(), strict=True):
            _map(axes, values)
            known = values[np.isfinite(values)]
            span = f"{known.min():.3g} to {known.max():.3g}" if len(known) else "not defined"
            axes.set_title(f"{title}\n{span}", fontsize="small")
        for axes in row:
            axes.set(xticks=[], yticks=[])
    figure.savefig(path, dpi=110)


def _image(axes: Axes, graph: Graph) -> None:
    image = graph.image[..., 0] if graph.image.shape[-1] == 1 else graph.image
    axes.imshow(image, cmap="gray", vmin=0, vmax=1)
    rows, columns = next(iter(graph.maps.values())).shape
    high, wide = image.shape[0] / rows, image.shape[1] / columns
    weights = np.abs(graph.weights) * (1 - np.eye(len(graph.weights)))  # an edge to itself has no length
    heaviest = np.argsort(-weights, axis=None, kind="stable")[: min(EDGES, int((weights > 0).sum()))]
    for start, end in zip(*np.unravel_index(heaviest, weights.shape), strict=True):
        places = [((at % columns + 0.5) * wide - 0.5, (at // columns + 0.5) * high - 0.5) for at in (start, end)]
        arrow = FancyArrowPatch(*places, arrowstyle="-|>", mutation_scale=6, linewidth=0.8, color="tab:orange",
                                connectionstyle="arc3,rad=0.15")  # fmt: skip
        axes.add_patch(arrow)


def _map(axes: Axes, values: np.ndarray) -> None:
    """Shows a map; one with values of both signs in two colours that meet at 0."""
    known = values[np.isfinite(values)]
    if len(known) and known.min() < 0 < known.max():
        axes.imshow(values, cmap="RdBu", norm=TwoSlopeNorm(0, known.min(), known.max()))
    else:
        axes.imshow(values, cmap="viridis")


EXAMPLE = torch.tensor(
    [[1.0, 0.2, 0.1], [0.9, 0.5, 0.0], [0.1, 1.0, 0.2], [0.0, 0.6, 0.9], [0.2, 0.1, 0.8]], dtype=torch.float64
)
"""Queries, and keys, of five tokens, made up for the figure: the sources print no numbers for theirs."""


def draw_example(path: Path, gamma: float = 0.7) -> None:
    """Draws five tokens under Pure InfSA: the graph M = gamma A, M with its absorptions, and (I - M)^-1."""
    keys = EXAMPLE.roll(1, 0)
    q, k = (x[None, None] / x.shape[-1] ** 0.5 for x in (EXAMPLE, keys))
    matrix = gamma * pure_infsa_matrix(q, k, torch.relu, NO_MASK)[0, 0]
    rest, kernel, importance = absorption(matrix), neumann_kernel(matrix), katz(matrix)
    figure = _figure(14, 4.2)
    graph, left, right = figure.subplots(1, 3)
    angles = np.pi / 2 - 2 * np.pi * np.arange(5) / 5
    places = np.stack([np.cos(angles), np.sin(angles)], -1)
    for i in range(5):
        for j in range(5):
            if i != j and matrix[i, j] > 0:
                arrow = FancyArrowPatch(places[i], places[j], arrowstyle="-|>", mutation_scale=12, shrinkA=16,
                                        shrinkB=16, linewidth=12 * float(matrix[i, j]), color="tab:gray", alpha=0.7,
                                        connectionstyle="arc3,rad=0.12")  # fmt: skip
                graph.add_patch(arrow)
        graph.scatter(*places[i], s=500 + 900 * float(importance[i]), color="tab:orange", zorder=3)
        graph.annotate(f"{i + 1}\n{float(importance[i]):.2f}", places[i], ha="center", va="center", zorder=4)
    graph.set(xlim=(-1.4, 1.4), ylim=(-1.3, 1.4), aspect="equal", title="M = gamma A; size: Katz centrality")
    graph.axis("off")
    _numbers(left, torch.cat([matrix, rest[:, None]], 1), "M, and R = 1 - row sum", ["1", "2", "3", "4", "5", "R"])
    name = kernel_name(matrix) + ("" if is_chain(matrix) else ": a row sums to more than 1")
    _numbers(right, kernel, f"(I - M)^-1, {name}", ["1", "2", "3", "4", "5"])
    figure.suptitle(f"Five tokens under Pure InfSA, gamma {gamma}")
    figure.savefig(path, dpi=110)


def _numbers(axes: Axes, values: torch.Tensor, title: str, columns: list[str]) -> None:
    axes.imshow(values.numpy(), cmap="Oranges")
    for (i, j), value in np.ndenumerate(values.numpy()):
        axes.text(j, i, f"{value:.2f}", ha="center", va="center")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(5), ["1", "2", "3", "4", "5"])
    axes.set_title(title)
