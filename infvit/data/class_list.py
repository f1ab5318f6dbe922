"""A subset of the classes by a file that lists them: `data.classes`, ImageNet-100 for one."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from infvit.data.source import Selection, Source, shown
from infvit.errors import DataError, did_you_mean

LISTS = Path(__file__).parent / "class_lists"
"""Lists that come along, `NAME.txt` each; `data.classes=NAME` reads one."""


def read_class_list(file: str, known: Sequence[str]) -> tuple[str, ...]:
    """Reads a class list.

    Args:
        file: Text file with one class name a line, in the order of the labels; empty lines and `#` comments
            are skipped. Or the name of one of `LISTS`.
        known: Classes of the data set.

    Raises:
        DataError: It cannot be read, is empty, or names a class twice or one that the data set does not have.
    """
    ours = {path.stem: path for path in sorted(LISTS.glob("*.txt"))}
    try:
        lines = ours.get(file, Path(file).expanduser()).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.classes={file} cannot be read ({error}); give a text file of class names, or {', '.join(ours)}."
        ) from error
    names: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        name = line.strip()
        if not name or name.startswith("#"):
            continue
        if name not in known:
            raise DataError(
                f"data.classes={file}, line {number}: {name!r} is not among the {len(known)} classes of the data set. "
                f"{did_you_mean(name, known)}"
            )
        if name in names:
            raise DataError(f"data.classes={file}, line {number}: {name!r} stands in line {names[name]} already.")
        names[name] = number
    if not names:
        raise DataError(f"data.classes={file} lists no class; write one name a line.")
    return tuple(names)


def choose_classes(source: Source, classes: Sequence[str]) -> Selection:
    """Keeps the images of the classes listed, labelled by their place in the list."""
    place = {name: i for i, name in enumerate(classes)}
    labels = np.array([place.get(name, -1) for name in source.classes])
    targets = labels[np.fromiter((source.target(i) for i in range(len(source))), np.int64, len(source))]
    kept = np.flatnonzero(targets >= 0)
    if not kept.size:
        raise DataError(
            f"no image is of a class listed ({shown(list(classes))}); the data set has {shown(list(source.classes))}."
        )
    return Selection(source, kept, targets[kept], classes)
