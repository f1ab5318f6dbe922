"""Measures of what a model predicts, and of what it costs."""

from infvit.metrics.classification import ClassificationScores
from infvit.metrics.statistics import Difference, compare_hits, wilson_interval

__all__ = ["ClassificationScores", "Difference", "compare_hits", "wilson_interval"]
