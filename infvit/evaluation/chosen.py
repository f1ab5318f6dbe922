"""Which images an evaluation of attention looks at, and where the objects on them are."""

import csv
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

import numpy as np

from infvit.config import EvalConfig
from infvit.data import Source, build_source
from infvit.data.boxes import Annotation, find_annotation, geometry, image_size, inside, open_boxes
from infvit.data.folders import scan, split_path
from infvit.data.source import FileSource, Selection, natural_key, shown
from infvit.data.transforms import Transform
from infvit.errors import DataError
from infvit.evaluation.rebuild import Rebuilt
from infvit.evaluation.scoring import relative
from infvit.metrics import patch_labels

log = logging.getLogger(__name__)


@dataclass
class Chosen:
    """The images that were chosen.

    Attributes:
        source: All images there are.
        order: Indices in the order in which they are drawn: shuffled by the seed, or as listed.
        listed: Whether a list names them.
        boxes: By index, in pixels of what the model sees, float (n, 4).
        labels: By index, whether each patch is in a box, bool (N,); only of images on which some are and some are not.
        excluded: Images without labels, by reason.
        dropped: Boxes that were no boxes, by reason.
    """

    source: Source
    order: list[int]
    listed: bool
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

    def selection(self, indices: Sequence[int]) -> Selection:
        """Returns some images as a source of their own; labels play no part."""
        return Selection(self.source, indices, np.zeros(len(indices), dtype=np.int64), self.source.classes)


def choose(config: EvalConfig, rebuilt: Rebuilt) -> Chosen:
    """Opens the held-out split and puts its images in the order of the seed, or those of `quality.image_list`.

    Raises:
        DataError: There are none, or a listed one is not there.
    """
    source = _open(rebuilt)
    if not len(source):
        raise DataError(f"the {rebuilt.data.val_split} split of {rebuilt.data.name} has no images.")
    for line in source.warnings:
        log.warning("%s", line)
    listed = config.quality.image_list
    if listed is not None:
        return Chosen(source, _listed(Path(listed).expanduser(), source, rebuilt.data.root), True)
    order = np.random.default_rng(config.quality.seed).permutation(len(source))
    return Chosen(source, order.tolist(), False)


def _open(rebuilt: Rebuilt) -> Source:
    """Opens the split; of a folder also images without a class, since labels play no part."""
    data = rebuilt.data
    if data.name not in ("folder", "imagenet") or data.classes is not None:
        return build_source(data, "val", rebuilt.classes)
    path = split_path(data, "val")
    listing = scan(path)
    files = sorted(
        [file for files in (*listing.files.values(), listing.stray) for file in files],
        key=lambda file: natural_key(str(file)),
    )
    if listing.files and listing.stray:
        listing.stray = []  # they are looked at, unlike elsewhere: no warning
    return FileSource(files, np.zeros(len(files)), ("",), data.in_chans, listing.warnings(str(path)) if files else ())


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


def place_boxes(
    chosen: Chosen, config: EvalConfig, transform: Transform, grid: tuple[int, int], number: int
) -> list[int]:
    """Finds the boxes of annotated images, carries them through the transform, and labels the patches.

    Fills `boxes`, `labels`, `excluded` and `dropped`.

    Args:
        chosen: The images; they are taken in their order until `number` of them are annotated.
        config: `quality.annotations`.
        transform: Of the evaluation; the boxes go where it takes the pixels.
        grid: Rows and columns of the patches.
        number: Of annotated images.

    Returns:
        The annotated images.

    Raises:
        DataError: An annotation is damaged or ambiguous.
    """
    path = config.quality.annotations
    files = open_boxes(path) if path is not None else None
    stems = Counter(PurePath(chosen.source.locate(i)).stem for i in range(len(chosen.source))) if files else Counter()
    annotated: list[int] = []
    for index in chosen.order:
        if len(annotated) == number and not chosen.listed:
            break
        namesakes = stems[PurePath(chosen.source.locate(index)).stem] > 1
        annotation = find_annotation(chosen.source, index, files, namesakes)
        reason = _place(chosen, index, annotation, transform, grid)
        if reason != "no annotation":
            annotated.append(index)
        if reason:
            chosen.excluded[reason] += 1
    if path is not None and not annotated:
        raise DataError(
            f"quality.annotations={path} has none of the {len(chosen.order)} images (the first: "
            f"{chosen.source.locate(chosen.order[0])}); the files must be called like the images."
        )
    for what, count in chosen.dropped.items():
        if count:
            log.warning("Left out %d boxes: %s.", count, what)
    return annotated


def _place(
    chosen: Chosen, index: int, annotation: Annotation | None, transform: Transform, grid: tuple[int, int]
) -> str | None:
    """Places the boxes of one image; returns why it cannot be scored, or None."""
    if annotation is None:
        return "no annotation"
    size = image_size(chosen.source, index)
    if annotation.size not in (None, size):
        return "size differs from the annotation"
    if not len(annotation.boxes):
        return "no box in the annotation"
    boxes = inside(annotation.boxes, size, chosen.dropped)
    if not len(boxes):
        return "no proper box inside the image"
    moved = geometry(transform, size)
    boxes = moved.apply(boxes)
    if not len(boxes):
        return "no box left after the crop"
    chosen.boxes[index] = boxes
    labels = patch_labels(boxes, (moved.size[1], moved.size[0]), grid)
    if not labels.any():
        return "no patch centre in a box"
    if labels.all():
        return "every patch in a box"
    chosen.labels[index] = labels
    return None
