"""Which images an evaluation of attention looks at, and where the objects on them are."""

import csv
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath

import numpy as np

from infvit.config import EvalConfig
from infvit.data import Source
from infvit.data.boxes import Annotation, Boxes, find_annotation, geometry, image_size, inside, open_boxes
from infvit.data.source import Selection, shown
from infvit.data.transforms import Transform
from infvit.errors import DataError
from infvit.evaluation.images import open_images, select
from infvit.evaluation.rebuild import Rebuilt
from infvit.evaluation.scoring import relative
from infvit.metrics import patch_labels

NO_ANNOTATION = "no annotation"

log = logging.getLogger(__name__)


@dataclass
class Chosen:
    """The images that were chosen.

    Attributes:
        source: All images there are.
        order: Indices in the order in which they are drawn: shuffled by the seed, or as listed.
        listed: Whether a list names them.
        files: Their annotations; None: those that the data set itself has, if any.
        boxes: By index, in pixels of what the model sees, float (n, 4).
        labels: By index, whether each patch is in a box, bool (N,); only of images on which some are and some are not.
        excluded: Images without labels, by reason.
        dropped: Boxes that were no boxes, by reason.
    """

    source: Source
    order: list[int]
    listed: bool
    files: Boxes | None = None
    boxes: dict[int, np.ndarray] = field(default_factory=dict)
    labels: dict[int, np.ndarray] = field(default_factory=dict)
    excluded: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def first(self, number: int) -> list[int]:
        """Returns so many images, or all of a list."""
        return self.order if self.listed else self.order[:number]

    def name(self, index: int, root: str | None) -> str:
        """Returns how an image is called in results."""
        return relative(self.source.locate(index), root)

    def annotation(self, index: int) -> Annotation | None:
        """Returns the annotation of an image; None: it has none.

        Raises:
            DataError: It is damaged, or two have the image's name.
        """
        stem = PurePath(self.source.locate(index)).stem
        return find_annotation(self.source, index, self.files, self._stems[stem] > 1)

    @cached_property
    def _stems(self) -> Counter[str]:
        """How many images have a file stem; only asked for where there are files of annotations."""
        places = range(len(self.source)) if self.files else ()
        return Counter(PurePath(self.source.locate(index)).stem for index in places)

    def selection(self, indices: Sequence[int]) -> Selection:
        """Returns some images as a source of their own."""
        return select(self.source, indices)


def choose(config: EvalConfig, rebuilt: Rebuilt) -> Chosen:
    """Opens the held-out split and puts its images in the order of the seed, or those of `quality.image_list`.

    Raises:
        DataError: There are none, a listed one is not there, or `quality.annotations` cannot be read.
    """
    source = open_images(rebuilt)
    for line in source.warnings:
        log.warning("%s", line)
    quality = config.quality
    files = None if quality.annotations is None else open_boxes(quality.annotations)
    if quality.image_list is not None:
        return Chosen(source, _listed(Path(quality.image_list).expanduser(), source, rebuilt.data.root), True, files)
    order = np.random.default_rng(quality.seed).permutation(len(source))
    return Chosen(source, order.tolist(), False, files)


def _listed(path: Path, source: Source, root: str | None) -> list[int]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            if path.suffix == ".csv":
                names = [row["image"] for row in csv.DictReader(file)]
            else:
                names = [line.strip() for line in file if line.strip()]
    except (OSError, KeyError, UnicodeDecodeError) as error:
        raise DataError(f"quality.image_list={path} cannot be read ({error}); give one image a line.") from error
    places: dict[str, list[int]] = {}
    for index in range(len(source)):
        location = source.locate(index)
        for name in {location, relative(location, root), PurePath(location).name, PurePath(location).stem}:
            places.setdefault(name, []).append(index)
    wrong = [name for name in names if len(places.get(name, [])) != 1]
    if wrong or not names:
        raise DataError(
            f"quality.image_list={path}: {shown(wrong, 3) or 'no image'} not found, or there are several of that name, "
            f"in {root or 'the split'}; images are named by their path below data.root or by their file name."
        )
    return list(dict.fromkeys(places[name][0] for name in names))


def seen_boxes(chosen: Chosen, index: int, transform: Transform) -> np.ndarray | str:
    """Returns the boxes of an image in pixels of what the model sees, float (n, 4) with n >= 1, or why it has none.

    Counts in `dropped` what was no box.
    """
    annotation = chosen.annotation(index)
    if annotation is None:
        return NO_ANNOTATION
    size = image_size(chosen.source, index)
    if annotation.size not in (None, size):
        return "size differs from the annotation"
    if not len(annotation.boxes):
        return "no box in the annotation"
    boxes = inside(annotation.boxes, size, chosen.dropped)
    if not len(boxes):
        return "no proper box inside the image"
    boxes = geometry(transform, size).apply(boxes)
    return boxes if len(boxes) else "no box left after the crop"


def place_boxes(chosen: Chosen, transform: Transform, side: int, grid: tuple[int, int], number: int) -> list[int]:
    """Finds the boxes of annotated images, carries them through the transform, and labels the patches.

    Fills `boxes`, `labels`, `excluded` and `dropped`.

    Args:
        chosen: The images; they are taken in their order until `number` of them are annotated.
        transform: Of the evaluation; the boxes go where it takes the pixels.
        side: Of what the model sees, in pixels.
        grid: Rows and columns of the patches.
        number: Of annotated images.

    Returns:
        The annotated images.

    Raises:
        DataError: An annotation is damaged or ambiguous, or none of them is of an image.
    """
    annotated: list[int] = []
    for index in chosen.order:
        if len(annotated) == number and not chosen.listed:
            break
        boxes = seen_boxes(chosen, index, transform)
        if boxes is not NO_ANNOTATION:
            annotated.append(index)
        if isinstance(boxes, str):
            chosen.excluded[boxes] += 1
            continue
        chosen.boxes[index] = boxes
        labels = patch_labels(boxes, (side, side), grid)
        if labels.any() and not labels.all():
            chosen.labels[index] = labels
        else:
            chosen.excluded["every patch in a box" if labels.any() else "no patch centre in a box"] += 1
    if chosen.files is not None and not annotated:
        raise DataError(
            f"quality.annotations has none of the {len(chosen.order)} images (the first: "
            f"{chosen.source.locate(chosen.order[0])}); the files must be called like the images."
        )
    for what, count in chosen.dropped.items():
        if count:
            log.warning("Left out %d %s: %s.", count, "box" if count == 1 else "boxes", what)
    return annotated
