"""Every kind of image file, against pixel values worked out by hand."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from infvit.data import decode
from infvit.errors import DataError


def pixel(path: Path, in_chans: int = 3) -> tuple[int, ...]:
    image = decode(str(path), in_chans)
    assert image.mode == ("RGB" if in_chans == 3 else "L")
    return tuple(np.atleast_1d(np.asarray(image)[-1, -1]).tolist())


def test_16_bit_grey_is_scaled_not_clipped(tmp_path: Path) -> None:
    pixels = np.full((8, 8), 40000, np.uint16)
    pixels[:4] = 100
    Image.fromarray(pixels).save(tmp_path / "deep.png")
    decoded = np.asarray(decode(str(tmp_path / "deep.png")))
    assert (decoded[:4] == 0).all()  # 100 >> 8
    assert (decoded[4:] == 156).all()  # 40000 >> 8
    assert pixel(tmp_path / "deep.png", in_chans=1) == (156,)


@pytest.mark.parametrize(
    ("colour", "expected"),
    [((255, 0, 0, 0), (255, 255, 255)), ((255, 0, 0, 255), (255, 0, 0)), ((255, 0, 0, 51), (255, 204, 204))],
)
def test_rgba_is_composited_on_white(tmp_path: Path, colour: tuple[int, ...], expected: tuple[int, ...]) -> None:
    Image.new("RGBA", (4, 4), colour).save(tmp_path / "x.png")
    assert pixel(tmp_path / "x.png") == expected


def test_palette_with_transparency(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 255, 0] + [0] * 762)
    image.putpixel((1, 0), 1)
    image.save(tmp_path / "x.png", transparency=bytes([0, 255]))
    assert np.asarray(decode(str(tmp_path / "x.png"))).tolist() == [[[255, 255, 255], [0, 255, 0]]]


def test_grey_with_alpha_and_transparent_colour(tmp_path: Path) -> None:
    Image.new("LA", (4, 4), (100, 0)).save(tmp_path / "la.png")
    Image.new("RGB", (4, 4), (1, 2, 3)).save(tmp_path / "key.png", transparency=(1, 2, 3))
    assert pixel(tmp_path / "la.png") == (255, 255, 255)
    assert pixel(tmp_path / "key.png") == (255, 255, 255)


def test_cmyk(tmp_path: Path) -> None:
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "x.jpg", quality=100)
    assert np.abs(np.subtract(pixel(tmp_path / "x.jpg"), (255, 0, 0))).max() <= 2


def test_grey_bilevel_and_wrong_extension(tmp_path: Path) -> None:
    Image.new("L", (4, 4), 77).save(tmp_path / "grey.png")
    Image.new("1", (4, 4), 1).save(tmp_path / "bit.png")
    Image.new("RGB", (4, 4), (9, 8, 7)).save(tmp_path / "really_png.JPEG", "PNG")
    assert pixel(tmp_path / "grey.png") == (77, 77, 77)
    assert pixel(tmp_path / "bit.png") == (255, 255, 255)
    assert pixel(tmp_path / "really_png.JPEG") == (9, 8, 7)
    assert pixel(tmp_path / "grey.png", in_chans=1) == (77,)


def test_damage_is_one_line_with_the_path(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jpg"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(whole)
    (tmp_path / "half.jpg").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.png").write_text("not an image")
    Image.fromarray(np.ones((4, 4), np.float32)).save(tmp_path / "float.tif")
    for name in ("half.jpg", "empty.jpg", "text.png", "float.tif", "absent.jpg"):
        with pytest.raises(DataError) as caught:
            decode(str(tmp_path / name))
        message = str(caught.value)
        assert message.startswith(f"{tmp_path / name}: this image cannot be decoded (")
        assert "\n" not in message
