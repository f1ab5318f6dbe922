"""The training loop."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from infvit.attention.infsa import path_decays
from infvit.config import TrainConfig
from infvit.data import Batch, DamageLog, TrainSampler
from infvit.engine import checkpoint
from infvit.engine.device import autocast, seed_update
from infvit.engine.profiling import TRACE, profiling
from infvit.engine.progress import Progress
from infvit.engine.record import WandbLogger, write_history
from infvit.engine.signals import Interrupted, StopRequest
from infvit.engine.state import RunState
from infvit.engine.validate import validate
from infvit.errors import DataError, TrainingError
from infvit.recipe import BatchMixup, Schedule, training_loss

log = logging.getLogger(__name__)


@dataclass
class Run:
    """Everything a run needs: what changes is in `state`, the rest stays as it was built."""

    config: TrainConfig
    folder: Path
    device: torch.device
    precision: torch.dtype
    state: RunState
    forward: nn.Module  # the model, or its compiled form
    sampler: TrainSampler
    train_loader: DataLoader[Any]
    val_loader: DataLoader[Any]
    schedule: Schedule
    mixup: BatchMixup | None
    header: dict[str, Any]  # what a checkpoint says of the run besides its state
    damage: DamageLog
    stop: StopRequest
    after_epoch: Sequence[Callable[[Path], None]] = ()
    logger: WandbLogger | None = None

    @property
    def last_update(self) -> int:
        """Number of updates after which the run is over."""
        total = self.config.epochs * self.sampler.updates_per_epoch
        return min(total, self.config.max_steps or total)

    @property
    def finished(self) -> bool:
        """Whether all updates are done and the last epoch is on record."""
        history = self.state.history
        return bool(history) and history[-1]["update"] == self.last_update

    @property
    def memory_format(self) -> torch.memory_format:
        """Layout of the images."""
        return torch.channels_last if self.config.engine.channels_last else torch.contiguous_format


def fit(run: Run) -> None:
    """Trains until the last update. An epoch is: its updates, an evaluation, one row of metrics, a checkpoint.

    Raises:
        Interrupted: asked to stop; the state is saved and the same command goes on from there.
        TrainingError: the loss is not finite again and again; the last checkpoint stays as it is.
    """
    state, metric = run.state, run.config.engine.best_metric
    while not run.finished:
        epoch = len(state.history)
        row: dict[str, Any] = {"epoch": epoch + 1, **train_epoch(run, epoch)}
        if (epoch + 1) % run.config.engine.eval_every == 0 or state.update == run.last_update:
            row |= evaluate(run)
        state.history.append(row)
        state.epoch_loss, state.epoch_images = 0.0, 0
        # Scores with a loss that is not finite are those of broken weights.
        scored = math.isfinite(row.get(metric.replace("top1", "loss"), math.nan))
        if scored and (state.best is None or row[metric] > state.best):
            state.best = row[metric]
            save(run, best=True)
        save(run)
        report(run, row)


def train_epoch(run: Run, epoch: int) -> dict[str, Any]:
    """Does the updates of an epoch that are not done yet and returns its training metrics."""
    state, engine = run.state, run.config.engine
    first = epoch * run.sampler.updates_per_epoch
    end = min(first + run.sampler.updates_per_epoch, run.last_update)
    progress = Progress(epoch, run.config.epochs, end - first, state.update - first, engine.log_seconds)
    run.sampler.start(epoch, state.update - first)
    batches = iter(run.train_loader) if state.update < end else iter(())
    run.forward.train()
    saved = time.monotonic()
    profile = run.config.profile and not (run.folder / TRACE).exists()
    with progress, profiling(profile, run.folder, run.device) as profile_step:
        while state.update < end:
            lr = run.schedule.set(state.update)
            seed_update(run.config.seed, state.update, run.device)
            micro_batches = progress.timed(batches, run.sampler.micro_batches)
            loss, state.grad_norm, images, done = train_update(run, micro_batches)
            if done:
                state.failures = 0
                state.epoch_loss += loss * images
                state.epoch_images += images
            else:
                note_nonfinite(run, loss, lr)
            state.update += 1
            progress.step(loss, lr, images)
            profile_step()
            if run.stop:
                stop_here(run)
            if time.monotonic() - saved > 60 * engine.checkpoint_minutes:
                save(run)
                saved = time.monotonic()
    return {
        "update": state.update,
        "lr": run.schedule.set(state.update - 1),
        "train_loss": state.epoch_loss / state.epoch_images if state.epoch_images else math.nan,
        "grad_norm": state.grad_norm,
        "images_per_second": round(progress.images_per_second, 1),
        "data_wait": round(progress.data_wait, 4),
        "train_seconds": round(progress.elapsed, 2),
        "skipped": state.skipped,
    }


def train_update(run: Run, micro_batches: Iterator[Batch]) -> tuple[float, float, int, bool]:
    """Does one update: the gradient of the global batch, summed over its micro-batches, then one optimiser step.

    Returns:
        Mean loss, norm of the gradient before clipping, number of images, and whether both were finite; if not, no step
        was taken and the weights are as they were.
    """
    state, recipe, device = run.state, run.config.recipe, run.device
    total, count = torch.zeros((), device=device), 0
    state.optimizer.zero_grad(set_to_none=True)
    for images, targets, damaged in micro_batches:
        run.damage.add(damaged)
        if not len(images):
            continue  # all of them were damaged
        images = images.to(device, non_blocking=True, memory_format=run.memory_format)
        targets = targets.to(device, non_blocking=True)
        if run.mixup is not None:
            images, targets = run.mixup(images, targets, state.update)
        with autocast(device, run.precision):
            loss = training_loss(run.forward(images), targets, recipe.smoothing)
        state.scaler.scale(loss / run.config.batch_size).backward()
        total += loss.detach()
        count += len(images)
    if not count:
        raise DataError(f"update {state.update}: none of its images can be decoded ({damaged[0]}) Mend the data set.")
    state.scaler.unscale_(state.optimizer)
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    norm = float(nn.utils.clip_grad_norm_(parameters, recipe.clip_grad or math.inf))
    loss_mean = float(total) / count
    # The scaler of fp16 finds its scale by running into infinite gradients, and leaves such a step out by itself.
    searching = state.scaler.is_enabled() and state.scaler.get_scale() > 1
    done = math.isfinite(loss_mean) and (math.isfinite(norm) or searching)
    if done:
        state.scaler.step(state.optimizer)
        if state.ema is not None:
            state.ema.update(state.model, step=state.update)
    state.scaler.update()
    return loss_mean, norm, count, done


def note_nonfinite(run: Run, loss: float, lr: float) -> None:
    """Counts an update that was left out, and ends the run when there are too many in a row.

    Raises:
        TrainingError: names the update and the first parameter whose gradient is not finite.
    """
    state, most = run.state, run.config.engine.max_nonfinite
    state.skipped += 1
    state.failures += 1
    bad = next(
        (name for name, p in state.model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()),
        "none",
    )
    found = (
        f"update {state.update}: loss {loss}, gradient norm {state.grad_norm}, lr {lr:.2e}, "
        f"loss scale {state.scaler.get_scale():g}, first bad gradient: {bad}"
    )
    log.warning("Not finite, update left out (%d of %d in a row): %s", state.failures, most, found)
    if state.failures >= most:
        there = (run.folder / checkpoint.LAST).exists()
        kept = f"The last finite checkpoint is kept in {run.folder}" if there else "There is no checkpoint yet"
        raise TrainingError(
            f"{state.failures} updates in a row were not finite ({found}). {kept}. "
            "Lower recipe.lr, set recipe.clip_grad=1, or use engine.precision=fp32."
        )


def evaluate(run: Run) -> dict[str, Any]:
    """Scores the raw weights, and the averaged ones where there are any (columns `ema_*`)."""

    def between() -> None:
        if run.stop:
            stop_here(run)

    def score(model: nn.Module) -> dict[str, Any]:
        return validate(model, run.val_loader, run.device, run.precision, run.memory_format, between)

    start = time.perf_counter()
    row = score(run.forward)
    if run.state.ema is not None:
        row |= {f"ema_{name}": value for name, value in score(run.state.ema.module).items() if name != "images"}
    row["eval_seconds"] = round(time.perf_counter() - start, 2)
    if decays := path_decays(run.state.model):
        row["gamma"] = decays
    return row


def save(run: Run, best: bool = False) -> None:
    """Writes the checkpoint: all state to `last.pt`, or what is needed to use the model to `best.pt`."""
    checkpoint.require_finite(run.state.model)
    content = {**run.header, **run.state.state_dict()}
    if best:
        kept = {name: value for name, value in content.items() if name not in ("optimizer", "scaler")}
        checkpoint.save(kept, run.folder / checkpoint.BEST)
    else:
        checkpoint.save(content, run.folder / checkpoint.LAST, previous=run.folder / checkpoint.PREVIOUS)


def stop_here(run: Run) -> None:
    """Saves and leaves.

    Raises:
        Interrupted: always.
    """
    assert run.stop.signum is not None
    save(run)
    raise Interrupted(
        run.stop.signum,
        f"stopped after update {run.state.update} of {run.last_update}; saved in {run.folder}. "
        "The same command goes on from there.",
    )


def write_files(run: Run) -> None:
    """Writes the metrics so far, and what else follows from them."""
    write_history(run.state.history, run.folder)
    for callback in run.after_epoch:
        callback(run.folder)


def report(run: Run, row: dict[str, Any]) -> None:
    """Writes and shows the metrics of an epoch."""
    write_files(run)
    if run.logger is not None:
        run.logger.row(row)
    text = f"epoch {row['epoch']}/{run.config.epochs}  train loss {row['train_loss']:.4f}"
    if "top1" in row:
        text += f"  held-out loss {row['loss']:.4f}  top-1 {row['top1']:.2f} %  top-5 {row['top5']:.2f} %"
    if "ema_top1" in row:
        text += f"  EMA top-1 {row['ema_top1']:.2f} %"
    log.info("%s  (%.0f images/s, data wait %.0f %%)", text, row["images_per_second"], 100 * row["data_wait"])
    if row["data_wait"] > 0.1 and run.device.type != "cpu":
        log.warning("The device waits for data %.0f %% of the time: raise data.num_workers.", 100 * row["data_wait"])
