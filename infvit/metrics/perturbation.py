"""MoRF and LeRF: how the score of a class falls when patches are removed in the order of their relevance.

Samek et al. 2017 (arXiv 1509.06321) remove the most relevant first (MoRF); least relevant first (LeRF) as in
"Infinite Self-Attention" (arXiv 2603.00175, Figs. 7 and 8). The shares removed, the rounding and the order of ties are
fixed here, so that a figure can be repeated.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import functional as transforms

from infvit.errors import ConfigError

SHARES = tuple(range(0, 101, 5))
"""Shares of the patches removed, in %: the 21 points of a curve."""

FILLS = ("mean", "black", "blur")
"""What takes the place of removed patches."""


def removed_counts(patches: int, shares: Sequence[int] = SHARES) -> tuple[int, ...]:
    """Returns how many of N patches each share (in %) removes: share x N, half rounded up, in integers."""
    return tuple((2 * share * patches + 100) // 200 for share in shares)


def removal_ranks(relevance: Tensor, most_relevant_first: bool) -> Tensor:
    """Returns when each patch is removed: rank 0 first. Ties go by ascending patch index in both orders.

    Args:
        relevance: (..., N).
        most_relevant_first: MoRF; otherwise LeRF.

    Returns:
        Ranks, int64 (..., N): a permutation of 0 .. N - 1.
    """
    return torch.sort(relevance, dim=-1, descending=most_relevant_first, stable=True).indices.argsort(-1)


def random_ranks(patches: int, seed: int, index: int) -> Tensor:
    """Returns a random order as ranks, int64 (N,): a function of seed and image index alone."""
    return torch.from_numpy(np.random.default_rng((seed, index)).permutation(patches))


def fill(images: Tensor, kind: str, mean: Sequence[float], std: Sequence[float], blur_sigma: float) -> Tensor:
    """Returns what removed patches are filled with, (B, C, height, width) or broadcastable to it.

    Args:
        images: As the model takes them: (pixels - mean) / std.
        kind: `mean`: the data set's mean colour, which is 0 after normalisation. `black`: pixels of value 0.
            `blur`: the image itself after a Gaussian blur.
        mean: Of the normalisation, one value per channel or one for all.
        std: Likewise.
        blur_sigma: Standard deviation of the blur in pixels.

    Raises:
        ConfigError: The blur is wider than the image.
    """
    if kind == "mean":
        return images.new_zeros(1, 1, 1, 1)
    if kind == "black":
        return (-images.new_tensor(mean) / images.new_tensor(std)).view(1, -1, 1, 1)
    reach = int(np.ceil(3 * blur_sigma))
    if reach >= min(images.shape[-2:]):
        raise ConfigError(f"blur_sigma={blur_sigma} is too wide for images of {min(images.shape[-2:])} px.")
    return transforms.gaussian_blur(images, [2 * reach + 1, 2 * reach + 1], [blur_sigma, blur_sigma])


def without_patches(images: Tensor, filling: Tensor, removed: Tensor, grid: tuple[int, int]) -> Tensor:
    """Returns the images with some patches replaced.

    Args:
        images: (B, C, height, width).
        filling: What to put there, broadcastable to the images.
        removed: Which patches, bool (B, N), row by row.
        grid: Rows and columns of the patches; they divide height and width.
    """
    height, width = images.shape[-2] // grid[0], images.shape[-1] // grid[1]
    mask = removed.unflatten(-1, grid).repeat_interleave(height, -2).repeat_interleave(width, -1)
    return torch.where(mask[:, None], filling, images)


def normalised_curves(scores: np.ndarray) -> np.ndarray:
    """Divides curves (..., points) by their first value, that of the intact image, and clips them to [0, 1]."""
    return np.clip(scores / scores[..., :1], 0, 1)


def area_under(curves: np.ndarray, shares: Sequence[int] = SHARES) -> np.ndarray:
    """Returns the area under curves (..., points) by the trapezoid rule, x from 0 to 1 at the nominal shares."""
    return np.trapezoid(curves, np.asarray(shares) / 100, axis=-1)
