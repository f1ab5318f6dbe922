"""What can be wrong with a data set is found here, before the first training step."""

from dataclasses import dataclass

import numpy as np

from infvit.config import DataConfig
from infvit.data.build import build_source
from infvit.data.sampler import check_batch
from infvit.data.source import Source, shown
from infvit.errors import DataError


@dataclass(frozen=True)
class Preflight:
    """Both splits, checked.

    Attributes:
        train: The training split.
        val: The held-out split, labelled by the training split's classes.
        classes: Class names in index order.
        lines: What was found: classes, images and first files of each split.
        warnings: What is odd, but does not stop training.
    """

    train: Source
    val: Source
    classes: tuple[str, ...]
    lines: list[str]
    warnings: list[str]


def preflight(data: DataConfig, batch_size: int | None = None) -> Preflight:
    """Opens both splits and checks everything that can be checked without decoding images.

    Args:
        data: The data set.
        batch_size: Global batch, to see that the training split fills at least one; None leaves that out.

    Raises:
        ConfigError: A key is missing or wrong.
        DataError: The data is not what the configuration promises; the message says where and what to do.
    """
    train = build_source(data, "train")
    val = build_source(data, "val", train.classes)
    if data.num_classes is not None and data.num_classes != len(train.classes):
        raise DataError(
            f"data.num_classes={data.num_classes}, but the training split has {len(train.classes)} classes "
            f"({shown(train.classes)}); leave data.num_classes out, or give data with that many classes."
        )
    lines: list[str] = []
    warnings: list[str] = []
    for split, source in (("train", train), ("val", val)):
        counts = _images_per_class(source, split)
        present = [name for name, count in zip(source.classes, counts, strict=True) if count]
        absent = [name for name, count in zip(source.classes, counts, strict=True) if not count]
        lines.append(f"{split}: {len(source)} images, {len(present)} classes: {shown(present, 10)}")
        lines.append(f"{split}: first files: {', '.join(source.locate(i) for i in range(min(3, len(source))))}")
        warnings += source.warnings
        if absent:
            warnings.append(
                f"{split}: {len(absent)} of {len(source.classes)} classes have no image and keep their index: "
                f"{shown(absent)}."
            )
    if len(train.classes) == 1:
        warnings.append(f"There is only one class, {train.classes[0]!r}: any model is right. Check data.root.")
    if batch_size is not None:
        check_batch(len(train), batch_size)
    return Preflight(train, val, train.classes, lines, warnings)


def _images_per_class(source: Source, split: str) -> np.ndarray:
    """Counts the images of each class and checks that every label is one."""
    if len(source) == 0:
        raise DataError(f"The {split} split has no images; check data.root and the split's name.")
    targets = np.fromiter((source.target(i) for i in range(len(source))), np.int64, len(source))
    outside = np.flatnonzero((targets < 0) | (targets >= len(source.classes)))
    if outside.size:
        raise DataError(
            f"{source.locate(int(outside[0]))} has label {targets[outside[0]]}, but there are {len(source.classes)} "
            f"classes (0 to {len(source.classes) - 1}); correct the label or the class list."
        )
    return np.bincount(targets, minlength=len(source.classes))
