"""Image sizes, and timm's transforms under our configuration."""

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment

from infvit.config import DataConfig, RecipeConfig
from infvit.data import eval_transform, resolve_img_size, seeded, train_transform
from infvit.errors import ConfigError

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8))
GREY = DataConfig(in_chans=1, mean=[0.5], std=[0.25])


NATURAL = [(None, 32, 4, 32), (None, 32, 16, 64), (None, 48, 16, 64), (None, 48, 8, 48), (None, 224, 14, 224)]
GIVEN = [(None, 50, 7, 56), (None, 32, None, 64), (None, 224, None, 224), (96, 32, 16, 96), (50, 32, None, 50)]


@pytest.mark.parametrize(("given", "native", "patch", "expected"), NATURAL + GIVEN)
def test_image_size(given: int | None, native: int, patch: int | None, expected: int) -> None:
    assert resolve_img_size(DataConfig(img_size=given), native, patch) == expected


@pytest.mark.parametrize(("size", "advice"), [(225, "224 or 240"), (10, "use 16")])
def test_indivisible_image_size_names_both(size: int, advice: str) -> None:
    with pytest.raises(ConfigError, match=rf"data.img_size={size} .*patch size 16.*{advice}"):
        resolve_img_size(DataConfig(img_size=size), 32, 16)


def test_eval_transform_by_hand() -> None:
    """A 4 x 4 image at twice the crop's size: the crop keeps the middle, normalised per channel."""
    pixels = np.zeros((4, 4, 3), np.uint8)
    pixels[1:3, 1:3] = (255, 51, 0)
    data = DataConfig(mean=[0.5, 0.2, 0.0], std=[0.5, 0.1, 1.0])
    out = eval_transform(0.5, "nearest", data, 2)(Image.fromarray(pixels))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, torch.tensor([1.0, 0.0, 0.0])[:, None, None].expand(3, 2, 2))


def test_train_transform_without_augmentation_is_the_image() -> None:
    recipe = RecipeConfig(
        auto_augment=None, color_jitter=None, hflip=0, scale=[1, 1], ratio=[1, 1], reprob=0, interpolation="nearest"
    )
    out = train_transform(recipe, DataConfig(mean=[0.0], std=[1.0]), 40)(NOISE)
    torch.testing.assert_close(out, torch.from_numpy(np.asarray(NOISE) / 255).permute(2, 0, 1).float())


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "augmix-m3-w3", "original", "v0", "3a", None])
def test_grey_and_colour_through_every_policy(policy: str | None) -> None:
    recipe = RecipeConfig(auto_augment=policy, reprob=0.5)
    for data, image in ((DataConfig(), NOISE), (GREY, NOISE.convert("L"))):
        transform = train_transform(recipe, data, 16)
        for seed in range(60):
            with seeded(seed):
                out = transform(image)
            assert out.shape == (data.in_chans, 16, 16)
            assert torch.isfinite(out).all()


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_posterize_to_zero_bits(mode: str) -> None:
    """timm draws it under RandAugment; recent Pillow refuses it. The result is what Pillow gave before: black."""
    transform = train_transform(RecipeConfig(auto_augment="rand-m9-inc1"), DataConfig(), 16)
    operations = [op for t in transform.operations for op in getattr(t, "ops", [])]
    (posterize,) = [op for op in operations if op.name == "PosterizeIncreasing"]
    assert posterize.aug_fn is not auto_augment.posterize
    image = NOISE.convert(mode)
    assert not np.asarray(posterize.aug_fn(image, 0)).any()
    for bits in (1, 4, 8):
        assert np.array_equal(posterize.aug_fn(image, bits), np.asarray(image) & (0xFF << (8 - bits) & 0xFF))


def test_erasing_mode_and_count_reach_timm() -> None:
    def erased(mode: str, count: int) -> torch.Tensor:
        recipe = RecipeConfig(
            reprob=1, remode=mode, recount=count, auto_augment=None, color_jitter=None, hflip=0, scale=[1, 1]
        )
        with seeded(0):
            return train_transform(recipe, DataConfig(), 32)(Image.new("RGB", (32, 32), (255, 255, 255)))

    values = {mode: erased(mode, 1)[0].unique().numel() for mode in ("const", "rand", "pixel")}
    assert values["const"] == values["rand"] == 2
    assert values["pixel"] > 20
    assert (erased("const", 1) == 0).any()
    assert not (erased("rand", 1) == 0).any()
    assert not torch.equal(erased("const", 1), erased("const", 5))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"recipe.interpolation='bicubik'.*'bicubic'"):
        train_transform(RecipeConfig(interpolation="bicubik"), DataConfig(), 16)
    with pytest.raises(ConfigError, match=r"interpolation='random' is unknown"):
        eval_transform(0.9, "random", DataConfig(), 16)
    with pytest.raises(ConfigError, match=r"recipe.auto_augment='foo'.*rand-m9"):
        train_transform(RecipeConfig(auto_augment="foo"), DataConfig(), 16)
