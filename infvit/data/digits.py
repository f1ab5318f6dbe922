"""scikit-learn's handwritten digits: real data that comes with the installation."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from infvit.config import DataConfig
from infvit.data.decode import to_mode
from infvit.data.source import Split, label_map

HELD_OUT = 360
NAMES = tuple("0123456789")


@cache
def digit_arrays(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images, float64 (N, 8, 8) in [0, 1], and labels (N,) of a split; 360 digits are held out, always the
    same ones and in the proportion of the classes."""
    digits = load_digits()
    kept, held_out = train_test_split(
        np.arange(len(digits.target)), test_size=HELD_OUT, stratify=digits.target, random_state=0
    )
    chosen = np.sort(kept if split == "train" else held_out)
    return digits.images[chosen] / 16.0, digits.target[chosen]


class Digits:
    """The digits as a `Source`: 8 x 8 images, which the transforms enlarge."""

    native_size = 16
    warnings: Sequence[str] = ()

    def __init__(self, data: DataConfig, split: Split, classes: Sequence[str] | None) -> None:
        index = label_map(NAMES, classes, "data=digits")
        self.classes = tuple(NAMES if classes is None else classes)
        self.split, self.in_chans = split, data.in_chans
        images, labels = digit_arrays(split)
        self.images = np.round(images * 255).astype(np.uint8)
        self.targets = [index[NAMES[label]] for label in labels]

    def __len__(self) -> int:
        return len(self.targets)

    def image(self, index: int) -> Image.Image:
        return to_mode(Image.fromarray(self.images[index]), self.in_chans)

    def target(self, index: int) -> int:
        return self.targets[index]

    def locate(self, index: int) -> str:
        return f"digits[{self.split}][{index}]"
