"""Removal of patches against sets made by hand, and areas against integrals that are known."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from infvit.errors import ConfigError
from infvit.metrics.perturbation import (
    SHARES,
    area_under,
    fill,
    normalised_curves,
    random_ranks,
    removal_ranks,
    removed_counts,
    without_patches,
)


@pytest.mark.parametrize("patches", [1, 4, 9, 10, 64, 144, 196, 225, 256, 1369])
def test_counts_round_half_up(patches: int) -> None:
    """Against exact fractions: 5 % of 10 is one half and removes one; floats would give 24 for 35 % of 70."""
    exact = [math.floor(Fraction(share, 100) * patches + Fraction(1, 2)) for share in range(0, 101, 5)]
    assert removed_counts(patches) == tuple(exact)
    assert exact[0] == 0
    assert exact[-1] == patches
    assert removed_counts(10)[:4] == (0, 1, 1, 2)


def test_ties_are_removed_by_ascending_index_in_both_orders() -> None:
    """ReLU makes many exact zeros; of equal patches the first goes first, whichever end comes first."""
    relevance = torch.tensor([[0.0, 2.0, 0.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0, 3.0]])
    most, least = removal_ranks(relevance, True), removal_ranks(relevance, False)
    assert most[0].argsort().tolist() == [1, 4, 3, 0, 2]
    assert least[0].argsort().tolist() == [0, 2, 3, 1, 4]
    assert most[1].tolist() == least[1].tolist() == [0, 1, 2, 3, 4]


def test_a_long_map_of_zeros_keeps_the_order_of_the_patches() -> None:
    zeros = torch.zeros(3, 196)
    zeros[:, 150:] = torch.arange(46.0)
    assert removal_ranks(zeros, False)[0].argsort()[:151].tolist() == [*range(151)]  # patch 150 is 0 as well
    assert removal_ranks(zeros, True)[2].argsort()[-151:].tolist() == [*range(151)]


def test_the_random_order_belongs_to_the_image() -> None:
    assert random_ranks(49, 0, 7).tolist() == random_ranks(49, 0, 7).tolist()
    assert sorted(random_ranks(49, 0, 7).tolist()) == [*range(49)]
    assert random_ranks(49, 0, 7).tolist() != random_ranks(49, 0, 8).tolist()
    assert random_ranks(49, 1, 7).tolist() != random_ranks(49, 0, 7).tolist()


def test_patches_are_removed_where_they_are() -> None:
    """Patch 1 of two rows of three, 4 x 6 px each, is on the upper edge in the middle; nothing else changes."""
    images = torch.randn(2, 3, 8, 18)
    removed = torch.tensor([[False, True, False, False, False, False], [False] * 5 + [True]])
    out = without_patches(images, torch.full((1, 1, 1, 1), 9.0), removed, (2, 3))
    assert (out[0, :, :4, 6:12] == 9).all()
    assert (out[1, :, 4:, 12:] == 9).all()
    assert int((out == 9).sum()) == 2 * 3 * 24
    assert_close(out.where(out != 9, 0), images.where(out != 9, 0), rtol=0, atol=0)


def test_fillings_in_pixel_space() -> None:
    """mean is the data set's mean colour, black is 0, blur keeps a constant image and the mean of any."""
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.25, 0.5]
    images = torch.randn(2, 3, 40, 40, dtype=torch.float64)

    def pixels(kind: str) -> torch.Tensor:
        normalised = fill(images, kind, mean, std, 3.0).expand_as(images)
        return normalised * torch.tensor(std).view(-1, 1, 1) + torch.tensor(mean).view(-1, 1, 1)

    assert_close(pixels("mean")[1, :, 3, 5], torch.tensor(mean, dtype=torch.float64))
    assert pixels("black").abs().max() < 1e-7
    assert fill(images[:, :1], "black", [0.5], [0.25], 3.0).flatten().tolist() == [-2.0]
    kernel = torch.exp(-(torch.arange(-9.0, 10, dtype=torch.float64) ** 2) / (2 * 3.0**2))
    kernel = kernel / kernel.sum()
    expected = torch.einsum("i,j,ij->", kernel, kernel, images[0, 1, 11:30, 11:30])
    assert_close(fill(images, "blur", mean, std, 3.0)[0, 1, 20, 20], expected)
    with pytest.raises(ConfigError, match="too wide"):
        fill(images, "blur", mean, std, 14.0)


def test_curves_are_divided_by_the_intact_score_and_clipped() -> None:
    scores = np.array([[0.5, 0.25, 0.75, 0.0], [0.8, 0.8, 0.4, 0.2]])
    assert normalised_curves(scores).tolist() == [[1.0, 0.5, 1.0, 0.0], [1.0, 1.0, 0.5, 0.25]]


def test_areas_of_known_curves() -> None:
    """The trapezoid rule is exact on straight lines, and known on a square: 1/3 + h^2 / 6."""
    x = np.array(SHARES) / 100
    assert len(x) == 21
    curves = np.stack([np.ones(21), 1 - x, x**2, (x == 0).astype(float)])
    assert area_under(curves) == pytest.approx([1, 0.5, 1 / 3 + 0.05**2 / 6, 0.025])
