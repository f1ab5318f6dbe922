"""The held-out images as evaluations take them that look into a model and not at its answers: labels play no part."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from infvit.data import DATASETS, Source, build_source
from infvit.data.folders import scan, split_path
from infvit.data.source import FileSource, Selection, natural_key
from infvit.errors import DataError
from infvit.evaluation.rebuild import Rebuilt


def open_images(rebuilt: Rebuilt) -> Source:
    """Opens the held-out split, under labels of its own: a model of other classes can be looked into as well.

    Of a folder all images are taken, those outside the class folders too, unless `data.classes` chooses some.

    Raises:
        DataError: there are none.
    """
    data = rebuilt.data
    source: Source
    if data.classes is not None or data.name not in DATASETS:
        source = build_source(data, "val", rebuilt.classes)
    elif data.name in ("folder", "imagenet"):
        path = split_path(data, "val")
        listing = scan(path)
        files = [file for files in (*listing.files.values(), listing.stray) for file in files]
        files.sort(key=lambda file: natural_key(str(file)))
        listing.stray = []  # not passed over here: no warning
        source = FileSource(files, np.zeros(len(files)), ("",), data.in_chans, listing.warnings(str(path)))
    else:
        source = DATASETS[data.name](data, "val", None)
    if not len(source):
        raise DataError(f"the {data.val_split} split of {data.name} ({data.root or 'embedded'}) has no images.")
    return source


def select(source: Source, indices: Sequence[int]) -> Selection:
    """Returns some images as a source of their own."""
    return Selection(source, indices, np.zeros(len(indices)), source.classes)


def pixels(images: Tensor, rebuilt: Rebuilt) -> Tensor:
    """Returns images (B, C, H, W) as they were before normalisation, (B, H, W, C) in [0, 1], on the CPU."""
    mean, std = (
        torch.tensor(values, dtype=torch.float32)[:, None, None] for values in (rebuilt.data.mean, rebuilt.data.std)
    )
    return (images.float().cpu() * std + mean).clamp(0, 1).permute(0, 2, 3, 1)
