"""From an image to the tensor a model takes. The transforms are timm's; the sizes and refusals are decided here."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

from PIL import Image
from timm.data import auto_augment, create_transform
from timm.data.auto_augment import AugmentOp
from torch import Tensor

from infvit.config import TORCH_FILTERS, DataConfig, RecipeConfig
from infvit.data.augment import TrainTransform
from infvit.errors import ConfigError, did_you_mean

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")

UNPATCHED = 64
"""Smallest default side for a model without patches: convolutional networks divide it by 32."""

Transform = Callable[[Image.Image], Tensor]


def resolve_img_size(data: DataConfig, native_size: int, patch_size: int | None) -> int:
    """Returns the image side in pixels that model and data share.

    Args:
        data: `data.img_size` decides when it is given.
        native_size: Side at which the data set is naturally used.
        patch_size: Patch side of the model; None when it has none (the side is then at least 64 pixels). Without
            `data.img_size` the image is large enough for four patches a side, and a multiple of the patch.

    Raises:
        ConfigError: `data.img_size` is not a multiple of the patch.
    """
    if patch_size is None:
        return data.img_size or max(native_size, UNPATCHED)
    if data.img_size is None:
        return -(-max(native_size, 4 * patch_size) // patch_size) * patch_size
    if data.img_size % patch_size:
        below = data.img_size // patch_size * patch_size
        nearest = f"{below} or {below + patch_size}" if below else f"{patch_size}"
        raise ConfigError(
            f"data.img_size={data.img_size} is not divisible by the model's patch size {patch_size}: use {nearest}."
        )
    return data.img_size


def train_transform(recipe: RecipeConfig, data: DataConfig, img_size: int) -> TrainTransform:
    """Returns the augmentation of a recipe: random resized crop, flip, AutoAugment, normalisation, random erasing.

    With `recipe.resize=timm` each view is that of timm's `create_transform`, drawn from the same generators.

    Args:
        recipe: Its image keys.
        data: Channels and normalisation.
        img_size: Side of the result in pixels.

    Returns:
        A function from a PIL image to float32 (C, H, W), which the loader takes in two halves.

    Raises:
        ConfigError: timm does not understand `recipe.auto_augment` or `recipe.interpolation`.
    """
    _check_interpolation("recipe.interpolation", recipe.interpolation)
    try:
        transform = create_transform(
            img_size,
            is_training=True,
            scale=(recipe.scale[0], recipe.scale[1]),
            ratio=(recipe.ratio[0], recipe.ratio[1]),
            hflip=recipe.hflip,
            color_jitter=recipe.color_jitter or 0.0,
            auto_augment=recipe.auto_augment,
            interpolation=recipe.interpolation,
            re_prob=recipe.reprob,
            re_mode=recipe.remode,
            re_count=recipe.recount,
            mean=_per_channel(data.mean, data.in_chans),
            std=_per_channel(data.std, data.in_chans),
        )
    except (AssertionError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"recipe.auto_augment={recipe.auto_augment!r} is not understood by timm ({error}); "
            "use e.g. rand-m9-mstd0.5-inc1, augmix-m3-w3, original, or null."
        ) from error
    mend_posterize(transform.transforms)
    by_torch = recipe.resize == "torch" and recipe.interpolation in TORCH_FILTERS
    return TrainTransform(transform.transforms, recipe.interpolation if by_torch else None)


def eval_transform(
    crop_pct: float, interpolation: str, data: DataConfig, img_size: int, crop_mode: str = "center"
) -> Transform:
    """Returns the evaluation transform: resize so that the centre crop keeps `crop_pct`, crop, normalise.

    It is timm's, resized by Pillow: published accuracies were measured so.

    Args:
        crop_pct: Share of the resized image's shorter side that the crop keeps, in (0, 1].
        interpolation: Resize filter.
        data: Channels and normalisation.
        img_size: Side of the result in pixels.
        crop_mode: timm's: center, squash or border.

    Returns:
        A function from a PIL image to float32 (C, H, W), without randomness.

    Raises:
        ConfigError: Unknown interpolation.
    """
    _check_interpolation("interpolation", interpolation)
    transform = create_transform(
        img_size,
        is_training=False,
        crop_pct=crop_pct,
        crop_mode=crop_mode,
        interpolation=interpolation,
        mean=_per_channel(data.mean, data.in_chans),
        std=_per_channel(data.std, data.in_chans),
    )
    return cast(Transform, transform)


def _check_interpolation(key: str, name: str) -> None:
    if name not in INTERPOLATIONS:
        raise ConfigError(f"{key}={name!r} is unknown. {did_you_mean(name, INTERPOLATIONS)}")


def _per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    return tuple(values) * (channels if len(values) == 1 else 1)


def mend_posterize(transforms: Iterable[Any]) -> None:
    """Lets timm's `posterize` take 0 bits, which `rand-m9-mstd0.5-inc1` draws in about one of a thousand views."""
    for operation in _operations(transforms):
        if operation.aug_fn is auto_augment.posterize:
            operation.aug_fn = _posterize


def _operations(transforms: Iterable[Any]) -> Iterator[AugmentOp]:
    """Finds the operations inside timm's RandAugment, AutoAugment and AugMix."""
    for transform in transforms:
        if isinstance(transform, AugmentOp):
            yield transform
        elif isinstance(transform, list | tuple):
            yield from _operations(transform)
        else:
            yield from _operations([*getattr(transform, "ops", ()), *getattr(transform, "policy", ())])


def _posterize(image: Image.Image, bits_to_keep: int, **kwargs: Any) -> Image.Image:
    """timm's operation, also for 0 bits: black, as before Pillow refused that."""
    if bits_to_keep == 0:
        return Image.new(image.mode, image.size)
    result: Image.Image = auto_augment.posterize(image, bits_to_keep, **kwargs)
    return result
