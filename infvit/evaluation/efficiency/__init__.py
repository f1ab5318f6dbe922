"""`eval=efficiency`: latency, memory, FLOPs and energy of models, measured so that ratios hold."""

from infvit.evaluation.efficiency.run import RESULT, efficiency

__all__ = ["RESULT", "efficiency"]
