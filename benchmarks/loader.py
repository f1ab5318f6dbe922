"""Times the input of training, without a model, against timm's: `python benchmarks/loader.py`.

JPEGs of ImageNet's usual sizes (most of its images have one side of 500 pixels, and 110 KB) are cut out of
scikit-learn's two photographs. On one core, without loader processes, each path then makes epoch after epoch of the
DeiT recipe at 224 pixels, all paths in turn:

- timm: its `create_dataset` and `create_loader` as they are, with the prefetcher, on the CPU
- infvit: our loader, with timm's resize (`recipe.resize=timm`) and with PyTorch's (`recipe.resize=torch`)

once with one view of an image and once with the three of repeated augmentation. "Worker" is what loader processes do
(decode, augment, collate), and what limits a GPU; "all" adds normalisation and erasing, which a GPU does. Goals, for
both: 1.15 times timm's images per second with one view, 1.5 times with three.
"""

import argparse
import io
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.data import create_dataset, create_loader
from timm.data.distributed_sampler import RepeatAugSampler

from infvit.config import DataConfig, RecipeConfig
from infvit.data import TrainSampler, build_source, build_train_loader, seeded, train_transform
from infvit.data.transforms import mend_posterize

GOALS = {1: 1.15, 3: 1.5}
SIZES = ((500, 375), (500, 375), (375, 500), (500, 333), (333, 500), (500, 400))
BYTES = 110_000
SIDE = 224
HEADS = f"{'decode':>7}  {'augment':>7}  {'collate':>7}  {'worker':>10}  {'ratio':>6}  {'all':>10}  {'ratio':>6}"
DEIT = RecipeConfig()
"""The recipe's defaults are DeiT's."""


def write_images(folder: Path, count: int) -> list[Path]:
    """Writes crops of the two photographs as JPEG of nearly `BYTES` each into two class folders."""
    generator = np.random.default_rng(0)
    photographs = load_sample_images().images
    paths = []
    for number in range(count):
        width, height = SIZES[number % len(SIZES)]
        pixels = photographs[number % 2]
        pixels = pixels if width > height else np.rot90(pixels)
        top = generator.integers(pixels.shape[0] - height + 1)
        left = generator.integers(pixels.shape[1] - width + 1)
        image = Image.fromarray(np.ascontiguousarray(pixels[top : top + height, left : left + width]))
        path = folder / "train" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(min((encode(image, quality) for quality in (80, 90, 95, 97, 98, 99)), key=off_target))
        paths.append(path)
    return paths


def encode(image: Image.Image, quality: int) -> bytes:
    """Returns the image as JPEG."""
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def off_target(data: bytes) -> int:
    """How far a file is from ImageNet's average size."""
    return abs(len(data) - BYTES)


class Clock:
    """Seconds spent in the functions it wraps."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function with its time added up under a name."""

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            self.seconds[name] += time.perf_counter() - start
            return result

        return timed


class Inner:
    """The loader inside timm's PrefetchLoader, with the time of its batches added up as `worker`."""

    def __init__(self, loader: Any, clock: Clock) -> None:
        self.loader, self.clock = loader, clock

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        return iter(self.clock.wrap("worker", lambda: next(batches, None)), None)


class TimmPath:
    """timm's loader; the views of repeated augmentation in the order of its sampler."""

    name = "timm"

    def __init__(self, root: Path, batch_size: int, repeats: int) -> None:
        self.clock = Clock()
        dataset = create_dataset("", root=str(root / "train"))
        self.loader = create_loader(
            dataset,
            SIDE,
            batch_size,
            is_training=True,
            scale=tuple(DEIT.scale),
            ratio=tuple(DEIT.ratio),
            hflip=DEIT.hflip,
            color_jitter=DEIT.color_jitter,
            auto_augment=DEIT.auto_augment,
            interpolation=DEIT.interpolation,
            re_prob=DEIT.reprob,
            re_mode=DEIT.remode,
            re_count=DEIT.recount,
            num_workers=0,
            persistent_workers=False,
            device=torch.device("cpu"),
        )
        mend_posterize(dataset.transform.transforms)  # else Pillow 13 ends the epoch with an error now and then
        inner = self.loader.loader
        if repeats > 1:
            inner.batch_sampler.sampler = RepeatAugSampler(dataset, 1, 0, num_repeats=repeats, selected_round=0)
        dataset.transform = self.clock.wrap("augment", dataset.transform)
        inner.collate_fn = self.clock.wrap("collate", inner.collate_fn)
        self.sampler, self.loader.loader = inner.batch_sampler.sampler, Inner(inner, self.clock)

    def epoch(self, number: int) -> int:
        """Loads an epoch and returns the number of its views."""
        if isinstance(self.sampler, RepeatAugSampler):
            self.sampler.set_epoch(number)
        with seeded(number):
            return sum(len(images) for images, _ in self.loader)


class OurPath:
    """Our loader."""

    def __init__(self, root: Path, batch_size: int, repeats: int, resize: str) -> None:
        self.name, self.clock = f"infvit, resize={resize}", Clock()
        data = DataConfig(name="folder", root=str(root))
        source = build_source(data, "train")
        transform = train_transform(RecipeConfig(resize=resize), data, SIDE)
        self.sampler = TrainSampler(len(source), batch_size, None, repeats, seed=0)
        self.loader = build_train_loader(source, transform, self.sampler, 0, False)
        transform.augment = self.clock.wrap("augment", transform.augment)  # type: ignore[method-assign]
        transform.finish = self.clock.wrap("finish", transform.finish)  # type: ignore[method-assign]
        self.loader.collate_fn = self.clock.wrap("collate", self.loader.collate_fn)

    def epoch(self, number: int) -> int:
        """Loads an epoch and returns the number of its views."""
        self.sampler.start(number)
        return sum(len(batch.images) for batch in self.loader)


def measure(path: TimmPath | OurPath, number: int) -> dict[str, float]:
    """Returns the milliseconds per view of one epoch: all, worker, and decode, augment and collate within worker."""
    path.clock.seconds.clear()
    start = time.perf_counter()
    views = path.epoch(number)
    seconds = path.clock.seconds
    seconds["all"] = time.perf_counter() - start
    if "worker" not in seconds:
        seconds["worker"] = seconds["all"] - seconds["finish"]
    seconds["decode"] = seconds["worker"] - seconds["augment"] - seconds["collate"]
    return {name: 1000 * value / views for name, value in seconds.items()}


def report(name: str, rows: Sequence[dict[str, float]], timm: Sequence[dict[str, float]]) -> dict[str, float]:
    """Prints the line of a path and returns its speed relative to timm's, for worker and all."""
    ratios = {part: median(t[part] / r[part] for t, r in zip(timm, rows, strict=True)) for part in ("worker", "all")}
    middle = {part: median(row[part] for row in rows) for part in rows[0]}
    shares = "  ".join(f"{middle[part] / middle['worker']:>7.0%}" for part in ("decode", "augment", "collate"))
    speeds = "  ".join(f"{1000 / middle[part]:>8.0f}/s  {ratios[part]:>5.2f}x" for part in ratios)
    print(f"{name:<22}  {shares}  {speeds}")
    return ratios


def print_deviations(paths: Sequence[Path], views: int) -> None:
    """Prints how far crops resized by PyTorch are from the same crops resized by Pillow, in grey levels."""
    crops = [
        train_transform(RecipeConfig(resize=resize), DataConfig(), SIDE).operations[0] for resize in ("timm", "torch")
    ]
    differences = []
    for number in range(views):
        with Image.open(paths[number % len(paths)]) as image:
            pair = []
            for crop in crops:
                with seeded(number):
                    pair.append(np.asarray(crop(image), np.int16))
        differences.append(np.abs(pair[0] - pair[1]))
    worst, average = max(d.max() for d in differences), mean(float(d.mean()) for d in differences)
    close = sum(d.max() <= 2 for d in differences) / views
    print(
        f"grey levels between both resizes over {views} views: mean {average:.3f}, largest {worst}; "
        f"at most 2 in {close:.0%} of the views"
    )


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        files = write_images(Path(folder), options.images)
        size = mean(path.stat().st_size for path in files)
        print(
            f"DeiT recipe, {SIDE} px, {options.images} JPEGs of {size / 1000:.0f} KB, batch {options.batch_size}, "
            f"one core: median of {options.rounds} interleaved epochs"
        )
        for repeats, goal in GOALS.items():
            common = Path(folder), options.batch_size, repeats
            paths: list[TimmPath | OurPath] = [TimmPath(*common), OurPath(*common, "timm"), OurPath(*common, "torch")]
            for path in paths:
                path.epoch(0)  # warm up
            rounds = [[measure(path, number + 1) for path in paths] for number in range(options.rounds)]
            print(f"\n{f'views of an image: {repeats}':<22}  {HEADS}")
            for path, rows in zip(paths, zip(*rounds, strict=True), strict=True):
                ratios = report(path.name, rows, [row[0] for row in rounds])
            verdict = "reached" if min(ratios.values()) >= goal else "NOT reached"
            print(f"goal {goal}x: {verdict}")
        print()
        print_deviations(files, 4 * options.images)


if __name__ == "__main__":
    main()
