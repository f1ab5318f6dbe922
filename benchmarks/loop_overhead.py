"""Times the training loop against its bare loader: `python benchmarks/loop_overhead.py`.

The model is one parameter, so that what is left is the loop itself: seeding, rate, mixup, loss, backward, clipping,
optimiser, average, progress. Both run in turn, round after round, so that a change of the machine's load hits both
alike. Goal: the loop takes at least 90 % of the loader's steps per second.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from timm.models import register_model
from torch import Tensor, nn

from infvit.config import DataConfig, EngineConfig, LoggerConfig, ModelConfig, RecipeConfig, TrainConfig
from infvit.engine.loop import Run, train_epoch
from infvit.engine.plan import make_plan
from infvit.engine.setup import build_run
from infvit.engine.signals import StopRequest

GOAL = 0.9


class NoOp(nn.Module):
    """Returns its one parameter as every logit."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        return self.bias.expand(len(images), self.num_classes)


@register_model
def no_op_of_loop_overhead(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Entry point for timm's registry."""
    return NoOp(kwargs["num_classes"])


def build(folder: Path, workers: int, batch_size: int) -> Run:
    """Builds a run of the quick recipe on the digits around the no-op model."""
    quick = RecipeConfig(
        lr=2e-3, lr_base_batch=None, sched_on_updates=True, warmup_epochs=0.5, smoothing=0.0, drop_path=0.0, mixup=0.0,
        cutmix=0.0, clip_grad=1.0, ema_decay=0.99, repeated_aug=1, auto_augment=None, color_jitter=None, hflip=0.0,
        scale=[0.8, 1.0], ratio=[0.8, 1.25], resize="timm", reprob=0.0, crop_pct=1.0,
    )  # fmt: skip
    config = TrainConfig(
        model=ModelConfig(name="no_op_of_loop_overhead"),
        data=DataConfig(img_size=32, num_workers=workers),
        recipe=quick,
        engine=EngineConfig(device="cpu", precision="fp32"),
        logger=LoggerConfig(),
        epochs=10_000,
        batch_size=batch_size,
        run_dir=str(folder),
    )
    return build_run(make_plan(config), StopRequest())


def time_loader(run: Run, epoch: int) -> float:
    """Steps per second of the loader alone, over one epoch."""
    start = time.perf_counter()
    run.sampler.start(epoch)
    steps = sum(1 for _ in run.train_loader)
    return steps / (time.perf_counter() - start)


def time_loop(run: Run, epoch: int) -> float:
    """Steps per second of the loop, over one epoch."""
    run.state.update = epoch * run.sampler.updates_per_epoch
    start = time.perf_counter()
    train_epoch(run, epoch)
    return run.sampler.updates_per_epoch / (time.perf_counter() - start)


def main() -> None:
    """Prints both speeds and their ratio for each number of workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"digits, 32 px, batch {options.batch_size}: median of {options.rounds} interleaved epochs")
    print(f"{'workers':>7}  {'loader':>12}  {'loop':>12}  {'loop / loader':>13}")
    for workers in options.workers:
        with tempfile.TemporaryDirectory() as folder:
            run = build(Path(folder), workers, options.batch_size)
            time_loader(run, 0), time_loop(run, 0)  # warm up
            pairs = [(time_loader(run, epoch), time_loop(run, epoch)) for epoch in range(options.rounds)]
        loader, loop = (median(values) for values in zip(*pairs, strict=True))
        ratio = median(loop / loader for loader, loop in pairs)
        verdict = "" if ratio >= GOAL else f"  below the goal of {GOAL:.0%}"
        print(f"{workers:>7}  {loader:>10.1f}/s  {loop:>10.1f}/s  {ratio:>13.1%}{verdict}")


if __name__ == "__main__":
    main()
