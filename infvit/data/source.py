"""What every data set looks like to the rest of the program: decoded images and labels by index."""

import re
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from PIL import Image

from infvit.data.decode import Opens, decode
from infvit.errors import DataError

Split = Literal["train", "val"]


class Source(Protocol):
    """Images and labels of one split, with random access.

    Attributes:
        classes: Class names in the order of their index.
        native_size: Image side in pixels at which the data set is naturally used.
        warnings: What was odd, but not wrong, when the data set was read: one line each.
    """

    classes: tuple[str, ...]
    native_size: int
    warnings: Sequence[str]

    def __len__(self) -> int:
        """Number of images."""
        ...

    def image(self, index: int) -> Image.Image:
        """Returns the decoded image: mode RGB, or L for one channel. Raises `DataError` when it is damaged."""
        ...

    def target(self, index: int) -> int:
        """Returns the class index."""
        ...

    def locate(self, index: int) -> str:
        """Returns the path, or a description where there is none, for errors and logs."""
        ...


class FileSource:
    """A `Source` over image files, on disk or inside tar files."""

    def __init__(
        self,
        files: Sequence[str | Opens],
        targets: Sequence[int] | np.ndarray,
        classes: Sequence[str],
        in_chans: int,
        warnings: Sequence[str] = (),
        native_size: int = 224,
    ) -> None:
        self.files, self.in_chans = files, in_chans
        self.targets = np.asarray(targets, dtype=np.int64)
        self.classes = tuple(classes)
        self.native_size = native_size
        self.warnings = warnings

    def __len__(self) -> int:
        return len(self.files)

    def image(self, index: int) -> Image.Image:
        return decode(self.files[index], self.in_chans)

    def target(self, index: int) -> int:
        return int(self.targets[index])

    def locate(self, index: int) -> str:
        return str(self.files[index])


class Selection:
    """Some images of another `Source`, with labels of their own."""

    def __init__(
        self,
        source: Source,
        indices: Sequence[int] | np.ndarray,
        targets: Sequence[int] | np.ndarray,
        classes: Sequence[str],
        warnings: Sequence[str] = (),
    ) -> None:
        self.source, self.indices = source, np.asarray(indices, dtype=np.int64)
        self.targets = np.asarray(targets, dtype=np.int64)
        self.classes = tuple(classes)
        self.native_size = source.native_size
        self.warnings: Sequence[str] = [*source.warnings, *warnings]

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, index: int) -> Image.Image:
        return self.source.image(int(self.indices[index]))

    def target(self, index: int) -> int:
        return int(self.targets[index])

    def locate(self, index: int) -> str:
        return self.source.locate(int(self.indices[index]))


def natural_key(name: str) -> tuple[list[int | str], str]:
    """Sort key that puts `img2` before `img10` whatever the case, as timm's readers do.

    Unlike timm's it decides ties (`a` and `A`), so that the order does not depend on the file system.
    """
    parts = re.split(r"(\d+)", name.lower())
    return [int(part) if part.isdecimal() else part for part in parts], name


def class_order(names: Sequence[str]) -> list[str]:
    """Returns class names in index order: by value when all are integers, otherwise naturally."""
    if all(name.isdecimal() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names, key=natural_key)


def label_map(names: Sequence[str], classes: Sequence[str] | None, where: str) -> dict[str, int]:
    """Maps a split's own class names to indices of the class list.

    Args:
        names: Class names of this split.
        classes: Class list of the training split or the checkpoint; None makes `names` the list.
        where: What the names were found in, for the error.

    Raises:
        DataError: A name is not in the class list.
    """
    index = {name: i for i, name in enumerate(names if classes is None else classes)}
    unknown = [name for name in names if name not in index]
    if unknown:
        raise DataError(
            f"{where}: {shown(unknown)} not among the {len(index)} known classes ({shown(list(index))}); "
            "remove or rename what should not be there, or train on data that has these classes."
        )
    return {name: index[name] for name in names}


def shown(names: Sequence[str], most: int = 5) -> str:
    """Lists names for a message, at most `most` of them."""
    rest = len(names) - most
    return ", ".join(repr(name) for name in names[:most]) + (f" and {rest} more" if rest > 0 else "")
