"""From a decoded image to the normalised tensor of a training view, in two halves.

`TrainTransform.augment` does in a loader process what works on bytes: crop, flip, RandAugment. It hands over 8 bits a
value, a quarter of float32, and a list of what is to be erased. `TrainTransform.finish` turns a whole batch of them
into numbers on the device: normalisation, then the erased rectangles. Both halves together are, bit for bit, timm's
transform (`resize=timm`) or that with another implementation of the same resize filter (`resize=torch`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import MaybeToTensor, RandomResizedCropAndInterpolation
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms import Normalize


class Patch(NamedTuple):
    """A rectangle of a normalised image that random erasing fills: its corner, and float32 values (C, h, w)."""

    top: int
    left: int
    values: Tensor


class Augmented(NamedTuple):
    """A view before normalisation: uint8 (H, W, C) or grey (H, W), and what is erased from it afterwards."""

    pixels: np.ndarray
    patches: list[Patch]


class Pixels(NamedTuple):
    """n views on their way from a loader process to the device.

    Attributes:
        images: uint8 (n, H, W, C).
        boxes: int64 (k, 5): image, top, left, height, width of each of the k patches, in the order they are drawn.
        values: float32, the patches' values (C, h, w) one after the other.
    """

    images: Tensor
    boxes: Tensor
    values: Tensor


class TrainTransform:
    """The augmentation of a recipe. It draws from Python's, NumPy's and PyTorch's global generators.

    Args:
        timm: timm's transform: image operations, conversion, normalisation and, where wanted, random erasing.
        torch_filter: `bilinear` or `bicubic` lets PyTorch resize the crop; None lets Pillow do it, as timm does.
    """

    def __init__(self, timm: Sequence[Any], torch_filter: str | None) -> None:
        at = next(i for i, step in enumerate(timm) if isinstance(step, MaybeToTensor))
        self.operations: list[Callable[[Image.Image], Image.Image]] = list(timm[:at])
        self.erasing = next((step for step in timm if isinstance(step, RandomErasing)), None)
        (normalize,) = [step for step in timm if isinstance(step, Normalize)]
        self.mean, self.std = (torch.as_tensor(v).view(-1, 1, 1) for v in (normalize.mean, normalize.std))
        if torch_filter is not None:
            (crop,) = [i for i, step in enumerate(timm) if isinstance(step, RandomResizedCropAndInterpolation)]
            self.operations[crop] = TorchCrop(timm[crop], torch_filter)

    def __call__(self, image: Image.Image) -> Tensor:
        """Returns one view, float32 (C, H, W)."""
        return self.finish(pack([self.augment(image)]))[0]

    def augment(self, image: Image.Image) -> Augmented:
        """Returns one view, before normalisation. The image is left as it is."""
        for operation in self.operations:
            image = operation(image)
        recorder = _Recorder(len(self.mean), image.height, image.width)
        if self.erasing is not None:
            self.erasing(recorder)
        return Augmented(np.asarray(image), recorder.patches)

    def finish(self, pixels: Pixels, device: torch.device | str = "cpu") -> Tensor:
        """Returns views as float32 (n, C, H, W) on a device: normalised, then erased."""
        mean, std = (values.to(device, non_blocking=True) for values in (self.mean, self.std))
        images = pixels.images.to(device, non_blocking=True).permute(0, 3, 1, 2)
        images = images.to(torch.float32, memory_format=torch.contiguous_format)
        images = images.div_(255).sub_(mean).div_(std)
        boxes, channels = pixels.boxes.tolist(), images.shape[1]
        sizes = [channels * height * width for *_, height, width in boxes]
        patches = pixels.values.to(device, non_blocking=True).split(sizes)
        for (image, top, left, height, width), values in zip(boxes, patches, strict=True):
            images[image, :, top : top + height, left : left + width] = values.view(channels, height, width)
        return images


def pack(views: Sequence[Augmented]) -> Pixels:
    """Puts at least one view together as `Pixels`."""
    images = np.stack([view.pixels for view in views])
    boxes = [
        (number, patch.top, patch.left, *patch.values.shape[1:])
        for number, view in enumerate(views)
        for patch in view.patches
    ]
    values = [patch.values.flatten() for view in views for patch in view.patches]
    return Pixels(
        torch.from_numpy(images if images.ndim == 4 else images[..., None]),
        torch.tensor(boxes, dtype=torch.int64).view(-1, 5),
        torch.cat(values) if values else torch.empty(0),
    )


class TorchCrop:
    """timm's random resized crop, of the same rectangle and with the same filter, resized by PyTorch.

    Pillow works on four bytes a pixel, PyTorch on three and with wider instructions, which makes it several times as
    fast. Both go along one axis, round, and go along the other. PyTorch always begins with the rows, recent versions of
    Pillow begin with the columns when that is less work, and there the two differ by more than the last rounding.
    """

    def __init__(self, crop: RandomResizedCropAndInterpolation, mode: str) -> None:
        self.crop, self.mode = crop, mode

    def __call__(self, image: Image.Image) -> Image.Image:
        top, left, height, width = self.crop.get_params(image, self.crop.scale, self.crop.ratio)
        part = np.array(image.crop((left, top, left + width, top + height))).reshape(1, height, width, -1)
        # (1, C, h, w) in channels-last layout, which the filter keeps: no copy on either side.
        resized = interpolate(
            torch.from_numpy(part).permute(0, 3, 1, 2), size=self.crop.size, mode=self.mode, antialias=True
        )
        pixels = resized[0].permute(1, 2, 0).numpy()
        return Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[..., 0])


class _Recorder:
    """Stands for a normalised image (C, H, W) and takes down what timm's RandomErasing writes into it."""

    dtype = torch.float32

    def __init__(self, channels: int, height: int, width: int) -> None:
        self.shape = channels, height, width
        self.patches: list[Patch] = []

    def size(self) -> tuple[int, int, int]:
        return self.shape

    def __setitem__(self, region: tuple[slice, slice, slice], values: Tensor) -> None:
        _, rows, columns = region
        shape = self.shape[0], rows.stop - rows.start, columns.stop - columns.start
        self.patches.append(Patch(rows.start, columns.start, values.expand(shape)))
