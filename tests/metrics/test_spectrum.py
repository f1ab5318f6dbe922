"""Spectral radius and leading eigenvector against NumPy's and SciPy's dense solvers, and where the answer is known."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch

from infvit.metrics import spectrum
from infvit.metrics.spectrum import leading_eigenvector, spectral_radius


@pytest.mark.parametrize("size", [1, 2, 3, 17, 40])
@pytest.mark.parametrize("kind", ["signed", "nonnegative", "sparse"])
def test_radius_against_numpy(size: int, kind: str) -> None:
    draw = np.random.default_rng(size)
    m = draw.normal(size=(3, 2, size, size))
    m = np.abs(m) if kind == "nonnegative" else np.where(draw.random(m.shape) < 0.2, m, 0) if kind == "sparse" else m
    expected = np.abs(np.linalg.eigvals(m)).max(-1)
    assert spectral_radius(torch.from_numpy(m)).numpy() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    single = spectral_radius(torch.from_numpy(m).float())
    assert single.dtype == torch.float32
    assert single.numpy() == pytest.approx(expected, rel=3e-4, abs=1e-6)


def chain(size: int, last: float) -> np.ndarray:
    """A nilpotent chain, of large entries, beside one small loop: its powers up to N say nothing of the radius."""
    m = np.diag(np.ones(size - 1), 1)
    m[-1, -1] = last
    return m


@pytest.mark.parametrize(
    ("matrix", "radius"),
    [
        ([[0, 1], [0, 0]], 0), (chain(40, 0), 0), (chain(40, 1e-3), 1e-3),  # nilpotent, and almost
        ([[0, 1], [1, 0]], 1), ([[0, -1], [1, 0]], 1),  # periodic; a rotation, with complex eigenvalues
        ([[0.5, 1], [0, 0.5]], 0.5),  # defective
        ([[0.2, 0, 0], [0, 0, 3], [0, 3, 0]], 3),  # reducible, the larger part periodic
        (np.zeros((3, 3)), 0), (np.full((5, 5), 0.2), 1), (-np.eye(4) * 0.3, 0.3), ([[1e-200]], 1e-200),
        (np.eye(3) * 1e30, 1e30),
    ],
)  # fmt: skip
def test_radius_where_it_is_known(matrix: object, radius: float) -> None:
    found = float(spectral_radius(torch.tensor(np.array(matrix, dtype=float))))
    assert found == pytest.approx(radius, rel=1e-10, abs=0)


def test_radius_is_not_that_of_the_first_powers() -> None:
    """A nilpotent matrix whose first norms, squared 5.66, 4 and 2 at n = 1, 2, 4, are those of a radius of 0.84."""
    m = np.zeros((8, 8))
    m[:6, :6] = np.diag(np.ones(5), 1)
    m[6, 7] = (4 * 2**0.5 - 5) ** 0.5
    assert float(spectral_radius(torch.from_numpy(m))) == 0


def test_radius_takes_few_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """What remains of the norms' constant factor would halve with each product: 45 of them."""
    products: list[int] = []
    original = spectrum._normalised
    monkeypatch.setattr(spectrum, "_normalised", lambda m: products.append(1) or original(m))
    spectral_radius(torch.rand(3, 40, 40, dtype=torch.float64))
    assert len(products) <= 10


def test_radius_of_what_is_not_finite_is_nan_and_hurts_no_other() -> None:
    stack = torch.eye(3, dtype=torch.float64).repeat(2, 1, 1) * 0.25
    stack[0, 1, 2] = math.nan
    found = spectral_radius(stack)
    assert found[0].isnan()
    assert float(found[1]) == pytest.approx(0.25)


def perron(matrix: np.ndarray) -> np.ndarray:
    """The leading eigenvector by LAPACK's driver for a range of eigenvalues, which is not the one that torch calls."""
    size = len(matrix)
    _, vector = scipy.linalg.eigh(matrix, subset_by_index=[size - 1, size - 1], driver="evx")
    return vector[:, 0] * np.sign(vector[:, 0].sum())


@pytest.mark.parametrize("size", [1, 2, 9, 17, 65, 200])
@pytest.mark.parametrize("activation", ["relu", "gelu", "abs"])
def test_eigenvector_against_scipy(size: int, activation: str) -> None:
    phi = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "abs": torch.abs}[activation]
    q = torch.randn(2, 3, size, 8, dtype=torch.float64)
    matrices = phi(q @ q.mT / 8)
    found = leading_eigenvector(matrices)
    assert found.value.shape == found.single.shape == (2, 3)
    assert found.single.all()
    for at in np.ndindex(2, 3):
        assert found.vector[at].numpy() == pytest.approx(perron(matrices[at].numpy()), abs=1e-8)
        assert float(found.value[at]) == pytest.approx(scipy.linalg.eigvalsh(matrices[at].numpy())[-1], rel=1e-12)


def test_the_iteration_finds_the_eigenvector_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the dense solver, which would take minutes at 4096 tokens."""
    monkeypatch.setattr(spectrum, "_exact", None)
    q = torch.randn(4, 100, 8, dtype=torch.float64)
    matrices = (q @ q.mT).relu()
    for vector, matrix in zip(leading_eigenvector(matrices).vector.numpy(), matrices.numpy(), strict=True):
        assert vector == pytest.approx(perron(matrix), abs=1e-8)


def test_rank_one_is_its_own_eigenvector() -> None:
    u = torch.rand(1, 40, 1, dtype=torch.float64)
    found = leading_eigenvector(u @ u.mT)
    assert found.vector[0].numpy() == pytest.approx((u / u.norm()).squeeze().numpy(), abs=1e-12)
    assert float(found.value) == pytest.approx(float(u.square().sum()))
    assert bool(found.single)


def test_a_small_gap_is_still_resolved() -> None:
    """Two blocks of nearly the same root: one vector of iteration would be a mixture of both."""
    u = torch.zeros(2, 60, dtype=torch.float64)
    u[0, :30], u[1, 30:] = 30**-0.5, 30**-0.5
    found = leading_eigenvector((u.mT * torch.tensor([1.0, 1.0 + 1e-6])) @ u)
    assert bool(found.single)
    assert found.vector.numpy() == pytest.approx(u[1].numpy(), abs=1e-6)


@pytest.mark.parametrize("size", [4, 40])
@pytest.mark.parametrize("kind", ["zero", "identity", "two equal blocks", "negative"])
def test_where_there_is_no_single_eigenvector(size: int, kind: str) -> None:
    m = torch.zeros(size, size, dtype=torch.float64)
    if kind == "identity":
        m.fill_diagonal_(2)
    elif kind == "two equal blocks":
        m[: size // 2, : size // 2] = m[size // 2 :, size // 2 :] = 1
    elif kind == "negative":
        m.fill_diagonal_(-1)
    found = leading_eigenvector(torch.stack([m, torch.ones_like(m)]))
    assert found.single.tolist() == [False, True]
    assert found.vector[1].numpy() == pytest.approx(np.full(size, size**-0.5), abs=1e-9), "its neighbour is untouched"


def test_what_does_not_settle_goes_to_the_dense_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectrum, "STEPS", 1)
    q = torch.randn(3, 40, 8, dtype=torch.float64)
    matrices = (q @ q.mT).relu()
    for vector, matrix in zip(leading_eigenvector(matrices).vector.numpy(), matrices.numpy(), strict=True):
        assert vector == pytest.approx(perron(matrix), abs=1e-8)
