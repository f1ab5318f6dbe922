"""ImageNet's validation images and their relatives: where they lie, what labels them, which classes count.

A label is a WordNet id, never the place of a folder among those that happen to exist. Only the classes that set, model
and `data.classes` have in common are scored, and the logits are restricted to them: 200 in ImageNet-A and -R.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from timm.data import ImageNetInfo

from infvit.config import DataConfig
from infvit.data.class_list import read_class_list
from infvit.data.folders import Listing, data_root, is_image, scan_imagenet
from infvit.data.ground_truth import GROUND_TRUTH, imagenet_classes, real_labels
from infvit.data.readers import timm_source
from infvit.data.source import FileSource, Selection, Source, label_map, shown
from infvit.errors import ConfigError, DataError

_VAL = ("val", "validation", "ILSVRC2012_img_val", "ILSVRC/Data/CLS-LOC/val")


@dataclass(frozen=True)
class ImageNetSet:
    """What is known of a set before it is opened.

    Attributes:
        name: As in `eval=NAME`.
        folders: Names below `data.root`, or of tar files without `.tar`; the first that is there is taken.
        images: How many it has when complete.
        subset: Which classes: imagenet, imagenet_a or imagenet_r.
        integers: Whether class folders may be named by the class index.
        real: Whether the labels are the reassessed ones, by file name.
    """

    name: str
    folders: tuple[str, ...]
    images: int
    subset: str = "imagenet"
    integers: bool = False
    real: bool = False

    @property
    def classes(self) -> tuple[str, ...]:
        """WordNet ids in index order."""
        return imagenet_classes(self.subset)


def _v2(name: str, folder: str) -> ImageNetSet:
    folders = (f"imagenetv2-{folder}-format-val", f"imagenet_v2/imagenetv2-{folder}-format-val")
    return ImageNetSet(f"imagenet_v2_{name}", folders, 10_000, integers=True)


def _with_parent(parent: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return names + tuple(f"{parent}/{name}" for name in names)


SETS: dict[str, ImageNetSet] = {
    entry.name: entry
    for entry in (
        ImageNetSet("imagenet", _with_parent("imagenet", _VAL), 50_000),
        ImageNetSet("imagenet_real", _with_parent("imagenet", _VAL), 46_837, real=True),
        _v2("matched_frequency", "matched-frequency"),
        _v2("threshold", "threshold0.7"),
        _v2("top_images", "top-images"),
        ImageNetSet("imagenet_a", ("imagenet-a", "imagenet_a"), 7_500, "imagenet_a"),
        ImageNetSet("imagenet_r", ("imagenet-r", "imagenet_r"), 30_000, "imagenet_r"),
        ImageNetSet("imagenet_sketch", ("sketch", "imagenet-sketch", "imagenet_sketch"), 50_889),
    )
}
FAMILIES: dict[str, tuple[str, ...]] = {"imagenet_v2": tuple(name for name in SETS if name.startswith("imagenet_v2_"))}
"""Names that stand for several sets, those of them that are there."""

CORRUPTED = ImageNetSet("imagenet_c", ("imagenet-c", "imagenet_c"), 50_000)
"""One folder `CORRUPTION/SEVERITY` (also `GROUP/CORRUPTION/SEVERITY`) of it; each is a set of its own."""

STANDARD_CORRUPTIONS = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
"""Those that ImageNet-C's mean is over (Hendrycks and Dietterich, ICLR 2019, section 4.1); the others are its extra,
validation corruptions."""

NAMES = (*SETS, *FAMILIES, CORRUPTED.name)
"""What `eval=` can name."""


@dataclass(frozen=True)
class OpenSet:
    """A set that was found, and how the model's answers to it are judged.

    Attributes:
        spec: What was looked for; its name is that of the row.
        path: Where it was found.
        source: The images to score. A target is an index into `classes`, the first of `labels`.
        labels: Accepted classes of each image, as indices into `classes`.
        classes: WordNet ids that are scored, in the set's order.
        columns: Their places among the model's logits.
        unlabelled: Images left out since the set has no label for them.
        outside: Images left out since model or `data.classes` do not have their class.
    """

    spec: ImageNetSet
    path: str
    source: Selection
    labels: list[tuple[int, ...]]
    classes: tuple[str, ...]
    columns: tuple[int, ...]
    unlabelled: int
    outside: int


def find_sets(name: str, data: DataConfig, own_root: str | None, alone: bool) -> list[tuple[ImageNetSet, Path]]:
    """Finds the folder (or tar file) of each set that a name of `eval=` stands for.

    Args:
        name: One of `NAMES`.
        data: Its `root` is searched.
        own_root: Searched instead, and may be the set itself.
        alone: Whether `data.root` may be the set itself too.

    Raises:
        DataError: It is not there. The message says what was looked for, and where.
    """
    key = "data.root" if own_root is None else f"roots.{name}"
    root = data_root(data) if own_root is None else Path(own_root).expanduser()
    if not root.exists():
        raise DataError(f"{key}={own_root} does not exist (looked in {Path.cwd()}); correct the path.")
    specs = [CORRUPTED] if name == CORRUPTED.name else [SETS[n] for n in FAMILIES.get(name, (name,))]
    found = [(spec, path) for spec in specs if (path := locate(spec, root)) is not None]
    if not found and (alone or own_root is not None) and name not in FAMILIES and _may_be(specs[0], root):
        found = [(specs[0], root)]
    if name == CORRUPTED.name and found:
        found = corruptions(found[0][1])
    if not found:
        names = ", ".join(dict.fromkeys(folder for spec in specs for folder in spec.folders))
        raise DataError(f"{key}={root} has no {name} (looked for {names}); move it there, or set roots.{name}=PATH.")
    return found


def locate(spec: ImageNetSet, root: Path) -> Path | None:
    """Returns the folder or tar file of a set below `root`; None where it is not there."""
    places = (root / f"{folder}{suffix}" for folder in spec.folders for suffix in ("", ".tar"))
    return next((path for path in places if path.exists()), None)


def _may_be(spec: ImageNetSet, path: Path) -> bool:
    """Whether something in a folder looks as if it were this set; `open_set` takes a closer look."""
    if path.is_file() or spec is CORRUPTED:
        return True
    names = [entry.name for entry in path.iterdir()]
    return any(
        n in spec.classes or is_image(n) or n.endswith(".tar") or (spec.integers and n.isdecimal()) for n in names
    )


def corruptions(root: Path) -> list[tuple[ImageNetSet, Path]]:
    """Returns the sets of ImageNet-C below its folder, by corruption and severity."""
    folders = {path.name: path for depth in ("*", "*/*") for path in sorted(root.glob(depth)) if (path / "1").is_dir()}
    return [
        (replace(CORRUPTED, name=f"{CORRUPTED.name}/{name}/{severity}"), folder / str(severity))
        for name, folder in sorted(folders.items())
        for severity in range(1, 6)
        if (folder / str(severity)).is_dir()
    ]


def open_set(
    spec: ImageNetSet, path: Path, data: DataConfig, model_classes: Sequence[str], chosen: str | None = None
) -> OpenSet:
    """Opens a set for a model.

    Args:
        spec: Which.
        path: Where `find_sets` found it.
        data: Channels; with `data.reader`, where the validation images come from instead of `path`.
        model_classes: WordNet ids in the order of the model's logits.
        chosen: Class list file; null: all classes of the model.

    Raises:
        DataError: The folders are not those of this set, an image has no label that can be found, or none is left.
    """
    files, wnids, where = _read(spec, path, data)
    wanted = set(model_classes if chosen is None else read_class_list(chosen, model_classes))
    place = {wnid: i for i, wnid in enumerate(model_classes)}
    classes = tuple(wnid for wnid in spec.classes if wnid in wanted)
    index = {wnid: i for i, wnid in enumerate(classes)}
    accepted = [_reassessed(files.locate(i)) for i in range(len(files))] if spec.real else [[wnid] for wnid in wnids]
    labels = [tuple(index[wnid] for wnid in some if wnid in index) for some in accepted]
    kept = [i for i, some in enumerate(labels) if some]
    if not kept:
        raise DataError(
            f"{where}: no image is of a class that the model has ({shown(list(model_classes))}); "
            f"{spec.name} needs a model of ImageNet's WordNet ids, in the checkpoint's class list."
        )
    unlabelled = sum(not some for some in accepted)
    return OpenSet(
        spec=spec,
        path=where,
        source=Selection(files, kept, [labels[i][0] for i in kept], classes),
        labels=[labels[i] for i in kept],
        classes=classes,
        columns=tuple(place[wnid] for wnid in classes),
        unlabelled=unlabelled,
        outside=len(labels) - len(kept) - unlabelled,
    )


def _read(spec: ImageNetSet, path: Path, data: DataConfig) -> tuple[Source, list[str], str]:
    """Returns the images of a set, the WordNet id of each, and where they are."""
    if data.reader is not None:
        if _VAL[0] not in spec.folders:
            raise ConfigError(
                f"data.reader={data.reader} gives the validation images only; leave it out for {spec.name}."
            )
        source, where = timm_source(data, "val", None), f"{data.reader}, split {data.val_split}"
        names = _by_position(source.classes, where)
        return source, [names[source.target(i)] for i in range(len(source))], where
    listing = scan_imagenet(path)
    folders = require_classes(spec, path, listing)
    files = [file for name in listing.files for file in listing.files[name]]
    wnids = [folders[name] for name in listing.files for _ in listing.files[name]]
    if not files:
        raise DataError(f"{path} has {len(listing.files)} class folders but no images; fetch {spec.name} again.")
    source = FileSource(files, np.zeros(len(files)), spec.classes, data.in_chans, listing.warnings(str(path)))
    return source, wnids, str(path)


def require_classes(spec: ImageNetSet, path: Path, listing: Listing) -> dict[str, str]:
    """Maps the names of the class folders to WordNet ids.

    Raises:
        DataError: There are none, or they are not classes of this set.
    """
    names = list(listing.files)
    if not names:
        raise DataError(
            f"{path} has no class folders (found {len(listing.stray)} images directly in it); {spec.name} needs "
            + (
                "its folders named by class index."
                if spec.integers
                else f"folders named by WordNet id, or {GROUND_TRUTH}."
            )
        )
    if not spec.integers or not all(re.fullmatch(r"[0-9]+", name) for name in names):
        label_map(names, spec.classes, f"{path}, class folders of {spec.name}")
        return {name: name for name in names}
    by_number = {str(i): wnid for i, wnid in enumerate(spec.classes)}
    label_map(names, list(by_number), f"{path}, class folders of {spec.name}")
    return {name: by_number[name] for name in names}


def _by_position(names: Sequence[str], where: str) -> list[str]:
    """Maps the class names of a reader to WordNet ids: they are such ids, or indices, or ImageNet's names in order."""
    wnids = list(imagenet_classes())
    if set(names) <= set(wnids):
        return list(names)
    described = [text.split(",")[0].lower() for text in ImageNetInfo("imagenet-1k").label_descriptions()]
    agree = sum(name.lower().startswith(text) for name, text in zip(names, described, strict=False))
    if len(names) <= len(wnids) and (all(name.isdecimal() for name in names) or agree > 0.9 * len(wnids)):
        return wnids[: len(names)]
    raise DataError(
        f"{where}: its {len(names)} classes ({shown(list(names))}) are not those of ImageNet-1K, or in another order."
    )


def _reassessed(file: str) -> list[str]:
    """Returns the WordNet ids that ReaL accepts for a validation image; they go by the number in its file name."""
    found = re.search(r"ILSVRC2012_val_\d{8}(?=[^/]*$)", file)
    if found is None or found[0] not in real_labels():
        raise DataError(
            f"{file}: ReaL's labels go by file name, and this is none of ILSVRC2012_val_00000001.JPEG to ..50000.JPEG; "
            "give the validation images under their own names."
        )
    return [imagenet_classes()[i] for i in real_labels()[found[0]]]
