"""Dead heads and rows on hand-made matrices and on queries made to point away from the keys."""

import pytest
import torch

from infvit.attention import LinearInfSA, PureInfSA, SoftmaxAttention
from infvit.metrics.health import head_health


def test_by_hand() -> None:
    m = torch.zeros(3, 4, 4)
    m[1, 0, 1] = -0.5  # a row that is not 0 although it sums to less
    m[2] = 0.2
    dead, rows, radius = head_health(m)
    assert dead.tolist() == [True, False, False]
    assert rows.tolist() == pytest.approx([1, 0.75, 0])
    assert radius.tolist() == pytest.approx([0, 0, 0.8])


def test_scores_of_zero_or_less() -> None:
    """Head 0: every score is negative; head 1: those of two queries; head 2: none, but some scores are."""
    q, k = torch.ones(1, 3, 6, 4), torch.ones(1, 3, 6, 4)
    q[0, 0] *= -1
    q[0, 1, 2:4] *= -1
    k[0, 2, 0] *= -1
    dead, rows, radius = head_health(PureInfSA(3, 4, gamma=0.5).matrix(q, k).detach())
    assert dead.tolist() == [[True, False, False]]
    assert rows.tolist()[0] == pytest.approx([1, 2 / 6, 0])
    assert float(radius[0, 0]) == 0
    # Four rows of six equal entries, of norm 1: 4 / sqrt(24).
    assert float(radius[0, 1]) == pytest.approx(0.5 * 4 / 24**0.5, rel=1e-5)
    assert head_health(SoftmaxAttention(3, 4).matrix(q, k)).radius.tolist()[0] == pytest.approx([1, 1, 1], rel=1e-5)
    linear = head_health(LinearInfSA(3, 4, gamma=0.5).matrix(q, k).detach())
    assert linear.dead.tolist() == [[True, False, False]]
    assert linear.radius.tolist()[0] == pytest.approx([0, 0.5, 0.5], rel=1e-4)
