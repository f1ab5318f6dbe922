"""The training recipe: optimiser, learning rate, mixing and loss, all from timm and torch."""

from infvit.recipe.loss import training_loss
from infvit.recipe.mixing import BatchMixup
from infvit.recipe.optimizer import build_optimizer, peak_lr
from infvit.recipe.schedule import Schedule

__all__ = ["BatchMixup", "Schedule", "build_optimizer", "peak_lr", "training_loss"]
