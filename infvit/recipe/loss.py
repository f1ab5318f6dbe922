"""The training loss."""

from torch import Tensor
from torch.nn import functional as F


def training_loss(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Sums the cross-entropy over a micro-batch, in float32.

    A sum and not a mean: divided by the size of the global batch, the gradients of its micro-batches add up to that of
    the one large batch, also when they differ in size.

    Args:
        logits: (B, num_classes).
        targets: class indices (B,), or dense targets (B, num_classes) that have their smoothing already.
        smoothing: label smoothing for class indices.

    Returns:
        A scalar.
    """
    dense = targets.ndim == 2
    return F.cross_entropy(logits.float(), targets, reduction="sum", label_smoothing=0.0 if dense else smoothing)
