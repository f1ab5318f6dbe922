"""Where the objects of an image are: boxes from annotation files, and what resize and crop make of them.

A box is (x0, y0, x1, y1) in pixels, half-open: it covers x0 <= x < x1. Coordinates of files are taken as they stand;
VOC's convention would shift the left and upper edge by one pixel, but ImageNet's files do not keep to it.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any
from xml.etree import ElementTree

import numpy as np
from PIL import Image
from timm.data.transforms import CenterCropOrPad, MaybeToTensor, ResizeKeepRatio
from torchvision import transforms

from infvit.data.digit_scenes import DigitScenes
from infvit.data.source import FileSource, Selection, Source
from infvit.data.transforms import Transform
from infvit.errors import ConfigError, DataError


@dataclass(frozen=True)
class Annotation:
    """The boxes of one image.

    Attributes:
        boxes: float64 (n, 4), as annotated.
        size: Width and height of the image according to the annotation; None where it does not say.
        where: The file, for errors.
    """

    boxes: np.ndarray
    size: tuple[int, int] | None
    where: str


@dataclass
class Boxes:
    """Annotations of many images, found by file name.

    Attributes:
        entries: By file stem, each with the folder it lies in ("" at the top).
    """

    entries: dict[str, list[tuple[str, Annotation | Path]]] = field(default_factory=dict)

    def add(self, name: PurePath, annotation: Annotation | Path) -> None:
        """Adds the annotation (or the XML file with it) of an image or XML file of this relative name."""
        self.entries.setdefault(name.stem, []).append((name.parent.name, annotation))

    def find(self, image: str, namesakes: bool = False) -> Annotation | None:
        """Returns the annotation of an image by its stem, and by the folder it lies in where that leaves a choice.

        Args:
            image: Its path.
            namesakes: Whether other images have its stem too, so that the folder must be the same in any case.

        Raises:
            DataError: Two annotations have its name, or its file is not an annotation.
        """
        name = PurePath(image)
        found = self.entries.get(name.stem, [])
        if len(found) > 1 or namesakes:
            several, found = len(found) > 1, [entry for entry in found if entry[0] == name.parent.name]
            if len(found) > 1 or (several and not found):
                raise DataError(
                    f"{image}: {len(found) or 'several'} annotations of this name in other folders or in one; keep "
                    "them in folders that are called like those of the images."
                )
        if not found:
            return None
        annotation = found[0][1]
        return read_voc(annotation) if isinstance(annotation, Path) else annotation


def open_boxes(path: str) -> Boxes:
    """Lists the annotations in a folder (and its subfolders) of VOC-style XML files, or in a COCO JSON file.

    Raises:
        DataError: There are none.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return read_coco(place)
    if not place.is_dir():
        raise DataError(f"quality.annotations={path} does not exist; give a folder of XML files or a COCO JSON file.")
    boxes = Boxes()
    for file in sorted(place.rglob("*.xml")):
        boxes.add(file.relative_to(place), file)
    if not boxes.entries:
        raise DataError(f"quality.annotations={path} has no XML files; give a folder of them, or a COCO JSON file.")
    return boxes


def read_voc(path: Path) -> Annotation:
    """Reads a VOC-style XML file: every `object/bndbox`, whatever the object; those of its parts are no objects.

    Raises:
        DataError: It is damaged, or a number is missing. The message names it.
    """
    try:
        root = ElementTree.parse(path).getroot()
        boxes = [
            [float(_text(box, name)) for name in ("xmin", "ymin", "xmax", "ymax")]
            for box in root.iterfind(".//object/bndbox")
        ]
        size = root.find("size")
        sides = (0, 0) if size is None else (int(float(_text(size, "width"))), int(float(_text(size, "height"))))
    except (ElementTree.ParseError, ValueError, OSError) as error:
        raise DataError(f"{path} is not an annotation in VOC's XML ({error}); mend or remove it.") from error
    return Annotation(np.array(boxes, dtype=np.float64).reshape(-1, 4), sides if all(sides) else None, str(path))


def _text(parent: ElementTree.Element, name: str) -> str:
    value = parent.findtext(name)
    if value is None:
        raise ValueError(f"{parent.tag} without {name}")
    return value


def read_coco(path: Path) -> Boxes:
    """Reads a COCO JSON file: `images` with `file_name`, `annotations` with `bbox` = [x, y, width, height].

    Raises:
        DataError: It is not such a file.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__} and no object at its top")
        by_image: dict[Any, list[list[float]]] = {image["id"]: [] for image in content["images"]}
        for number, entry in enumerate(content["annotations"]):
            if len(entry["bbox"]) != 4:
                raise ValueError(f"annotations[{number}] has bbox {entry['bbox']}, not [x, y, width, height]")
            if entry["image_id"] not in by_image:
                raise ValueError(f"annotations[{number}] has image_id {entry['image_id']}, which no image has")
            x, y, width, height = map(float, entry["bbox"])
            by_image[entry["image_id"]].append([x, y, x + width, y + height])
        boxes = Boxes()
        for image in content["images"]:
            sides = (int(image.get("width") or 0), int(image.get("height") or 0))
            array = np.array(by_image[image["id"]], dtype=np.float64).reshape(-1, 4)
            where = f"{path}, {image['file_name']}"
            boxes.add(PurePath(image["file_name"]), Annotation(array, sides if all(sides) else None, where))
    except (ValueError, TypeError, OSError) as error:
        raise DataError(f"{path} is not a COCO annotation file ({error}).") from error
    except KeyError as error:
        raise DataError(f"{path} is not a COCO annotation file ({error} is missing in it).") from error
    return boxes


def find_annotation(source: Source, index: int, boxes: Boxes | None, namesakes: bool = False) -> Annotation | None:
    """Returns the annotation of an image: that of the files, or what the data set itself knows; None: there is none."""
    if boxes is not None:
        return boxes.find(source.locate(index), namesakes)
    source, index = _origin(source, index)
    if not isinstance(source, DigitScenes):
        return None
    return Annotation(np.array([source.box(index)], dtype=np.float64), (source.side,) * 2, source.locate(index))


def image_size(source: Source, index: int) -> tuple[int, int]:
    """Returns width and height of an image in pixels, from the head of its file where there is one."""
    source, index = _origin(source, index)
    if isinstance(source, DigitScenes):
        return source.side, source.side
    if not isinstance(source, FileSource):
        return source.image(index).size
    file = source.files[index]
    try:
        with Image.open(file if isinstance(file, str) else file.open()) as image:
            return image.size
    except Exception as error:  # on damaged bytes Pillow raises nearly anything
        raise DataError(f"{file}: this image cannot be decoded ({error}); replace or remove it.") from error


def _origin(source: Source, index: int) -> tuple[Source, int]:
    """Returns the source that an image was selected from, and its index there."""
    while isinstance(source, Selection):
        index, source = int(source.indices[index]), source.source
    return source, index


def inside(boxes: np.ndarray, size: tuple[int, int], dropped: Counter[str]) -> np.ndarray:
    """Clips boxes (n, 4) to an image of a width and height.

    Boxes that are inside out (x1 <= x0 or y1 <= y0), not finite or wholly outside are left out and counted.
    """
    finite = boxes[np.isfinite(boxes).all(1)]
    proper = finite[(finite[:, 0] < finite[:, 2]) & (finite[:, 1] < finite[:, 3])]
    clipped = clip(proper, size)
    dropped["not finite"] += len(boxes) - len(finite)
    dropped["inside out"] += len(finite) - len(proper)
    dropped["outside the image"] += len(proper) - len(clipped)
    return clipped


def clip(boxes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Cuts boxes (n, 4) down to an image of a width and height, and leaves out what is empty then."""
    cut = np.clip(boxes, 0, [*size, *size])
    return cut[(cut[:, 0] < cut[:, 2]) & (cut[:, 1] < cut[:, 3])]


@dataclass(frozen=True)
class Geometry:
    """What a transform does to places: they become place * scale + shift, in an image of width and height `size`."""

    scale: tuple[float, float]
    shift: tuple[float, float]
    size: tuple[int, int]

    def apply(self, boxes: np.ndarray) -> np.ndarray:
        """Moves boxes (n, 4), and cuts off what was cropped away; a box of which nothing is left is left out."""
        return clip(boxes * [*self.scale, *self.scale] + [*self.shift, *self.shift], self.size)


def geometry(transform: Transform, size: tuple[int, int]) -> Geometry:
    """Returns what an evaluation transform (`eval_transform`) does to an image of a width and height.

    Raises:
        ConfigError: The transform has a step whose effect on places is not known here.
    """
    steps: Iterable[Any] = getattr(transform, "transforms", [transform])
    width, height = size
    scale, shift = np.ones(2), np.zeros(2)
    for step in steps:
        if isinstance(step, transforms.Resize | ResizeKeepRatio):
            old, (width, height) = (width, height), _resized(step, width, height)
            factor = np.array([width / old[0], height / old[1]])
            scale, shift = scale * factor, shift * factor
        elif isinstance(step, transforms.CenterCrop | CenterCropOrPad):
            crop = (int(step.size[1]), int(step.size[0]))
            shift = shift + np.array([_crop_shift(width, crop[0]), _crop_shift(height, crop[1])])
            width, height = crop
        elif not isinstance(step, transforms.ToTensor | MaybeToTensor | transforms.Normalize):
            raise ConfigError(f"boxes cannot be carried through {type(step).__name__} of the evaluation transform.")
    return Geometry((float(scale[0]), float(scale[1])), (float(shift[0]), float(shift[1])), (width, height))


def _resized(step: transforms.Resize | ResizeKeepRatio, width: int, height: int) -> tuple[int, int]:
    """Returns the width and height that a resize step gives, from the step itself on an image that costs nothing."""
    if isinstance(step, ResizeKeepRatio):
        rows, columns = step.get_params(Image.new("1", (width, height)), step.size, step.longest)[:2]
        return int(columns), int(rows)
    resized = transforms.Resize(step.size, transforms.InterpolationMode.NEAREST)(Image.new("1", (width, height)))
    return resized.size


def _crop_shift(side: int, crop: int) -> float:
    """Returns how far a centre crop moves the image along one axis; a smaller image is padded first."""
    if crop > side:
        return (crop - side) // 2
    return -round((side - crop) / 2.0)
