"""Random access to files inside tar archives, and WebDataset shards on top of it.

An archive is indexed once by its headers (without reading the contents), after which a member is a byte range that any
process reads on its own: no open file is shared between loader processes. timm's tar reader keeps such files open and
its WebDataset reader only streams; both get in the way of images addressed by their position.
"""

import io
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import IO

from infvit.config import DataConfig
from infvit.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class TarMember:
    """A file inside a tar archive: `size` bytes at `offset` of the archive."""

    archive: str
    name: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.archive}/{self.name}"

    def open(self) -> IO[bytes]:
        """Returns the member's bytes as a stream."""
        return io.BytesIO(self.read())

    def read(self) -> bytes:
        """Returns the member's bytes."""
        with open(self.archive, "rb") as archive:
            archive.seek(self.offset)
            return archive.read(self.size)


def tar_members(path: str | Path) -> list[TarMember]:
    """Lists the files in a tar archive, in its order; a tar inside it counts as a folder of its name.

    Raises:
        DataError: It is not a readable, uncompressed tar archive.
    """
    try:
        with open(path, "rb") as archive:
            return _members(archive, str(path), "", 0)
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{path} cannot be read as an uncompressed tar file ({error}); unpack or repack it.") from error


def _members(stream: IO[bytes], archive: str, prefix: str, start: int) -> list[TarMember]:
    members: list[TarMember] = []
    with tarfile.open(fileobj=stream, mode="r:") as tar:
        for info in tar:
            if not info.isfile():
                continue
            name, offset = prefix + info.name.removeprefix("./"), start + info.offset_data
            if info.name.lower().endswith(".tar"):
                inner = tar.extractfile(info)
                assert inner is not None  # it is a file
                members += _members(inner, archive, f"{name[:-4]}/", offset)
            else:
                members.append(TarMember(archive, name, offset, info.size))
    return members


def shard_paths(data: DataConfig, split_name: str) -> list[Path]:
    """Expands `data.reader=wds/PATTERN` for one split.

    PATTERN is relative to `data.root` and may hold `*`, a range `{000..009}`, and `{split}` for the split's name.
    Without `{split}` the shards are looked for in the folder `data.root/SPLIT`.

    Raises:
        ConfigError: The pattern names a remote place.
        DataError: No file matches.
    """
    pattern = (data.reader or "").partition("/")[2]
    if "://" in pattern or pattern.startswith("pipe:"):
        raise ConfigError(
            f"data.reader={data.reader}: remote shards can only be streamed, but a run that can be repeated and "
            "resumed exactly needs random access; download the shards and give their local pattern."
        )
    pattern = pattern.replace("{split}", split_name) if "{split}" in pattern else f"{split_name}/{pattern}"
    root = Path(data.root or ".").expanduser()
    paths = [Path(p) for name in _expand_ranges(pattern) for p in sorted(glob(str(root / name)))]
    if not paths:
        raise DataError(
            f"No shards match {root / pattern} (data.reader={data.reader}); "
            "correct data.root, the name of the split or the pattern, e.g. 'data.reader=\"wds/{split}-*.tar\"', or "
            "data.reader=wds/*.tar for a folder per split."
        )
    return paths


def _expand_ranges(pattern: str) -> list[str]:
    match = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if not match:
        return [pattern]
    first, last = match.groups()
    return [
        name
        for number in range(int(first), int(last) + 1)
        for name in _expand_ranges(f"{pattern[: match.start()]}{number:0{len(first)}d}{pattern[match.end() :]}")
    ]


def shard_samples(paths: Sequence[Path], extensions: Sequence[str]) -> list[tuple[TarMember, int]]:
    """Pairs the images of WebDataset shards (`KEY.jpg`, ...) with their labels (`KEY.cls`, an integer).

    Raises:
        DataError: An image has no label, or a label is not an integer.
    """
    samples = []
    for path in paths:
        images: dict[str, TarMember] = {}
        labels: dict[str, TarMember] = {}
        for member in tar_members(path):
            folder, _, base = member.name.rpartition("/")
            stem, _, extension = base.partition(".")
            if not stem:
                continue  # a hidden file
            key = f"{folder}/{stem}"
            if extension.lower() == "cls":
                labels[key] = member
            elif f".{extension.lower()}" in extensions:
                images[key] = member
        samples += [(member, _read_label(member, labels.get(key))) for key, member in images.items()]
    if not samples:
        raise DataError(f"{paths[0]} and {len(paths) - 1} more shards hold no images ({', '.join(extensions)}).")
    return samples


def _read_label(image: TarMember, label: TarMember | None) -> int:
    if label is None:
        raise DataError(f"{image} has no label: add a member of the same name with the extension .cls to the shard.")
    try:
        return int(label.read())
    except ValueError as error:
        raise DataError(f"{label} is not an integer class index; write the label as a decimal number.") from error
