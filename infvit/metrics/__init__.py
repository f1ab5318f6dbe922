"""Measures of what a model predicts, of what it looks at, and of how its attention mixes."""

from infvit.metrics.classification import ClassificationScores
from infvit.metrics.localization import Ranking, energy_in_boxes, patch_labels
from infvit.metrics.statistics import Difference, compare_hits, wilson_interval

__all__ = [
    "ClassificationScores",
    "Difference",
    "Ranking",
    "compare_hits",
    "energy_in_boxes",
    "patch_labels",
    "wilson_interval",
]
