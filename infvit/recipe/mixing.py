"""Mixup and CutMix, by timm, drawn from (seed, update) so that they depend on nothing else."""

import numpy as np
from timm.data import Mixup
from torch import Tensor

from infvit.config import RecipeConfig


class BatchMixup:
    """Mixes each image with its mirror in the batch; one lambda and one box for the whole update.

    The sampler keeps position p of the global batch in the same micro-batch as its mirror, so mixing the micro-batches
    one by one, on any number of processes, is mixing the global batch.

    Args:
        recipe: alphas, probabilities and label smoothing.
        num_classes: classes of the dense targets.
        seed: the run's seed.
    """

    def __init__(self, recipe: RecipeConfig, num_classes: int, seed: int) -> None:
        self.seed = seed
        self.mixup = Mixup(
            mixup_alpha=recipe.mixup,
            cutmix_alpha=recipe.cutmix,
            prob=recipe.mixup_prob,
            switch_prob=recipe.mixup_switch_prob,
            mode="batch",
            label_smoothing=recipe.smoothing,
            num_classes=num_classes,
        )

    def __call__(self, images: Tensor, targets: Tensor, update: int) -> tuple[Tensor, Tensor]:
        """Mixes a micro-batch in place.

        Args:
            images: (B, C, H, W), B even.
            targets: class indices, (B,).
            update: index of the update.

        Returns:
            The images, and dense targets (B, num_classes) with label smoothing.
        """
        saved = np.random.get_state()
        # timm draws from NumPy's global generator; the third number keeps this stream apart from the others.
        np.random.seed(np.random.SeedSequence((self.seed, update, 1)).generate_state(8))
        try:
            return self.mixup(images, targets)
        finally:
            np.random.set_state(saved)
