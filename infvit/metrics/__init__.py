"""Measures of what a model predicts."""

from infvit.metrics.classification import ClassificationScores

__all__ = ["ClassificationScores"]
