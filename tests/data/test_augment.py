"""The two halves of a training view, against timm's transform as it is and a resize filter written out."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.data import create_dataset, create_transform

from infvit.config import DataConfig, RecipeConfig
from infvit.data import TrainSampler, build_source, build_train_loader, seeded, train_transform
from infvit.data.augment import pack
from infvit.data.loader import Loader
from infvit.data.transforms import mend_posterize
from infvit.errors import ConfigError

SIDE = 48
PHOTOGRAPH = Image.fromarray(load_sample_images().images[0][100:260, 200:420])
ERASING = RecipeConfig(reprob=0.7, recount=3)


def timm_transform(recipe: RecipeConfig, data: DataConfig):
    """timm's own, with the one operation mended that Pillow 13 refuses."""
    transform = create_transform(
        SIDE,
        is_training=True,
        scale=tuple(recipe.scale),
        ratio=tuple(recipe.ratio),
        hflip=recipe.hflip,
        color_jitter=recipe.color_jitter,
        auto_augment=recipe.auto_augment,
        interpolation=recipe.interpolation,
        re_prob=recipe.reprob,
        re_mode=recipe.remode,
        re_count=recipe.recount,
        mean=tuple(data.mean) * (data.in_chans // len(data.mean)),
        std=tuple(data.std) * (data.in_chans // len(data.std)),
    )
    mend_posterize(transform.transforms)
    return transform


@pytest.mark.parametrize("mode", ["pixel", "rand", "const"])
@pytest.mark.parametrize("channels", [3, 1])
def test_timm_resize_is_timm_bit_for_bit(mode: str, channels: int) -> None:
    recipe = dataclasses.replace(ERASING, remode=mode, resize="timm")
    data = DataConfig(in_chans=channels) if channels == 3 else DataConfig(in_chans=1, mean=[0.4], std=[0.3])
    image = PHOTOGRAPH if channels == 3 else PHOTOGRAPH.convert("L")
    ours, theirs = train_transform(recipe, data, SIDE), timm_transform(recipe, data)
    for seed in range(25):
        with seeded(seed):
            expected = theirs(image)
        with seeded(seed):
            assert torch.equal(ours(image), expected)


def filter_matrix(name: str, size: int, new: int) -> np.ndarray:
    """The antialiased filter along one axis: its kernel, stretched by the factor of a reduction (Pillow's rule)."""
    factor = size / new
    stretch = max(factor, 1.0)
    reach = (2 if name == "bicubic" else 1) * stretch
    matrix = np.zeros((new, size))
    for row in range(new):
        centre = (row + 0.5) * factor
        low, high = max(int(centre - reach + 0.5), 0), min(int(centre + reach + 0.5), size)
        x = np.abs(np.arange(low, high) + 0.5 - centre) / stretch
        if name == "bicubic":  # Keys' kernel with a = -0.5
            near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
            weights = np.where(x < 1, near, np.where(x < 2, far, 0))
        else:
            weights = np.maximum(1 - x, 0)
        matrix[row, low:high] = weights / weights.sum()
    return matrix


def rounded(values: np.ndarray) -> np.ndarray:
    return np.clip(np.floor(values + 0.5), 0, 255)


@pytest.mark.parametrize("name", ["bicubic", "bilinear"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_torch_resize_is_the_filter_written_out(name: str, mode: str) -> None:
    """Along the rows, rounded, then down the columns: at most 2 grey levels off in single pixels, from its weights."""
    image = PHOTOGRAPH.convert(mode)
    crop = train_transform(RecipeConfig(interpolation=name), DataConfig(), SIDE).operations[0]
    differences = []
    for seed in range(30):
        with seeded(seed):
            out = crop(image)
        with seeded(seed):
            top, left, height, width = crop.crop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
        assert (out.mode, out.size) == (mode, (SIDE, SIDE))
        part = np.asarray(image, np.float64)[top : top + height, left : left + width]
        along = rounded(np.einsum("ow,hw...->ho...", filter_matrix(name, width, SIDE), part))
        expected = rounded(np.einsum("oh,hw...->ow...", filter_matrix(name, height, SIDE), along))
        differences.append(np.abs(np.asarray(out) - expected))
    assert max(d.max() for d in differences) <= 2
    assert np.mean([d.mean() for d in differences]) < 0.02


def test_both_resizes_are_one_augmentation() -> None:
    """The same rectangles, flips, operations and erasing from the same seed; small differences of values only."""
    recipe = dataclasses.replace(ERASING, auto_augment=None, color_jitter=None)
    data = DataConfig(mean=[0.0], std=[1 / 255])  # so that values are grey levels
    transforms = [train_transform(dataclasses.replace(recipe, resize=r), data, SIDE) for r in ("torch", "timm")]
    worst = []
    for seed in range(40):
        views = []
        for transform in transforms:
            with seeded(seed):
                views.append(transform(PHOTOGRAPH))
        difference = (views[0] - views[1]).abs()
        worst.append(float(difference.max()))
        assert difference.mean() < 0.5
    assert 0 < max(worst) < 30
    assert np.median(worst) < 4


def test_a_filter_that_torch_lacks_is_resized_by_timm() -> None:
    images = []
    for resize in ("torch", "timm"):
        recipe = dataclasses.replace(ERASING, interpolation="lanczos", auto_augment=None, resize=resize)
        with seeded(3):
            images.append(train_transform(recipe, DataConfig(), SIDE)(PHOTOGRAPH))
    assert torch.equal(*images)


def test_unknown_resize_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"recipe.resize='pillow' must be one of torch, timm"):
        RecipeConfig(resize="pillow")


def test_the_decoded_image_is_left_as_it_is() -> None:
    """All views of an image are taken from it."""
    before = PHOTOGRAPH.tobytes()
    for resize in ("torch", "timm"):
        for scale in ([1.0, 1.0], [0.08, 1.0]):
            transform = train_transform(RecipeConfig(resize=resize, scale=scale, reprob=1), DataConfig(), SIDE)
            for seed in range(30):
                with seeded(seed):
                    transform(PHOTOGRAPH)
    assert PHOTOGRAPH.tobytes() == before


@pytest.fixture
def jpegs(tmp_path: Path) -> Path:
    """Eight JPEGs in two class folders of both splits."""
    for number in range(8):
        for split in ("train", "val"):
            path = tmp_path / split / "ab"[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            PHOTOGRAPH.crop((10 * number, 5, 10 * number + 130, 105 + number)).save(path, quality=90)
    return tmp_path


def test_a_batch_is_what_timm_makes_of_the_files(jpegs: Path) -> None:
    """timm's reader, decoding and transform, with repeated augmentation; and workers hand over bytes."""
    data = DataConfig(name="folder", root=str(jpegs))
    recipe = dataclasses.replace(ERASING, resize="timm")
    theirs = create_dataset("", root=str(jpegs / "train"), transform=timm_transform(recipe, data))
    source, sampler = build_source(data, "train"), TrainSampler(8, 8, 4, 3, seed=5)
    assert [Path(source.locate(i)).name for i in range(8)] == theirs.filenames(basename=True)
    loader = build_train_loader(source, train_transform(recipe, data, SIDE), sampler, 0, False)
    raw = list(Loader.__iter__(loader))
    assert [(b.pixels.images.dtype, *b.pixels.images.shape) for b in raw] == [(torch.uint8, 4, SIDE, SIDE, 3)] * 2
    for views, batch in zip(sampler, loader, strict=True):
        for view, image, target in zip(views, batch.images, batch.targets, strict=True):
            with seeded(view.seed):
                expected, label = theirs[view.index]
            assert torch.equal(image, expected)
            assert target == label


KINDS = {
    "cmyk.jpg": (Image.new("CMYK", (40, 30), (0, 255, 255, 0)), "JPEG", (254, 0, 0)),
    "grey.jpg": (Image.new("L", (40, 30), 77), "JPEG", (77, 77, 77)),
    "deep.png": (Image.fromarray(np.full((30, 40), 40000, np.uint16)), "PNG", (156, 156, 156)),
    "really_png.JPEG": (Image.new("RGB", (40, 30), (9, 8, 7)), "PNG", (9, 8, 7)),
    "alpha.png": (Image.new("RGBA", (40, 30), (255, 0, 0, 51)), "PNG", (255, 204, 204)),
    "palette.png": (Image.new("P", (40, 30), 0), "PNG", (255, 255, 255)),
}


@pytest.mark.parametrize("resize", ["torch", "timm"])
def test_every_kind_of_file_in_training(tmp_path: Path, resize: str) -> None:
    """One decoder for all; neither resize sees what kind of file it was. Damage is named, and only it is left out."""
    folder = tmp_path / "train" / "only"
    folder.mkdir(parents=True)
    for name, (image, kind, _) in KINDS.items():
        options = {"transparency": bytes([0])} if name == "palette.png" else {}
        image.save(folder / name, kind, **options)
    PHOTOGRAPH.save(tmp_path / "whole.jpg")
    (folder / "z_half.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:3000])
    (folder / "z_void.jpg").touch()
    (tmp_path / "val").symlink_to(tmp_path / "train")
    data = DataConfig(name="folder", root=str(tmp_path), mean=[0.0], std=[1 / 255])
    source = build_source(data, "train")
    recipe = RecipeConfig(resize=resize, auto_augment=None, color_jitter=None, reprob=0)
    sampler = TrainSampler(8, 8, 1, 1, seed=0)
    batches = list(build_train_loader(source, train_transform(recipe, data, SIDE), sampler, 0, False))
    for (view,), batch in zip(sampler, batches, strict=True):
        name = Path(source.locate(view.index)).name
        if name.startswith("z_"):
            assert len(batch.images) == 0
            assert [message.split(":")[0] for message in batch.damaged] == [str(folder / name)]
        else:
            expected = torch.tensor(KINDS[name][2]).view(3, 1, 1).expand(3, SIDE, SIDE)
            torch.testing.assert_close(batch.images[0], expected.float(), atol=1.01, rtol=0)  # JPEG rounds


def test_patches_come_to_their_images() -> None:
    """A batch in which images have no patch, one, or several, some over others: each is that image finished alone."""
    transform = train_transform(dataclasses.replace(ERASING, remode="rand"), DataConfig(), SIDE)
    views = []
    for seed in range(20):
        with seeded(seed):
            views.append(transform.augment(PHOTOGRAPH))
    assert {len(view.patches) for view in views} == {0, 1, 2, 3}
    for view, image in zip(views, transform.finish(pack(views)), strict=True):
        plain = (torch.tensor(view.pixels).permute(2, 0, 1) / 255 - transform.mean) / transform.std
        for top, left, values in view.patches:
            plain[:, top : top + values.shape[1], left : left + values.shape[2]] = values
        torch.testing.assert_close(image, plain, atol=1e-6, rtol=0)
