"""Table 2: every statistic against SciPy, head by head; degenerate heads; a matrix formed once."""

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from torch.nn import functional as F

from infvit.attention import LinearInfSA
from infvit.errors import DataError
from infvit.metrics import alignment as module
from infvit.metrics.alignment import REASONS, STATISTICS, alignment, cosine, pearson, spearman


def weights_of(q: torch.Tensor) -> torch.Tensor:
    return LinearInfSA(q.shape[1], q.shape[-1]).double().token_map(q, q)


@pytest.mark.parametrize("activation", ["relu", "gelu", "abs"])
def test_against_scipy(activation: str) -> None:
    phi = {"relu": F.relu, "gelu": F.gelu, "abs": torch.abs}[activation]
    # Away from the origin, as trained queries are: the order of the entries is then no accident of rounding.
    q = torch.randn(2, 3, 30, 4, dtype=torch.float64) * 3 + 1
    a = weights_of(q)
    found = alignment(q, a, phi)
    assert tuple(found.values) == STATISTICS
    assert not any(reason.any() for reason in found.excluded.values())
    for at in np.ndindex(2, 3):
        matrix = phi(q[at] @ q[at].T / 4).numpy()
        vector = scipy.linalg.eigh(matrix, driver="evr")[1][:, -1]
        v, w, ones = vector * np.sign(vector.sum()), a[at].numpy(), np.ones(30)
        columns = matrix.sum(0)
        expected = {
            "cosine": v @ w / np.linalg.norm(w),
            "spearman": scipy.stats.spearmanr(v, w).statistic,
            "pearson": scipy.stats.pearsonr(v, w).statistic,
            "uniform_cosine": v @ ones / 30**0.5,
            "column_cosine": v @ columns / np.linalg.norm(columns),
            "column_spearman": scipy.stats.spearmanr(v, columns).statistic,
        }
        for name, value in expected.items():
            assert found.values[name][at] == pytest.approx(value, abs=1e-6), name


def test_scaling_by_the_head_dimension_counts_where_the_activation_is_not_homogeneous() -> None:
    q = torch.randn(1, 1, 20, 16, dtype=torch.float64)
    a = torch.rand(1, 1, 20, dtype=torch.float64)
    matrix = F.gelu(q[0, 0] @ q[0, 0].T / 16).numpy()
    vector = scipy.linalg.eigh(matrix)[1][:, -1]
    expected = abs(vector @ a[0, 0].numpy()) / float(a.norm())
    assert alignment(q, a, F.gelu).values["cosine"].item() == pytest.approx(expected, abs=1e-9)


def test_rank_one_queries_are_aligned_exactly() -> None:
    """q_i = r_i u: the matrix is r r^T, its eigenvector r, and a is proportional to r too."""
    r = torch.rand(1, 2, 25, 1, dtype=torch.float64) + 0.1
    q = r * torch.randn(1, 2, 1, 6, dtype=torch.float64)
    found = alignment(q, weights_of(q), F.relu).values
    for name in ("cosine", "spearman", "pearson", "column_cosine", "column_spearman"):
        assert found[name] == pytest.approx(np.ones((1, 2)), abs=1e-6), name
    assert (found["uniform_cosine"] < 0.999).all()


def test_heads_without_an_alignment_are_counted_by_reason() -> None:
    q = torch.zeros(1, 5, 20, 20, dtype=torch.float64)
    q[0, 0] = torch.rand(20, 20)  # an ordinary head
    q[0, 1] = torch.eye(20)  # identity: every vector is an eigenvector
    q[0, 2] = torch.rand(20, 20)
    a = torch.rand(1, 5, 20, dtype=torch.float64)
    a[0, 2] = 0  # a dead head; head 3 has a zero matrix
    a[0, 4] = 0  # both: counted once
    found = alignment(q, a, F.relu)
    assert found.excluded[REASONS[0]].tolist() == [[False, False, True, False, True]]
    assert found.excluded[REASONS[1]].tolist() == [[False, True, False, True, False]]
    for values in found.values.values():
        assert np.isfinite(values).tolist() == [[True, False, False, False, False]]
    assert not found.mixed.any()


def test_tokens_outside_of_the_leading_part_are_equal_and_not_in_an_order() -> None:
    """Two groups that do not see each other: the eigenvector is 0 on the smaller, exactly; rounding is no rank."""
    q = torch.zeros(1, 1, 40, 2, dtype=torch.float64)
    q[0, 0, :30, 0] = torch.linspace(1, 2, 30)
    q[0, 0, 30:, 1] = torch.linspace(1, 2, 10)
    a = q[:, :, :, 0].clone()
    assert alignment(q, a, F.relu).values["spearman"].item() == pytest.approx(1, abs=1e-12)


def test_a_uniform_eigenvector_has_no_correlation() -> None:
    q = torch.ones(1, 1, 30, 4, dtype=torch.float64)
    found = alignment(q, torch.rand(1, 1, 30, dtype=torch.float64), F.relu).values
    assert found["uniform_cosine"].item() == pytest.approx(1, abs=1e-12)
    assert np.isnan(found["spearman"].item())
    assert np.isnan(found["pearson"].item())
    assert np.isfinite(found["cosine"].item())


def test_one_token() -> None:
    found = alignment(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1), F.relu).values
    assert found["cosine"].item() == pytest.approx(1)
    assert np.isnan(found["spearman"].item())


def test_mixed_signs_are_reported_and_the_sign_is_chosen() -> None:
    """Under GELU two opposed groups repel each other a little."""
    q = torch.randn(1, 1, 20, 1, dtype=torch.float64).sign() * torch.linspace(1, 2, 20, dtype=torch.float64)[:, None]
    q[0, 0, :15] = q[0, 0, :15].abs()
    q[0, 0, 15:] = -q[0, 0, 15:].abs()
    found = alignment(q, q[..., 0].relu(), F.gelu)
    assert found.mixed.all()
    assert found.values["cosine"].item() > 0.9


@pytest.mark.parametrize("where", ["q", "a"])
def test_nan_is_an_error(where: str) -> None:
    q, a = torch.rand(1, 1, 5, 2), torch.rand(1, 1, 5)
    (q if where == "q" else a)[..., 0] = torch.nan
    with pytest.raises(DataError, match="not finite"):
        alignment(q, a, F.relu)


def test_each_matrix_is_formed_once_and_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 2 * 50 * 50)
    formed: list[tuple[int, ...]] = []

    def phi(scores: torch.Tensor) -> torch.Tensor:
        formed.append(tuple(scores.shape))
        return scores.relu()

    q = torch.randn(3, 3, 50, 8, dtype=torch.float64)
    a = weights_of(q)
    few = alignment(q, a, phi)
    assert sum(shape[0] for shape in formed) == 9
    assert max(shape[0] for shape in formed) == 2
    monkeypatch.undo()
    for name, values in alignment(q, a, F.relu).values.items():
        assert values == pytest.approx(few.values[name], abs=1e-9)


def test_correlations_against_scipy_with_ties() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 4, (5, 30)).astype(float), draw.normal(size=(5, 30))
    for at in range(5):
        assert spearman(x, y)[at] == pytest.approx(scipy.stats.spearmanr(x[at], y[at]).statistic, abs=1e-12)
        assert pearson(x, y)[at] == pytest.approx(scipy.stats.pearsonr(x[at], y[at]).statistic, abs=1e-12)
    assert np.isnan(cosine(np.zeros((1, 3)), np.ones((1, 3)))).all()
