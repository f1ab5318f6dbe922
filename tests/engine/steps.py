"""A run built and taken through its first updates, on one process or as one of several."""

from pathlib import Path
from typing import NamedTuple

import torch

from infvit.config import TrainConfig
from infvit.engine.loop import Run, train_update
from infvit.engine.parallel import shared_like, whole
from infvit.engine.plan import make_plan
from infvit.engine.processes import ALONE, Processes
from infvit.engine.setup import build_run, connect
from infvit.engine.signals import StopRequest

# What differs between processes on purpose: dropout is drawn by each for its own images.
UNDRAWN = {"recipe.drop_path": 0.0, "recipe.drop": 0.0}


class Steps(NamedTuple):
    """Loss, gradient norm, images and gradients of the last update, and the weights after it; whole tensors."""

    loss: float
    norm: float
    images: int
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def build(config: TrainConfig, processes: Processes = ALONE) -> Run:
    """Builds a run without starting it, and connects its processes."""
    Path(str(config.run_dir)).mkdir(exist_ok=True)
    run = build_run(make_plan(config, processes), StopRequest())
    connect(run)
    return run


def awake(run: Run) -> Run:
    """Fills the head, which starts at zero and so lets no gradient through."""
    head = run.state.model.head.weight
    values = torch.empty(head.shape).normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        head.copy_(shared_like(values, head))
    return run


def first_updates(run: Run, count: int = 1) -> Steps:
    """Does the first updates."""
    run.training.train()
    run.sampler.start(0, 0)
    batches = iter(run.train_loader)
    for update in range(count):
        run.schedule.set(update)
        loss, norm, images, done = train_update(run, (next(batches) for _ in range(run.sampler.micro_batches)))
        assert done
    named = run.state.model.named_parameters()
    gradients = {name: whole(p.grad).clone() for name, p in named if p.grad is not None}
    return Steps(loss, norm, images, gradients, whole(dict(run.state.model.state_dict())))
