"""Measures of what a model predicts, and of how its attention mixes."""

from infvit.metrics.classification import ClassificationScores
from infvit.metrics.statistics import Difference, compare_hits, wilson_interval

__all__ = ["ClassificationScores", "Difference", "compare_hits", "wilson_interval"]
