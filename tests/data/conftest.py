"""Small data sets on disk."""

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

Write = Callable[..., Path]


@pytest.fixture
def image(tmp_path: Path) -> Write:
    """Writes a one-coloured image below `tmp_path`: `image("train/a/x.jpg", colour)`."""

    def write(name: str, colour: tuple[int, ...] = (200, 10, 10), size: tuple[int, int] = (32, 24)) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = "PNG" if path.suffix.lower() == ".png" else "JPEG"
        Image.new("RGB", size, colour).save(path, kind)
        return path

    return write


@pytest.fixture
def folders(tmp_path: Path, image: Write) -> Path:
    """Class folders `a`, `b`, `c`: two images each in train, one each in val."""
    for name in "abc":
        for split, count in (("train", 2), ("val", 1)):
            for i in range(count):
                image(f"{split}/{name}/{i}.jpg")
    return tmp_path
