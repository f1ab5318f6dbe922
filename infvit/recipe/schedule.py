"""The learning rate as a function of the number of updates done, from timm's schedulers."""

import torch
from timm.scheduler import create_scheduler_v2

from infvit.config import RecipeConfig
from infvit.errors import ConfigError, did_you_mean

SCHEDULES = ("cosine", "constant", "poly", "tanh")


class Schedule:
    """Sets the learning rate of an optimiser before each update. Holds no state, so there is none to restore.

    Without `sched_on_updates` the rate changes once per epoch, as DeiT's does. timm counts the epochs from 0, so the
    first epoch runs at `warmup_lr` and each later one is one epoch ahead of DeiT's own curve, whose first
    two are equal.

    Args:
        optimizer: whose parameter groups are set; their `lr` is the peak rate, their `lr_scale` is respected.
        recipe: kind of schedule, warm-up and end.
        epochs: epochs the schedule spans.
        updates_per_epoch: updates in one epoch.

    Raises:
        ConfigError: a schedule that is not a function of the update count.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, recipe: RecipeConfig, epochs: int, updates_per_epoch: int
    ) -> None:
        if recipe.sched not in SCHEDULES:
            raise ConfigError(f"unknown recipe.sched={recipe.sched!r}. {did_you_mean(recipe.sched, SCHEDULES)}")
        self.optimizer = optimizer
        self.on_updates = recipe.sched_on_updates
        self.updates_per_epoch = updates_per_epoch
        self.scheduler, _ = create_scheduler_v2(
            optimizer,
            sched=recipe.sched,
            num_epochs=epochs,
            warmup_epochs=recipe.warmup_epochs,  # type: ignore[arg-type]  # a fraction works on updates
            warmup_lr=recipe.warmup_lr,
            min_lr=recipe.min_lr,
            step_on_epochs=not self.on_updates,
            updates_per_epoch=updates_per_epoch,
        )

    def set(self, update: int) -> float:
        """Sets the rate of every parameter group for the update with this index (from 0); returns the largest."""
        if self.on_updates:
            self.scheduler.step_update(update)
        else:
            self.scheduler.step(update // self.updates_per_epoch)
        return max(float(group["lr"]) for group in self.optimizer.param_groups)
