"""What attention quality costs: perturbation against bare forward passes, ROC and PR against scikit-learn.

    python benchmarks/quality_cost.py [--model vit_tiny_patch16_224] [--images 32] [--batch 64] [--rounds 3]

The perturbation (intact passes, maps, orders, removal, scores) and as many bare forward passes of full batches take
turns; the median ratio is printed.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import timm
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

import infvit  # registers the models
from infvit.evaluation.attention_quality import INTACT_BATCH
from infvit.evaluation.perturb import Perturber
from infvit.metrics import Ranking
from infvit.models.inspect import observe, patch_layout


def seconds(work: Callable[[], object]) -> float:
    """Returns how long a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@torch.no_grad()
def perturbation(name: str, count: int, batch: int, rounds: int) -> None:
    """Prints what the perturbation takes, in units of its forward passes."""
    model = timm.create_model(name).eval()
    side = model.default_cfg["input_size"][-1]
    images, grid = torch.randn(count, 3, side, side), patch_layout(model, (side, side))[1]
    passes = 0

    def whole() -> None:
        nonlocal passes
        passes = count

        def scored(x: torch.Tensor) -> torch.Tensor:
            nonlocal passes
            passes += len(x)
            return model(x)

        perturber = Perturber(scored, batch, grid, lambda x: x.new_zeros(1, 1, 1, 1), seed=0)
        for start in range(0, count, INTACT_BATCH):
            some = images[start : start + INTACT_BATCH]
            logits, calls = observe(model, some)
            maps = calls[-1].patch_map().mean(1).flatten(1)
            perturber.add(some, logits, maps, list(range(start, start + len(some))))
        perturber.finish()

    def bare() -> None:
        for start in range(0, passes, batch):
            model(images[torch.arange(min(batch, passes - start)) % count])

    whole()
    ratios, times = [], []
    for _ in range(rounds):
        times.append(seconds(whole))
        ratios.append(times[-1] / seconds(bare))
    print(
        f"{name}: {count} images, {passes} passes ({passes / count:.0f} an image), batch {batch}: "
        f"{statistics.median(times):.2f} s, {statistics.median(ratios):.3f}x the bare passes "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )


def localization(maps: int, patches: int) -> None:
    """Prints what ROC and PR of many maps take, mean curves included."""
    rng = np.random.default_rng(0)
    relevance = np.maximum(rng.normal(size=(maps, patches)), 0)
    labels = rng.random((maps, patches)) < rng.uniform(0.1, 0.9, (maps, 1))
    labels[:, 0], labels[:, 1] = True, False
    grid = np.linspace(0, 1, 101)

    def ours() -> None:
        ranking = Ranking.of(labels, relevance)
        ranking.roc_auc(), ranking.average_precision(), ranking.mean_roc(grid), ranking.mean_precision(grid)

    def theirs() -> None:
        for row, values in zip(labels, relevance, strict=True):
            roc_auc_score(row, values), average_precision_score(row, values)

    print(f"ROC and PR of {maps} maps of {patches} patches: {seconds(ours):.3f} s with curves, "
          f"scikit-learn without {seconds(theirs):.2f} s")  # fmt: skip


def main() -> None:
    """Prints both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    localization(2088, 196)
    perturbation(options.model, options.images, options.batch, options.rounds)


if __name__ == "__main__":
    assert infvit.__version__
    main()
