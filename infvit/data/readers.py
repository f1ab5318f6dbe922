"""`data=timm`: whatever timm's readers give, by `data.reader`, as long as images can be had in any order.

| `data.reader` | read by |
|---|---|
| `torch/NAME` (`torch/cifar10`, `torch/mnist`, ...) | torchvision, through timm |
| `hfds/NAME` | Hugging Face datasets, through timm (`pip install 'infvit[hf]'`) |
| `wds/PATTERN` | our index over local WebDataset shards |
| `torch/image_folder`, `folder` | our class folders (torchvision labels them in text order, hidden folders included) |
| `hfids/`, `tfds/`, remote `wds/` | refused: they only stream |
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import IO, Any

import numpy as np
from PIL import Image
from timm.data import create_dataset
from timm.data.readers import create_reader

from infvit.config import DataConfig
from infvit.data.decode import decode, to_mode
from infvit.data.folders import EXTENSIONS, folder_source
from infvit.data.source import FileSource, Source, Split, label_map
from infvit.data.tars import shard_paths, shard_samples
from infvit.errors import ConfigError, DataError, MissingExtraError


def timm_source(data: DataConfig, split: Split, classes: Sequence[str] | None) -> Source:
    """Reads one split of `data.reader`.

    Raises:
        ConfigError: The reader is unknown or only streams.
        DataError: The data set cannot be read, or its classes do not fit the class list.
        MissingExtraError: `hfds/` without the package `datasets`.
    """
    if not data.reader:
        raise ConfigError("data.reader is missing: data=timm needs it, e.g. data.reader=torch/cifar10 or hfds/NAME.")
    prefix = data.reader.partition("/")[0].lower()
    if data.reader.lower() in ("folder", "torch/folder", "torch/image_folder"):
        return folder_source(data, split, classes)
    if prefix in ("hfids", "tfds"):
        raise ConfigError(
            f"data.reader={data.reader} only streams, but a run that can be repeated and resumed exactly needs random "
            "access by position; use hfds/NAME, torch/NAME or local wds/PATTERN."
        )
    builders: dict[str, Callable[[DataConfig, str, Sequence[str] | None], Source]] = {
        "torch": _torch_source,
        "hfds": _hfds_source,
        "wds": _wds_source,
    }
    if prefix not in builders:
        raise ConfigError(f"data.reader={data.reader} must begin with {'/, '.join(builders)}/ (or be 'folder').")
    return builders[prefix](data, data.train_split if split == "train" else data.val_split, classes)


class TorchSource:
    """A torchvision data set as a `Source`."""

    native_size = 224
    warnings: Sequence[str] = ()

    def __init__(self, dataset: Any, name: str, data: DataConfig, classes: Sequence[str] | None) -> None:
        self.dataset, self.name, self.in_chans = dataset, name, data.in_chans
        if hasattr(dataset, "loader"):  # ImageNet, Places365: files, which our own decoder reads
            dataset.loader = partial(decode, in_chans=data.in_chans)
        # INaturalist has no `targets`, but its index holds (class, file). QMNIST stores more fields beside the class.
        labels = np.asarray(dataset.targets if hasattr(dataset, "targets") else [label for label, _ in dataset.index])
        labels = labels[:, 0] if labels.ndim == 2 else labels
        names = [n if isinstance(n, str) else ", ".join(n) for n in getattr(dataset, "classes", [])]
        self.classes, self.targets = _by_class_list(labels, names, data, classes, name)

    def __len__(self) -> int:
        return len(self.targets)

    def image(self, index: int) -> Image.Image:
        try:
            image = self.dataset[index][0]
        except (OSError, ValueError) as error:
            raise DataError(f"{self.locate(index)}: this image cannot be decoded ({error}).") from error
        return to_mode(image, self.in_chans)

    def target(self, index: int) -> int:
        return int(self.targets[index])

    def locate(self, index: int) -> str:
        files = getattr(self.dataset, "imgs", None)
        return str(files[index][0]) if files else f"{self.name}[{index}]"


@dataclass(frozen=True, slots=True)
class HfImage:
    """An image of a timm reader, fetched when it is opened."""

    reader: Any
    index: int
    name: str

    def __str__(self) -> str:
        return f"{self.name}[{self.index}]"

    def open(self) -> IO[bytes]:
        stream: IO[bytes] = self.reader[self.index][0]
        return stream


class HfFiles(Sequence[HfImage]):
    """The images of a Hugging Face data set, without one object per image."""

    def __init__(self, reader: Any, name: str) -> None:
        self.reader, self.name = reader, name

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: Any) -> Any:
        return HfImage(self.reader, index, self.name)


def _torch_source(data: DataConfig, split_name: str, classes: Sequence[str] | None) -> Source:
    if data.root is None:
        raise ConfigError(f"data.root is missing: data.reader={data.reader} needs the folder the data set is in.")
    if "train" not in data.train_split or "train" in data.val_split:  # timm takes any other name for the test split
        raise ConfigError(
            f"data.train_split={data.train_split} data.val_split={data.val_split}: {data.reader} knows 'train' and "
            "'validation'; use these."
        )
    name = f"{data.reader}, split {split_name}"
    with _naming(name):
        dataset = create_dataset(data.reader or "", root=data.root, split=split_name, download=data.download)
    return TorchSource(dataset, name, data, classes)


def _hfds_source(data: DataConfig, split_name: str, classes: Sequence[str] | None) -> Source:
    if find_spec("datasets") is None:
        raise MissingExtraError(f"data.reader={data.reader}", "hf")
    name = f"{data.reader}, split {split_name}"
    with _naming(name):
        reader = create_reader(data.reader or "", root=data.root, split=split_name)
        labels = np.asarray(list(reader.iter_targets()))
    names = getattr(reader.dataset.features[reader.label_key], "names", [])
    class_list, targets = _by_class_list(labels, names, data, classes, name)
    return FileSource(HfFiles(reader, name), targets, class_list, data.in_chans)


def _wds_source(data: DataConfig, split_name: str, classes: Sequence[str] | None) -> Source:
    paths = shard_paths(data, split_name)
    files, labels = zip(*shard_samples(paths, EXTENSIONS), strict=True)
    class_list, targets = _by_class_list(np.asarray(labels), [], data, classes, f"{data.reader}, split {split_name}")
    return FileSource(files, targets, class_list, data.in_chans)


def _by_class_list(
    labels: np.ndarray, names: Sequence[str], data: DataConfig, classes: Sequence[str] | None, where: str
) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the class list and the labels as indices of it.

    Args:
        labels: Labels (N,) as the data set stores them.
        names: The data set's own class names; empty where it has none.
        data: Its `num_classes` serves where there are no names.
        classes: Class list to label by; None makes it the data set's own.
        where: The data set, for errors.
    """
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(f"{where}: labels must be one integer per image; this data set has none, or several per image.")
    if not names:
        count = data.num_classes or int(labels.max(initial=-1)) + 1
        names = [str(i) for i in range(count)] if classes is None else classes
    times = Counter(names)  # ImageNet has two classes "crane"
    names = [f"{name} ({i})" if times[name] > 1 else name for i, name in enumerate(names)]
    outside = np.flatnonzero((labels < 0) | (labels >= len(names)))
    if outside.size:
        raise DataError(
            f"{where}: image {outside[0]} has label {labels[outside[0]]}, but there are {len(names)} classes "
            f"(0 to {len(names) - 1}); correct the labels or data.num_classes."
        )
    index = label_map(names, classes, where)
    return tuple(names if classes is None else classes), np.array([index[name] for name in names])[labels]


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Turns what a reader raises while it is opened into one line that names it."""
    try:
        yield
    except (RuntimeError, AssertionError, OSError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{name} cannot be opened ({reason}); check data.reader, data.root and the split names, "
            "or let it be fetched with data.download=true."
        ) from error
