"""The one way an image file becomes pixels, in training, evaluation and figures alike.

| file | what it becomes |
|---|---|
| 16-bit grey | high byte of each value (`>> 8`), never clipped |
| transparency (RGBA, LA, palette, tRNS) | composited on white |
| CMYK, YCCK | RGB by Pillow's conversion |
| grey, palette, 1 bit | RGB (or grey when the model takes one channel) |
| animation | first frame |

The format follows from the content, not from the file's extension. EXIF orientation is not applied (nor does timm).
"""

from typing import IO, Protocol

import numpy as np
from PIL import Image

from infvit.errors import DataError

BACKGROUND = (255, 255, 255, 255)
"""RGBA colour that shows through transparent pixels."""


class Opens(Protocol):
    """Something image bytes can be read from; its `str()` tells the user where it is."""

    def open(self) -> IO[bytes]:
        """Returns a stream at the start of the image."""
        ...


def decode(file: str | Opens, in_chans: int = 3) -> Image.Image:
    """Decodes an image file completely.

    Args:
        file: Path, or an object with `open()` (a member of a tar file, bytes in memory).
        in_chans: 3 for RGB, 1 for grey.

    Returns:
        The image, mode `RGB` or `L`.

    Raises:
        DataError: The file cannot be read or decoded. The message names it.
    """
    try:
        with Image.open(file if isinstance(file, str) else file.open()) as image:
            image.load()
            return to_mode(image, in_chans)
    except Exception as error:  # on damaged bytes Pillow raises nearly anything, SyntaxError and IndexError too
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{file}: this image cannot be decoded ({reason}); replace or remove it.") from error


def to_mode(image: Image.Image, in_chans: int = 3) -> Image.Image:
    """Brings a loaded image of any mode to 8-bit RGB (`in_chans=3`) or grey (`in_chans=1`), see the module's table."""
    if image.mode.startswith("I"):  # I;16 and its byte orders, or I as some formats open 16 bits
        image = Image.fromarray((np.asarray(image).clip(0, 0xFFFF) >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels have no defined range; save it with 8 or 16 bits")
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, BACKGROUND), image)
    mode = "L" if in_chans == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)
