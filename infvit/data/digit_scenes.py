"""Digits in photographs: a classification task whose evidence has a known place.

Each scene is a crop of one of scikit-learn's two photographs, dimmed, with one handwritten digit pasted on it in a
bright random colour at a random place and size. The label is the digit and the box is where its strokes are, so that
attention maps can be scored without annotated data. Scene `index` is a function of (generator seed, split, index).
"""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_image

from infvit.config import DataConfig
from infvit.data.decode import to_mode
from infvit.data.digits import NAMES, digit_arrays
from infvit.data.source import Split, label_map

TRAIN_SCENES = 4000
SIDE = 48
DIM = 0.5
"""Brightness of the photograph. Every channel of a stroke's colour is brighter than this, so strokes always show."""


@dataclass(frozen=True)
class Scene:
    """One generated image.

    Attributes:
        image: Scene as uint8 (side, side, 3).
        background: The same crop without the digit.
        box: Smallest half-open pixel box (x0, y0, x1, y1) that holds every pixel of the strokes.
        label: The digit.
    """

    image: np.ndarray
    background: np.ndarray
    box: tuple[int, int, int, int]
    label: int


class DigitScenes:
    """Generated scenes as a `Source`. Held-out scenes use held-out digits and the right half of the photographs."""

    warnings: Sequence[str] = ()

    def __init__(self, data: DataConfig, split: Split, classes: Sequence[str] | None) -> None:
        index = label_map(NAMES, classes, "data=digit_scenes")
        self.classes = tuple(NAMES if classes is None else classes)
        self.native_size = SIDE
        self.side = data.img_size or SIDE
        self.split, self.seed, self.in_chans = split, data.generator_seed, data.in_chans
        train = data.num_samples or TRAIN_SCENES
        self.length = train if split == "train" else max(1, train // 5)
        self._index = [index[name] for name in NAMES]

    def __len__(self) -> int:
        return self.length

    def image(self, index: int) -> Image.Image:
        return to_mode(Image.fromarray(self.scene(index).image), self.in_chans)

    def target(self, index: int) -> int:
        return self._index[index % 10]

    def locate(self, index: int) -> str:
        return f"digit_scenes[{self.split}][{index}] (data.generator_seed={self.seed})"

    def box(self, index: int) -> tuple[int, int, int, int]:
        """Returns the half-open pixel box (x0, y0, x1, y1) of the digit's strokes in `image(index)`."""
        return self.scene(index).box

    def scene(self, index: int) -> Scene:
        """Generates a scene with everything that is known about it."""
        if not 0 <= index < self.length:
            raise IndexError(index)
        rng = np.random.default_rng((self.seed, self.split == "train", index))
        background = _crop(rng, self.split, self.side)
        glyphs, labels = digit_arrays(self.split)
        label = index % 10  # classes are equally frequent
        glyph = glyphs[rng.choice(np.flatnonzero(labels == label))]

        size = int(rng.integers(round(self.side / 4), round(self.side * 2 / 3) + 1))
        x, y = rng.integers(0, self.side - size + 1, size=2)
        alpha = np.zeros((self.side, self.side))
        alpha[y : y + size, x : x + size] = _strokes(glyph, size)
        colour = np.array(colorsys.hsv_to_rgb(rng.random(), rng.uniform(0, DIM), 1.0)) * 255
        image = background + alpha[:, :, None] * (colour - background)

        rows, columns = np.flatnonzero(alpha.any(1)), np.flatnonzero(alpha.any(0))
        box = (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1)
        return Scene(np.round(image).astype(np.uint8), background, box, label)


def _strokes(glyph: np.ndarray, size: int) -> np.ndarray:
    """Enlarges an 8 x 8 digit to an opacity in [0, 1], float (size, size). Its smear around the strokes is cut off."""
    enlarged = Image.fromarray(glyph.astype(np.float32)).resize((size, size), Image.Resampling.BICUBIC)
    alpha = ((np.asarray(enlarged, dtype=np.float64) - 0.25) / 0.5).clip(0, 1)
    return np.where(alpha < 0.05, 0, alpha)


def _crop(rng: np.random.Generator, split: Split, side: int) -> np.ndarray:
    """Returns a random square of a photograph, uint8 (side, side, 3), dimmed."""
    photo = _photographs(split)[rng.integers(2)]
    window = int(rng.integers(min(side, *photo.size), min(4 * side, *photo.size) + 1))
    x, y = (int(rng.integers(0, length - window + 1)) for length in photo.size)
    crop = photo.resize((side, side), Image.Resampling.BILINEAR, box=(x, y, x + window, y + window))
    return np.asarray(crop)


@cache
def _photographs(split: Split) -> tuple[Image.Image, Image.Image]:
    """Returns the split's part of both photographs: the left half to train on, the right half held out."""
    parts = []
    for name in ("china.jpg", "flower.jpg"):
        pixels = load_sample_image(name) * DIM
        middle = pixels.shape[1] // 2
        part = pixels[:, :middle] if split == "train" else pixels[:, middle:]
        parts.append(Image.fromarray(np.floor(part).astype(np.uint8)))
    return parts[0], parts[1]
