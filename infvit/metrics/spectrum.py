"""Eigenvalues of token graphs: spectral radius of any square matrix, leading eigenvector of a symmetric one."""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 8
"""Vectors of the subspace iteration. The more, the faster it turns towards the leading one."""
STEPS = 300
SINGLE = 1e-9
"""A leading eigenvalue is single when the next is smaller by more than this share of it. Nearer than that, double
precision does not fix the eigenvector to the six digits that are asked for."""


def spectral_radius(matrices: Tensor) -> Tensor:
    """Computes the largest modulus of an eigenvalue by repeated squaring.

    Gelfand's formula, rho = lim ||M^n||^(1/n), at n = 1, 2, 4, ...: right for every matrix, also where a power
    iteration is not (periodic, reducible, defective, signed), and made of matrix products only, a stack at a time.

    Args:
        matrices: (..., N, N), float32 or float64.

    Returns:
        The radii, (...,): 0 for a nilpotent matrix, NaN for one that is not finite.
    """
    tolerance = 100 * torch.finfo(matrices.dtype).eps
    power, norm = _normalised(matrices)
    vanished = norm == 0
    rate, estimate = norm.log(), torch.full_like(norm, torch.nan)  # rate: log ||M^n|| / n
    for step in range(1, 50):
        power, norm = _normalised(power @ power)
        vanished |= norm == 0
        last_rate, last_estimate = rate, estimate
        rate = rate + norm.log() / 2**step
        estimate = 2 * rate - last_rate  # log(||M^2n|| / ||M^n||) / n: without the constant factor of both norms
        settled = vanished | ~((estimate - last_estimate).abs() > tolerance)
        # Powers up to N may still be those of a nilpotent part, which says nothing of the limit.
        if 2**step > matrices.shape[-1] and settled.all() and step > 1:
            break
    return estimate.exp().masked_fill(vanished, 0)


def _normalised(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns matrices divided by their Frobenius norms (those of norm 0 as they are), and the norms."""
    norm = torch.linalg.matrix_norm(matrices)
    return matrices / norm.masked_fill(norm == 0, 1)[..., None, None], norm


class Leading(NamedTuple):
    """The largest eigenvalue of each of a stack of symmetric matrices.

    Attributes:
        value: (...,).
        vector: Its eigenvector, (..., N), of length 1 and with a sum of at least 0.
        single: Whether the eigenvalue is positive and single, (...,) bool; otherwise there is no one eigenvector.
    """

    value: Tensor
    vector: Tensor
    single: Tensor


def leading_eigenvector(matrices: Tensor) -> Leading:
    """Finds the largest eigenvalue of symmetric matrices and its eigenvector; Perron's, where no entry is negative.

    By subspace iteration with Rayleigh-Ritz (Saad, Numerical Methods for Large Eigenvalue Problems, ch. 5): it reads
    each matrix some ten times as it lies, where `eigh` needs O(N^3) work and a copy, and several vectors at once show a
    multiple eigenvalue, which one alone cannot. What has not settled after `STEPS` goes to `eigh`.

    Args:
        matrices: (..., N, N), symmetric, finite, float64.
    """
    shape, size = matrices.shape[:-2], matrices.shape[-1]
    stack = matrices.reshape(-1, size, size)
    values, vectors, settled = _subspace(stack) if size > 2 * BLOCK else _exact(stack)
    if not settled.all():
        left = (~settled).nonzero()[:, 0]
        values[left], vectors[left], _ = _exact(stack[left])
    vector = vectors * torch.where(vectors.sum(-1, keepdim=True) < 0, -1.0, 1.0)
    value, following = values[:, -1], values[:, -2] if size > 1 else torch.zeros_like(values[:, -1])
    single = (value > 0) & (value - following > SINGLE * value)
    return Leading(value.reshape(shape), vector.reshape(*shape, size), single.reshape(shape))


def _exact(stack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the two largest eigenvalues, ascending, the eigenvector of the last, and that all of them are right."""
    values, vectors = torch.linalg.eigh(stack)
    return values[:, -2:], vectors[:, :, -1], torch.ones(len(stack), dtype=torch.bool, device=stack.device)


def _subspace(stack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the same, and which of them have settled."""
    size = stack.shape[-1]
    start = torch.randn(size, BLOCK, dtype=stack.dtype, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(start.to(stack.device))[0].expand(len(stack), -1, -1)
    for _ in range(STEPS):
        image = stack @ basis
        values, rotation = torch.linalg.eigh(basis.mT @ image)
        image = image @ rotation
        vector, value = (basis @ rotation[:, :, -1:])[:, :, 0], values[:, -1]
        residual = torch.linalg.vector_norm(image[:, :, -1] - value[:, None] * vector, dim=-1)
        # The error of the vector is at most the residual over the gap. Without a gap the residual alone is to vanish.
        small = 1e-10 * (value - values[:, -2]) + 1e-14 * size**0.5 * values.abs().amax(-1)
        settled = (residual <= small) & (value >= 0)
        if settled.all():
            break
        basis = torch.linalg.qr(image)[0]
    return values[:, -2:].clone(), vector.clone(), settled
