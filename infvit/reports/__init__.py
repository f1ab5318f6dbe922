"""Figures and tables made from the files of a run."""

from infvit.reports.curves import draw_curves

__all__ = ["draw_curves"]
