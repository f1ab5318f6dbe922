"""A mixing matrix M = gamma A as a graph of tokens (arXiv 2603.00175, Fig. 3): centralities, absorption, visits.

M_ij is what token i takes from token j: an edge from i to j. A walk takes it with probability M_ij and ends in i with
what is left of the row, R_i = 1 - sum_j M_ij. These are probabilities only where no M_ij and no R_i is negative; Pure
InfSA's one norm over the whole matrix lets a row sum to as much as gamma sqrt(N). R is signed, and never clipped.
"""

import torch
from torch import Tensor

from infvit.attention.pure import katz_centrality
from infvit.errors import UserError
from infvit.metrics.spectrum import SINGLE, spectral_radius

DAMPING = 0.85
"""Of PageRank, as published (Brin and Page 1998)."""
ROUNDING = 1e-6
"""How far below 0 an absorption may be by rounding: M comes from a model in single precision."""
VISITS, KERNEL = "expected visits", "Neumann kernel"


class DivergenceError(UserError, ValueError):
    """The sum over paths of a graph has no limit."""


def absorption(matrix: Tensor) -> Tensor:
    """Returns R_i = 1 - sum_j M_ij of M (..., N, N), signed, never clipped: (..., N)."""
    return 1 - matrix.sum(-1)


def is_chain(matrix: Tensor) -> Tensor:
    """Whether M (..., N, N) is an absorbing Markov chain: no entry and no absorption is negative, (...,) bool."""
    return (matrix >= 0).all(-1).all(-1) & (absorption(matrix) >= -ROUNDING).all(-1)


def kernel_name(matrix: Tensor) -> str:
    """Returns what (I - M)^-1 of M (..., N, N) is: `VISITS`, or `KERNEL` where a matrix of the stack is no chain."""
    return VISITS if bool(is_chain(matrix).all()) else KERNEL


def require_convergent(matrix: Tensor, what: str = "M") -> Tensor:
    """Returns the spectral radii of M (..., N, N), (...,).

    Raises:
        DivergenceError: one of them is 1 or more, so that the sum of all paths is infinite. The inverse of I - M may
            exist even so, and means nothing.
    """
    radius = spectral_radius(matrix)
    largest = float(radius.max())
    if not largest < 1 - 1e-9:  # NaN too
        raise DivergenceError(
            f"the spectral radius of {what} is {largest:.6g}, not below 1: the sum over all paths diverges. It is "
            "smaller by a path decay gamma, which softmax has not: its rows sum to 1."
        )
    return radius


def neumann_kernel(matrix: Tensor) -> Tensor:
    """Computes I + M + M^2 + ... = (I - M)^-1 of M (..., N, N).

    Of a Markov chain (`is_chain`) entry (i, j) is how often a walk that starts in i is expected to be in j.

    Raises:
        DivergenceError: the sum has no limit.
    """
    require_convergent(matrix)
    return torch.linalg.inv(_identity(matrix) - matrix)


def absorption_probabilities(matrix: Tensor) -> Tensor:
    """Computes (I - M)^-1 diag(R) of M (..., N, N): of a chain, the probability that a walk from i ends in j.

    Rows sum to 1 for every M, chain or not.

    Raises:
        DivergenceError: the sum over paths has no limit.
    """
    return neumann_kernel(matrix) * absorption(matrix)[..., None, :]


def katz(matrix: Tensor) -> Tensor:
    """Computes Katz in-centrality e^T ((I - M)^-1 - I) of M (..., N, N): all paths that lead to a token, (..., N).

    Raises:
        DivergenceError: the sum over paths has no limit.
    """
    require_convergent(matrix)
    return katz_centrality(matrix)


def pagerank(weights: Tensor, damping: float = DAMPING) -> Tensor:
    """Computes PageRank of graphs with edge weights (..., N, N): (..., N), sums to 1.

    Rows are divided by their sums, so gamma and any norm of the matrix have no influence; a row of zeros links to all
    tokens alike. Solved directly, p = d P^T p + (1 - d) / N; what rows of zeros lose is spread evenly, as all the rest
    of p's source is, and so comes back with the division by the sum. NaN where a weight is negative.
    """
    size = weights.shape[-1]
    out = weights.sum(-1, keepdim=True)
    steps = weights / out.where(out > 0, 1)
    rank = torch.linalg.solve(_identity(steps) - damping * steps.mT, steps.new_full(steps.shape[:-1], 1 / size))
    negative = (weights < 0).any(-1).any(-1)
    return (rank / rank.sum(-1, keepdim=True)).masked_fill(negative[..., None], torch.nan)


def eigenvector_centrality(weights: Tensor) -> Tensor:
    """Computes eigenvector centrality x of graphs (..., N, N): x^T W = rho x^T, of length 1 and sum >= 0, (..., N).

    NaN where it is not defined: no eigenvalue of modulus rho is real, positive and single (an empty graph, say, or two
    equal parts without an edge between them).
    """
    values, vectors = torch.linalg.eig(weights.mT)
    moduli, order = values.abs().sort(-1, descending=True)
    first = order[..., :1]
    value = values.gather(-1, first)[..., 0]
    vector = vectors.gather(-1, first[..., None, :].expand(*vectors.shape[:-1], 1))[..., 0].real
    vector = vector / torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
    vector = vector * torch.where(vector.sum(-1, keepdim=True) < 0, -1.0, 1.0)
    gap = moduli[..., 0] - (moduli[..., 1] if weights.shape[-1] > 1 else 0)
    defined = (value.real > 0) & (value.imag.abs() <= SINGLE * moduli[..., 0]) & (gap > SINGLE * moduli[..., 0])
    return vector.masked_fill(~defined[..., None], torch.nan)


def _identity(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
