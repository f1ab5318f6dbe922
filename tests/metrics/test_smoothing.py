"""Over-smoothing measures against NumPy's FFT, all pairs and singular values, and where the answer is known."""

import numpy as np
import pytest
import torch

from infvit.metrics.smoothing import effective_rank, high_frequency_share, token_cosine


def test_high_frequencies_against_the_fourier_transform() -> None:
    x = torch.randn(3, 13, 5, dtype=torch.float64) + 0.7
    energy = np.abs(np.fft.fft(x.numpy(), axis=1)) ** 2
    assert high_frequency_share(x).numpy() == pytest.approx(energy[:, 1:].sum((1, 2)) / energy.sum((1, 2)), abs=1e-12)


def test_cosine_against_all_pairs() -> None:
    x = torch.randn(2, 7, 4, dtype=torch.float64) + 0.5
    for at in range(2):
        pairs = [
            float(x[at, i] @ x[at, j] / x[at, i].norm() / x[at, j].norm())
            for i in range(7) for j in range(7) if i != j
        ]  # fmt: skip
        assert float(token_cosine(x)[at]) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_effective_rank_against_its_definition() -> None:
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    for at in range(2):
        s = np.linalg.svd(x[at].numpy(), compute_uv=False)
        p = s / s.sum()
        assert float(effective_rank(x)[at]) == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-12)


def test_equal_tokens() -> None:
    x = torch.randn(1, 1, 6, dtype=torch.float64).expand(1, 8, 6)
    assert float(high_frequency_share(x)) == pytest.approx(0, abs=1e-25)
    assert float(token_cosine(x)) == pytest.approx(1)
    assert float(effective_rank(x)) == pytest.approx(1, abs=1e-9)


def test_orthogonal_tokens() -> None:
    x = 3 * torch.eye(5, dtype=torch.float64)[None]
    assert float(high_frequency_share(x)) == pytest.approx(0.8)  # the mean has 5 entries of 1/5: a fifth of the energy
    assert float(token_cosine(x)) == pytest.approx(0, abs=1e-15)
    assert float(effective_rank(x)) == pytest.approx(5)


def test_opposite_tokens_have_no_mean() -> None:
    x = torch.tensor([[[1.0, 2.0], [-1.0, -2.0]]])
    assert float(high_frequency_share(x)) == pytest.approx(1)
    assert float(token_cosine(x)) == pytest.approx(-1)


def test_tokens_of_zero_have_no_direction() -> None:
    x = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]])
    assert float(token_cosine(x)) == pytest.approx(0.5**0.5)


def test_what_is_not_defined_is_nan() -> None:
    for x in (torch.zeros(1, 4, 3), torch.tensor([[[1.0, 2.0], [0.0, 0.0]]]), torch.ones(1, 1, 3)):
        assert token_cosine(x).isnan().all()
    assert high_frequency_share(torch.zeros(1, 4, 3)).isnan().all()
    assert effective_rank(torch.zeros(1, 4, 3)).isnan().all()
    assert float(effective_rank(torch.ones(1, 1, 3))) == pytest.approx(1)


def test_half_precision_is_measured_in_double() -> None:
    x = torch.full((1, 2000, 4), 100.0, dtype=torch.float16)  # its sum of squares overflows
    assert float(high_frequency_share(x)) == pytest.approx(0, abs=1e-12)
    assert float(token_cosine(x)) == pytest.approx(1)
