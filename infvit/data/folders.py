"""Class folders: one folder (or tar file) per split, in it one folder per class.

Written here instead of using timm's folder reader because that one takes hidden folders for classes, labels each split
by the folders it happens to hold, and walks in circles through symbolic links.
"""

import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from timm.data.readers.img_extensions import get_img_extensions

from infvit.config import DataConfig
from infvit.data.decode import Opens
from infvit.data.ground_truth import GROUND_TRUTH, ground_truth, imagenet_classes
from infvit.data.source import FileSource, Split, class_order, label_map, natural_key, shown
from infvit.data.tars import tar_members
from infvit.errors import ConfigError, DataError

EXTENSIONS = (*get_img_extensions(), ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp")
"""Endings of files that count as images: timm's, and more that Pillow opens."""

SYNONYMS = (("train", "training"), ("val", "validation", "valid", "eval", "evaluation"))


@dataclass
class Listing:
    """What was found in a split: the files of each class, and what was passed over."""

    files: dict[str, list[str | Opens]] = field(default_factory=dict)
    stray: list[str | Opens] = field(default_factory=list)
    hidden: int = 0
    others: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)

    def add(self, name: str, files: Sequence[str | Opens]) -> None:
        """Adds files to a class. Names are compared in composed form: macOS stores an accented letter as two."""
        self.files.setdefault(unicodedata.normalize("NFC", name), []).extend(files)

    def warnings(self, where: str) -> list[str]:
        """Returns one line for each kind of thing that was passed over."""
        lines = []
        if self.hidden:
            lines.append(f"{where}: skipped {self.hidden} hidden files or folders (leading dot, or __MACOSX).")
        if self.others:
            lines.append(f"{where}: ignored {len(self.others)} files that are no images by name: {shown(self.others)}.")
        if self.stray:
            lines.append(f"{where}: ignored {len(self.stray)} images outside the class folders.")
        if self.repeated:
            lines.append(f"{where}: skipped links to folders already read, or in a circle: {shown(self.repeated)}.")
        return lines


def folder_source(data: DataConfig, split: Split, classes: Sequence[str] | None) -> FileSource:
    """Reads class folders, or tar files, of one split.

    Args:
        data: `data.root` holds the splits: `train/` and `val/` (or a synonym), or `train.tar` and `val.tar`.
        split: Which of them.
        classes: Class list of the training split or the checkpoint; None takes it from the folders found.

    Raises:
        ConfigError: `data.root` is not given.
        DataError: Something is missing, a class is unknown, or there is no image.
    """
    path = split_path(data, split)
    return _labelled(data, path, scan(path), classes, "sort the images into one folder per class")


def imagenet_source(data: DataConfig, split: Split, classes: Sequence[str] | None) -> FileSource:
    """Reads ImageNet-1K: as `folder_source`, with labels from the fixed list of its 1000 WordNet ids.

    The images of a flat folder or tar file get theirs from the ground-truth files (`ground_truth`).
    """
    path = split_path(data, split)
    remedy = f"sort the images into one folder per class, or add {GROUND_TRUTH}"
    return _labelled(data, path, scan_imagenet(path), imagenet_classes() if classes is None else classes, remedy)


def scan(path: Path) -> Listing:
    """Lists class folders, the tar file at `path`, or the tar files in it."""
    if path.is_file():
        return scan_tars([path])
    listing = scan_folders(path)
    tars = sorted(path.glob("*.tar"), key=lambda p: natural_key(p.name))
    return scan_tars(tars) if tars and not listing.files else listing


def scan_imagenet(path: Path) -> Listing:
    """Lists class folders as `scan` does, or a flat split, sorted into classes by the ground-truth files beside it.

    Raises:
        DataError: An image of a flat split is not in the ground truth.
    """
    listing = scan(path)
    truth = None if listing.files or not listing.stray else ground_truth(path)
    if truth is not None:
        flat, listing.stray = listing.stray, []
        for file in sorted(flat, key=lambda file: natural_key(str(file))):
            stem = os.path.splitext(os.path.basename(str(file)))[0]
            if stem not in truth:
                raise DataError(f"{file} is not in the ground truth of ImageNet's validation images; remove it.")
            listing.add(truth[stem], [file])
    return listing


def _labelled(data: DataConfig, path: Path, listing: Listing, classes: Sequence[str] | None, remedy: str) -> FileSource:
    """Labels the files of a listing by the class list; None makes the list that of the folders found."""
    if not listing.files:
        raise DataError(
            f"{path} has no class folders (found {len(listing.stray)} images directly in it): {remedy}, "
            "named as in the training split."
        )
    names = class_order(list(listing.files))
    index = label_map(names, classes, f"{path}, class folders")
    files = [file for name in names for file in listing.files[name]]
    if not files:
        raise DataError(
            f"{path} has {len(names)} class folders but no images; "
            f"files must end in {', '.join(EXTENSIONS)} (upper or lower case)."
        )
    targets = [index[name] for name in names for _ in listing.files[name]]
    return FileSource(files, targets, names if classes is None else classes, data.in_chans, listing.warnings(str(path)))


def split_path(data: DataConfig, split: Split) -> Path:
    """Finds the folder or tar file of a split under `data.root`."""
    root = data_root(data)
    name = data.train_split if split == "train" else data.val_split
    names = [name, *(s for group in SYNONYMS if name in group for s in group if s != name)]
    for path in (root / f"{name}{suffix}" for name in names for suffix in ("", ".tar")):
        if path.exists():
            return path
    found = sorted(entry.name for entry in root.iterdir() if not is_hidden(entry.name))
    key = "data.train_split" if split == "train" else "data.val_split"
    raise DataError(
        f"{root} has no folder or tar file {' or '.join(repr(n) for n in names)} for the {split} split "
        f"(found: {shown(found) or 'nothing'}); point data.root at the folder that holds it, or set {key}."
    )


def data_root(data: DataConfig) -> Path:
    """Returns `data.root` as a path that exists and is a folder."""
    if data.root is None:
        raise ConfigError(f"data.root is missing: data={data.name} needs the folder of the data set, data.root=PATH.")
    root = Path(data.root).expanduser()
    if not root.exists():
        raise DataError(f"data.root={data.root} does not exist (looked in {Path.cwd()}); correct the path.")
    if not root.is_dir():
        raise DataError(f"data.root={data.root} is a file; give the folder that holds the splits, e.g. {root.parent}.")
    return root


def is_hidden(name: str) -> bool:
    """Whether a file or folder was left behind by an operating system or editor."""
    return name.startswith(".") or name == "__MACOSX"


def is_image(name: str) -> bool:
    """Whether the extension, in upper or lower case, is one of an image."""
    return os.path.splitext(name)[1].lower() in EXTENSIONS


def scan_folders(root: Path) -> Listing:
    """Lists the class folders of a split. Links are followed, each real folder once, under the link's name.

    Raises:
        DataError: One class is a link to another: its images would have two labels.
    """
    listing = Listing()
    entries = [entry for entry in os.scandir(root) if not _skip(entry, listing)]
    listing.stray = [entry.path for entry in entries if entry.is_file() and is_image(entry.name)]
    folders = sorted((e for e in entries if e.is_dir()), key=lambda e: (e.is_symlink(), natural_key(e.name)))
    real = os.path.realpath(root)
    above = {real, *(str(parent) for parent in Path(real).parents)}
    tops: dict[str, os.DirEntry[str]] = {}
    for entry in folders:
        target = os.path.realpath(entry.path)
        if target in above:
            listing.repeated.append(entry.name)
        elif target in tops:
            raise DataError(
                f"{entry.path} is a link to the folder of another class, {tops[target].name!r}; remove it, or put "
                "images of its own there."
            )
        else:
            tops[target] = entry
    seen = above | tops.keys()
    for entry in tops.values():
        files: list[str | Opens] = list(_images_below(entry.path, listing, seen))
        listing.add(entry.name, files)
    return listing


def _images_below(folder: str, listing: Listing, seen: set[str]) -> list[str]:
    """Returns the image paths below a class folder in natural order."""
    images = []
    for entry in sorted(os.scandir(folder), key=lambda entry: natural_key(entry.name)):
        if _skip(entry, listing):
            continue
        if entry.is_dir():
            target = os.path.realpath(entry.path)
            if target in seen:
                listing.repeated.append(entry.name)
                continue
            seen.add(target)
            images += _images_below(entry.path, listing, seen)
        elif is_image(entry.name):
            images.append(entry.path)
        else:
            listing.others.append(entry.name)
    return images


def _skip(entry: os.DirEntry[str], listing: Listing) -> bool:
    hidden = is_hidden(entry.name)
    listing.hidden += hidden
    return hidden


def scan_tars(paths: Sequence[Path]) -> Listing:
    """Lists the classes in tar files: the folder an image is in, else the name of the (inner) tar it is in."""
    listing = Listing()
    for path in paths:
        for member in tar_members(path):
            parts = member.name.split("/")
            if any(is_hidden(part) for part in parts):
                listing.hidden += 1
            elif is_image(member.name):
                if len(parts) > 1:
                    listing.add(parts[-2], [member])
                elif len(paths) > 1:
                    listing.add(path.stem, [member])
                else:
                    listing.stray.append(member)
            elif len(parts) > 1:
                listing.others.append(parts[-1])
    for files in listing.files.values():
        files.sort(key=lambda file: natural_key(str(file)))
    return listing
