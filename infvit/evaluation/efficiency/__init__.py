"""`eval=efficiency`: latency, memory, FLOPs and energy of models, measured so that ratios hold."""

from infvit.evaluation.efficiency.run import FORMAT, RESULT, efficiency

__all__ = ["FORMAT", "RESULT", "efficiency"]
