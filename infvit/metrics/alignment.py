"""How close the weights of Linear InfSA come to the Perron eigenvector of phi(Q Q^T) (arXiv 2603.00175, Table 2)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from infvit.errors import DataError
from infvit.metrics.spectrum import leading_eigenvector

STATISTICS = ("cosine", "spearman", "pearson", "uniform_cosine", "column_cosine", "column_spearman")
"""Of the eigenvector with the weights; then, as controls, with a uniform vector and with the column sums."""
REASONS = ("no weights", "no eigenvector")
"""Why a head has no alignment: every weight is 0; the largest eigenvalue is 0 or not single."""
CHUNK = 2**25
"""Most numbers of the matrices that are held at a time: 256 MiB in double precision."""


@dataclass(frozen=True)
class Alignment:
    """One value per sample and head, (B, H); NaN where it is not defined.

    Attributes:
        values: By the names of `STATISTICS`. Correlations of a vector whose entries are all equal are not defined.
        excluded: Whether `REASONS[0]` or `REASONS[1]` keeps the whole head out, by reason, bool.
        mixed: Whether the eigenvector has entries of both signs, which only a signed activation allows, bool.
    """

    values: dict[str, np.ndarray]
    excluded: dict[str, np.ndarray]
    mixed: np.ndarray


@torch.no_grad()
def alignment(q: Tensor, weights: Tensor, phi: Callable[[Tensor], Tensor]) -> Alignment:
    """Compares the leading eigenvector v of phi(Q Q^T / D) with weights a, over all tokens, prefix tokens too.

    Each matrix is formed once, in double precision, some heads at a time.

    Args:
        q: queries, (B, H, N, D), not scaled.
        weights: a, (B, H, N).
        phi: activation, elementwise.

    Raises:
        DataError: queries or weights are not finite.
    """
    if not (q.isfinite().all() and weights.isfinite().all()):
        raise DataError("queries or weights are not finite: NaN or infinity in the model's weights or the images.")
    samples, heads, tokens, dim = q.shape
    place = torch.device("cpu") if q.device.type == "mps" else q.device  # MPS has no float64
    scaled = q.to(place, torch.float64).flatten(0, 1) / dim**0.5
    vectors, sums, single = [], [], []
    for part in scaled.split(max(1, CHUNK // tokens**2)):
        matrices = phi(part @ part.mT)
        leading = leading_eigenvector(matrices)
        vectors.append(leading.vector.cpu())
        single.append(leading.single.cpu())
        sums.append(matrices.sum(-2).cpu())
        del matrices  # before the next one is formed
    v, columns = torch.cat(vectors).numpy(), torch.cat(sums).numpy()
    a = weights.cpu().double().flatten(0, 1).numpy()
    rounded = np.round(v, 9)  # what is 0 or equal in theory differs by rounding, which ranks would take for an order
    values = {
        "cosine": cosine(v, a),
        "spearman": spearman(rounded, a),
        "pearson": pearson(rounded, a),
        "uniform_cosine": cosine(v, np.ones_like(v)),
        "column_cosine": cosine(v, columns),
        "column_spearman": spearman(rounded, columns),
    }
    zero = ~a.any(-1)
    excluded = {REASONS[0]: zero, REASONS[1]: ~torch.cat(single).numpy() & ~zero}
    out = zero | excluded[REASONS[1]]
    return Alignment(
        {name: np.where(out, np.nan, value).reshape(samples, heads) for name, value in values.items()},
        {name: value.reshape(samples, heads) for name, value in excluded.items()},
        ((rounded < 0).any(-1) & (rounded > 0).any(-1) & ~out).reshape(samples, heads),
    )


def cosine(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the cosine of the angle between vectors (..., N), (...,); NaN where one of them is 0."""
    lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return np.divide((x * y).sum(-1), lengths, out=np.full_like(lengths, np.nan), where=lengths > 0)


def pearson(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns Pearson's correlation of vectors (..., N), (...,); NaN where all entries of one are equal."""
    varies = (np.ptp(x, axis=-1) > 0) & (np.ptp(y, axis=-1) > 0)
    correlation = cosine(x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True))
    return np.where(varies, correlation, np.nan)


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns Spearman's correlation of vectors (..., N), (...,); equal entries share their mean rank. NaN likewise."""
    return pearson(rankdata(x, axis=-1), rankdata(y, axis=-1))
