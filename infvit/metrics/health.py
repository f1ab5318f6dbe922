"""Heads and query rows that mix nothing, and how far a layer carries along paths."""

from typing import NamedTuple

from torch import Tensor

from infvit.metrics.spectrum import spectral_radius


class Health(NamedTuple):
    """Of the heads of mixing matrices (..., N, N), each (...,).

    Attributes:
        dead: Whether the whole matrix is 0: under ReLU, all scores are 0 or less. Such a head gives 0.
        dead_rows: Share of the rows that are 0: queries that take from no token.
        radius: Spectral radius.
    """

    dead: Tensor
    dead_rows: Tensor
    radius: Tensor


def head_health(matrix: Tensor) -> Health:
    """Examines mixing matrices (..., N, N), gamma included."""
    empty = (matrix == 0).all(-1)
    return Health(empty.all(-1), empty.to(matrix.dtype).mean(-1), spectral_radius(matrix))
