"""Scoring a model on a loader of (images, targets, indices)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from infvit.data import EvalBatch
from infvit.engine.device import autocast
from infvit.engine.processes import ALONE, Processes
from infvit.metrics import ClassificationScores


@torch.no_grad()
def validate(
    model: nn.Module,
    loader: DataLoader[EvalBatch],
    device: torch.device,
    precision: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    between: Callable[[], None] = lambda: None,
    processes: Processes = ALONE,
    blank: Tensor | None = None,
    observe: Callable[[EvalBatch, Tensor], None] = lambda batch, logits: None,
) -> dict[str, float | int]:
    """Scores every sample once, each process those of its own loader.

    Args:
        model: in any mode; it is put into evaluation mode and back.
        loader: yields the batches of this process; it may have fewer than the others, or none.
        device: where to compute.
        precision: dtype of matrix products.
        memory_format: layout of the images.
        between: called before each batch, equally often on all processes; may raise to stop.
        processes: this one and the others.
        blank: an image (1, C, H, W) to run through a sharded model while only the other processes have a batch.
        observe: called with each batch and its logits, on the process that has them.

    Returns:
        top1, top5 (%), loss and the number of images, of all processes together.
    """
    training = model.training
    model.eval()
    scores = ClassificationScores()
    try:
        batches = iter(loader)
        for _ in range(int(processes.table([len(loader)]).max())):
            between()
            batch = next(batches, None)
            if batch is None or not len(batch.targets):
                if batch is not None:
                    observe(batch, torch.empty(0, 0))
                if blank is not None:
                    model(blank.to(device))
                continue
            images = batch.images.to(device, non_blocking=True, memory_format=memory_format)
            with autocast(device, precision):
                logits = model(images)
            scores.update(logits, batch.targets)
            observe(batch, logits)
    finally:
        model.train(training)
    return ClassificationScores(processes.table(scores.totals).sum(0).tolist()).result()
