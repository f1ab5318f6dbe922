"""`eval=markov`: the attention of real images as a graph of tokens (arXiv 2603.00175, Fig. 3)."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from infvit.attention import Mechanism
from infvit.attention.infsa import InfSA
from infvit.attention.pure import katz_centrality
from infvit.config import EvalConfig
from infvit.engine.processes import ALONE, Processes
from infvit.evaluation.files import result_path
from infvit.evaluation.images import pixels
from infvit.evaluation.matrices import image_matrices
from infvit.evaluation.rebuild import Rebuilt
from infvit.evaluation.samples import examine
from infvit.evaluation.spectral_figures import Graph, draw_example, draw_graphs
from infvit.evaluation.tables import to_markdown, write_csv
from infvit.metrics.alignment import spearman
from infvit.metrics.markov import (
    absorption,
    eigenvector_centrality,
    is_chain,
    katz,
    kernel_name,
    neumann_kernel,
    pagerank,
    require_convergent,
)
from infvit.models.inspect import attention_calls

IMAGES = 8
DRAWN = 4
"""How many of the images are in the figure."""


def evaluate_markov(config: EvalConfig, rebuilt: Rebuilt, processes: Processes = ALONE) -> dict[str, Any]:
    """Examines M = gamma A of every layer, head and image as a graph.

    Returns:
        `layers` with, over heads and images: gamma, mean and largest spectral radius; the least absorption, signed, and
        how many tokens have a negative one; the share of graphs that are Markov chains, how many steps a walk takes in
        these until it is absorbed, and how often that is where it began; how the centralities agree.
        Written too: `markov_layers_*.csv`, `.md`, and two figures: `.png` of the last layer on images, and
        `markov_example_*.png`, five tokens under the formulas of this page.

    Raises:
        DivergenceError: a spectral radius of 1 or more, as that of softmax.
    """

    def look(model: nn.Module, images: Tensor) -> list[tuple[list[np.ndarray], Graph]]:
        calls = attention_calls(model, images)
        shots = pixels(images, rebuilt).numpy()
        layers: list[list[np.ndarray]] = [[] for _ in images]
        graphs: list[Graph] = []
        for call in calls:
            for at, matrix in enumerate(image_matrices(call)):
                measured = _measured(matrix, f"{call.name} ({call.mechanism.name})")
                layers[at].append(np.column_stack([_gamma(call.mechanism, len(matrix)), measured]))
                if call is calls[-1]:
                    graphs.append(_graph(matrix, shots[at], call.prefix, call.grid))
        return list(zip(layers, graphs, strict=True))

    samples = examine(config, rebuilt, processes, IMAGES, look)
    values = np.stack([np.stack(layers) for layers, _ in samples.found])  # (images, L, H, columns)
    result = {
        **samples.about,
        "layers": [
            {"layer": at, **_summary(values[:, at].reshape(-1, values.shape[-1]))} for at in range(values.shape[1])
        ],
    }
    if processes.first:
        table = to_markdown(result["layers"])
        print(table)
        path = result_path(config, rebuilt, "markov", "layers", ".csv")
        write_csv(path, result["layers"])
        path.with_suffix(".md").write_text(table + "\n")
        draw_graphs([graph for _, graph in samples.found[:DRAWN]], path.with_suffix(".png"))
        draw_example(result_path(config, rebuilt, "markov", "example", ".png"))
    return result


def _gamma(mechanism: Mechanism, heads: int) -> np.ndarray:
    """Returns gamma of each head; NaN where the mechanism has none."""
    if not isinstance(mechanism, InfSA):
        return np.full(heads, np.nan)
    return np.broadcast_to(mechanism.decay().detach().double().cpu().flatten().numpy(), heads)


def _measured(matrix: Tensor, what: str) -> np.ndarray:
    """Returns numbers about the graphs (H, N, N), by head: (H, 9); see `_summary`."""
    radius = require_convergent(matrix, f"M = gamma A of {what}")
    rest = absorption(matrix)
    # What no token takes from has 0 in theory, which ranks must see as equal.
    paths, leading, rank = (
        np.round(centrality(matrix).numpy(), 9) for centrality in (katz_centrality, eigenvector_centrality, pagerank)
    )
    known = np.isfinite(leading).all(-1)
    agree = [np.where(np.isfinite(other).all(-1), spearman(paths, other), np.nan) for other in (leading, rank)]
    chain = is_chain(matrix)
    visits = neumann_kernel(matrix)
    steps = visits.sum(-1).mean(-1).where(chain, torch.nan)
    back = (visits.diagonal(dim1=-2, dim2=-1) * rest).mean(-1).where(chain, torch.nan)
    columns = [radius, rest.amin(-1), (rest < 0).sum(-1), chain, steps, back]
    return np.stack([*(column.double().numpy() for column in columns), known, *agree], axis=-1)


def _summary(values: np.ndarray) -> dict[str, Any]:
    """Puts together the rows of `_measured` of all heads and images of a layer."""
    gamma, radius, least, negative, chain, steps, back, known, leading, rank = values.T
    return {
        "graphs": len(values),
        "gamma": _mean(gamma),
        "spectral radius, mean": float(radius.mean()),
        "largest": float(radius.max()),
        "least absorption": float(least.min()),
        "tokens with R < 0": int(negative.sum()),
        "Markov chains (%)": 100 * float(chain.mean()),
        "visits until absorbed": _mean(steps),
        "absorbed where begun (%)": None if (share := _mean(back)) is None else 100 * share,
        "without eigenvector": int((1 - known).sum()),
        "Katz ~ eigenvector": _mean(leading),
        "Katz ~ PageRank": _mean(rank),
    }


def _mean(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _graph(matrix: Tensor, image: np.ndarray, prefix: int, grid: tuple[int, int]) -> Graph:
    """Returns what is drawn of an image: means over heads, without the prefix tokens."""

    def over_patches(values: Tensor) -> np.ndarray:
        return torch.nanmean(values, dim=0)[prefix:].reshape(grid).numpy()

    maps: dict[str, np.ndarray] = {
        "Katz": over_patches(katz(matrix)),
        "PageRank": over_patches(pagerank(matrix)),
        "eigenvector": over_patches(eigenvector_centrality(matrix)),
        "absorption R": over_patches(absorption(matrix)),
        f"{kernel_name(matrix)}\nfrom the first token": over_patches(neumann_kernel(matrix)[:, 0]),
    }
    return Graph(image, matrix.mean(0)[prefix:, prefix:].numpy(), maps)
