"""Running a training: `train` composes, `loop` is the loop, the rest is one concern a file."""

from infvit.engine.train import train

__all__ = ["train"]
