"""Scoring a model on a loader of (images, targets, indices)."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from infvit.engine.device import autocast
from infvit.metrics import ClassificationScores


@torch.no_grad()
def validate(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor, Tensor]],
    device: torch.device,
    precision: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    between: Callable[[], None] = lambda: None,
) -> dict[str, float | int]:
    """Scores every sample of the loader once.

    Args:
        model: in any mode; it is put into evaluation mode and back.
        loader: yields images (B, C, H, W), class indices (B,) and sample indices (B,).
        device: where to compute.
        precision: dtype of matrix products.
        memory_format: layout of the images.
        between: called before each batch; may raise to stop.

    Returns:
        top1, top5 (%), loss and the number of images.
    """
    training = model.training
    model.eval()
    scores = ClassificationScores()
    try:
        for images, targets, _ in loader:
            between()
            images = images.to(device, non_blocking=True, memory_format=memory_format)
            with autocast(device, precision):
                logits = model(images)
            scores.update(logits, targets)
    finally:
        model.train(training)
    return scores.result()
