"""Top-1, top-5 and loss over a data set."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F


class NothingScoredError(ValueError):
    """There is no result, because there was no image."""


class ClassificationScores:
    """Sums over samples, so that the result depends neither on the batch size nor on who scored which sample."""

    def __init__(self, totals: Sequence[float] = (0, 0, 0, 0)) -> None:
        """Starts from the `totals` of others, if there are any."""
        self.images, self.top1, self.top5 = map(int, totals[:3])
        self.loss = float(totals[3])

    @property
    def totals(self) -> tuple[float, ...]:
        """Numbers of images, of top-1 and of top-5 hits, and the sum of the losses: what can be added up."""
        return self.images, self.top1, self.top5, self.loss

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Adds a batch: logits (B, num_classes) and class indices (B,). A row that is not finite counts as wrong."""
        logits, targets = logits.detach().cpu().double(), targets.cpu()  # MPS has no float64
        ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices
        hits = (ranked == targets[:, None]) & logits.isfinite().all(1, keepdim=True)
        self.images += len(targets)
        self.top1 += int(hits[:, 0].sum())
        self.top5 += int(hits.sum())
        self.loss += float(F.cross_entropy(logits, targets, reduction="sum"))

    def result(self) -> dict[str, float | int]:
        """Returns top1 and top5 in %, the mean loss, and the number of images.

        Raises:
            NothingScoredError: as it says.
        """
        if not self.images:
            raise NothingScoredError("no image was scored.")
        return {
            "top1": 100.0 * self.top1 / self.images,
            "top5": 100.0 * self.top5 / self.images,
            "loss": self.loss / self.images,
            "images": self.images,
        }
