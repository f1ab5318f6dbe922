"""Localisation against scikit-learn, map by map, and against maps whose answer is known."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score, roc_curve

from infvit.metrics import Ranking, energy_in_boxes, patch_labels


def cases() -> tuple[np.ndarray, np.ndarray]:
    """Labels and maps: continuous, with ties, mostly zero, signed; from one positive to all but one."""
    rng = np.random.default_rng(0)
    maps = rng.normal(size=(40, 49))
    maps[10:20] = maps[10:20].round(1)
    maps[20:30] = np.maximum(maps[20:30] - 1, 0)
    labels = rng.random((40, 49)) < rng.random((40, 1))
    labels[:, 0], labels[:, 1] = True, False
    labels[0], labels[1] = np.arange(49) == 3, np.arange(49) != 3
    return labels, maps


def test_areas_against_scikit_learn() -> None:
    labels, maps = cases()
    ranking = Ranking.of(labels, maps)
    rows = list(zip(labels, maps, strict=True))
    assert ranking.roc_auc() == pytest.approx([roc_auc_score(*row) for row in rows], abs=1e-12)
    assert ranking.average_precision() == pytest.approx([average_precision_score(*row) for row in rows], abs=1e-12)


def test_mean_curves_against_scikit_learn() -> None:
    """ROC is linear between thresholds, precision that of the first threshold which reaches a recall."""
    labels, maps = cases()
    ranking, grid = Ranking.of(labels, maps), np.linspace(0, 1, 41)
    true, precision = [], []
    for row, values in zip(labels, maps, strict=True):
        x, y, _ = roc_curve(row, values, drop_intermediate=False)
        x, y = np.r_[0, x], np.r_[0, y]
        true.append([np.interp(g, x, y) if g not in x else y[x == g].max() for g in grid])
        p, r, _ = precision_recall_curve(row, values)
        precision.append([p[np.flatnonzero(r >= g - 1e-12)[-1]] if g else p[-2] for g in grid])
    assert ranking.mean_roc(grid) == pytest.approx(np.mean(true, 0), abs=1e-12)
    assert ranking.mean_precision(grid[1:]) == pytest.approx(np.mean(precision, 0)[1:], abs=1e-12)


def test_maps_whose_answer_is_known() -> None:
    """The box itself 1, its opposite 0; a constant one 0.5 and the prevalence, not the 0.6 of a trapezoid under PR."""
    labels = np.zeros((1, 25), dtype=bool)
    labels[0, :5] = True
    box = labels.astype(float)
    for values, roc, pr in ((box, 1, 1), (np.full((1, 25), 0.3), 0.5, 0.2), (np.zeros((1, 25)), 0.5, 0.2)):
        ranking = Ranking.of(labels, values)
        assert (ranking.roc_auc(), ranking.average_precision()) == (pytest.approx(roc), pytest.approx(pr))
    inverted = Ranking.of(labels, 1 - box)
    assert inverted.roc_auc() == 0
    assert inverted.average_precision() == pytest.approx(0.2)  # one threshold before it takes them all


def test_undefined_images_are_refused() -> None:
    maps = np.ones((2, 4))
    for labels in ([[True] * 4, [True, False] * 2], [[True, False] * 2, [False] * 4]):
        with pytest.raises(ValueError, match="one class only"):
            Ranking.of(np.array(labels), maps)
    maps[1, 2] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        Ranking.of(np.array([[True, False] * 2] * 2), maps)


def test_energy_is_the_share_inside() -> None:
    """3 of 4 units lie inside; a share of nothing, or of a signed map, has no meaning."""
    labels = np.array([[True, True, False, False]] * 4)
    maps = np.array([[1.0, 2, 1, 0], [0, 0, 0, 0], [2, -1, 1, 0], [0, 0, 1, 1]])
    assert energy_in_boxes(labels, maps) == pytest.approx([0.75, np.nan, np.nan, 0], nan_ok=True)


def test_a_patch_counts_by_its_centre_and_edges_are_half_open() -> None:
    """Patches of 4 px: centres at 2, 6, 10. A box that ends at a centre leaves it out, one that begins there has it."""
    size, grid = (8, 12), (2, 3)

    def labels(*boxes: tuple[float, ...]) -> list[int]:
        return patch_labels(np.array(boxes), size, grid).astype(int).tolist()

    assert labels((2, 2, 6, 6)) == [1, 0, 0, 0, 0, 0]
    assert labels((2, 2, 6.1, 6.1)) == [1, 1, 0, 1, 1, 0]
    assert labels((2.1, 0, 12, 8)) == [0, 1, 1, 0, 1, 1]
    assert labels((0, 0, 1, 1)) == [0] * 6
    assert labels((0, 0, 4, 4), (1, 1, 12, 4), (8, 0, 12, 8)) == [1, 1, 1, 0, 0, 1]
