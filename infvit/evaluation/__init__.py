"""What `eval.py` can do, by name."""

from infvit.evaluation.run import EVALUATIONS, evaluate

__all__ = ["EVALUATIONS", "evaluate"]
