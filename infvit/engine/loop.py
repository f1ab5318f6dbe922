"""The training loop."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from infvit.attention import auxiliary_losses, collect_losses
from infvit.attention.infsa import path_decays
from infvit.config import TrainConfig
from infvit.data import Batch, DamageLog, TrainSampler
from infvit.data.loader import EvalDataset
from infvit.engine import checkpoint
from infvit.engine.device import autocast, seed_update
from infvit.engine.health import first_images, layer_health
from infvit.engine.loggers import Loggers
from infvit.engine.parallel import copy_buffers, gradient_sync, is_sharded, local, require_all_gradients, whole
from infvit.engine.processes import Processes
from infvit.engine.profiling import TRACE, profiling
from infvit.engine.progress import Progress
from infvit.engine.record import write_history
from infvit.engine.signals import Interrupted, StopRequest
from infvit.engine.state import RunState
from infvit.engine.validate import validate
from infvit.errors import DataError, TrainingError
from infvit.recipe import BatchMixup, Schedule, training_loss

log = logging.getLogger(__name__)


@dataclass
class Run:
    """Everything a run needs: what changes of the result is in `state`, the rest stays as it was built."""

    config: TrainConfig
    folder: Path
    device: torch.device
    precision: torch.dtype
    processes: Processes
    state: RunState
    forward: nn.Module  # the model, or its compiled form
    training: nn.Module  # the same, averaging gradients over the processes
    sampler: TrainSampler
    train_loader: DataLoader[Any]
    val_loader: DataLoader[Any]
    schedule: Schedule
    mixup: BatchMixup | None
    header: dict[str, Any]  # what a checkpoint says of the run besides its state
    damage: DamageLog
    stop: StopRequest
    after_epoch: Sequence[Callable[[Path], None]] = ()
    logger: Loggers | None = None  # on the first process only
    saved: float = field(default_factory=time.monotonic)  # when the last checkpoint was written
    save_due: bool = False  # agreed by all processes, as is the next
    stop_signum: int | None = None

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
    def blank(self) -> Tensor:
        """An image for a process that has none, while the others need it to take part in a forward pass."""
        size = self.header["img_size"]
        return torch.zeros(1, self.header["in_chans"], size, size)

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
        state.epoch_loss, state.epoch_auxiliary, state.epoch_images = 0.0, 0.0, 0
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
    progress = Progress(
        epoch, run.config.epochs, end - first, state.update - first, engine.log_seconds, run.processes.first
    )
    run.sampler.start(epoch, state.update - first)
    batches = iter(run.train_loader) if state.update < end else iter(())
    run.training.train()
    profile = run.config.profile and run.processes.first and not (run.folder / TRACE).exists()
    with progress, profiling(profile, run.folder, run.device) as profile_step:
        while state.update < end:
            lr = run.schedule.set(state.update)
            seed_update(run.config.seed, state.update, run.device, run.processes.rank)
            micro_batches = progress.timed(batches, run.sampler.micro_batches)
            loss, state.grad_norm, images, done = train_update(run, micro_batches)
            if done:
                state.failures = 0
                state.epoch_loss += loss * images
                state.epoch_auxiliary += state.auxiliary * images
                state.epoch_images += images
            else:
                note_nonfinite(run, loss, lr)
            state.update += 1
            progress.step(loss, lr, images)
            profile_step()
            stop_or_save(run)
    seen = state.epoch_images or math.nan
    own = {"auxiliary_loss": state.epoch_auxiliary / seen} if auxiliary_losses(state.model) else {}
    return {
        "update": state.update,
        "lr": run.schedule.set(state.update - 1),
        "train_loss": state.epoch_loss / seen,
        **own,
        "grad_norm": state.grad_norm,
        "images_per_second": round(progress.images_per_second, 1),
        "data_wait": round(progress.data_wait, 4),
        "train_seconds": round(progress.elapsed, 2),
        "skipped": state.skipped,
    }


def train_update(run: Run, micro_batches: Iterator[Batch]) -> tuple[float, float, int, bool]:
    """Does one update: the gradient of the global batch, then one optimiser step.

    Returns:
        Mean loss, norm of the gradient before clipping, number of images, and whether all were finite; if not, no step
        was taken and the weights are as they were. The same on all processes. The model's own loss is no part of the
        first, so that models can be compared by it; its mean is in `state.auxiliary`.
    """
    state, recipe = run.state, run.config.recipe
    state.optimizer.zero_grad(set_to_none=True)
    loss_sum, own_sum, images = add_gradients(run, micro_batches)
    state.scaler.unscale_(state.optimizer)
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    norm = float(whole(nn.utils.clip_grad_norm_(parameters, recipe.clip_grad or math.inf)))
    loss, state.auxiliary = loss_sum / images, own_sum / images
    # The scaler of fp16 finds its scale by running into infinite gradients, and leaves such a step out by itself.
    searching = state.scaler.is_enabled() and state.scaler.get_scale() > 1
    done = math.isfinite(loss + state.auxiliary) and (math.isfinite(norm) or searching)
    if done:
        state.scaler.step(state.optimizer)
        if state.ema is not None:
            state.ema.update(state.model, step=state.update)
    state.scaler.update()
    return loss, norm, images, done


def add_gradients(run: Run, micro_batches: Iterator[Batch]) -> tuple[float, float, int]:
    """Adds up the gradients of the micro-batches of all processes, each image with a weight of 1 / batch_size.

    Returns:
        Sum of the losses of the task, sum of the model's own (see `AuxiliaryLoss`), and number of images.

    Raises:
        DataError: too many images are damaged, or all of this update.
    """
    processes, damaged = run.processes, []
    total, own_total, count = torch.zeros((), device=run.device), torch.zeros((), device=run.device), 0
    for number, (images, targets, unreadable) in enumerate(micro_batches, start=1):
        damaged += unreadable
        count += len(images)
        empty = not len(images)  # all of them were damaged
        if empty:
            if processes.world_size == 1:
                continue
            images, targets = run.blank, torch.zeros(1, dtype=torch.int64)  # the other processes wait for this one
        images = images.to(run.device, non_blocking=True, memory_format=run.memory_format)
        targets = targets.to(run.device, non_blocking=True)
        if run.mixup is not None and not empty:
            images, targets = run.mixup(images, targets, run.state.update)
        sync = gradient_sync(run.training, now=number == run.sampler.micro_batches)
        with sync, collect_losses(run.state.model) as own_loss:
            with autocast(run.device, run.precision):
                loss = training_loss(run.training(images), targets, run.config.recipe.smoothing)
            own = own_loss()
            # Gradients are averaged over the processes, where their sum is meant.
            weight = 0 if empty else processes.world_size / run.config.batch_size
            run.state.scaler.scale((loss if own is None else loss + own) * weight).backward()
        if not empty:
            total += loss.detach()
            own_total += 0 if own is None else own.detach()
    sums = (float(total), float(own_total), count, len(damaged))
    loss_sum, own_sum, images_seen, unreadable_seen = agree(run, *sums)
    if unreadable_seen:
        note_damaged(run, damaged)
    if not images_seen:
        reason = f"update {run.state.update}: none of its images can be decoded ({run.state.damaged[-1]})"
        raise processes.everywhere(DataError(f"{reason} Mend the data set."))
    if processes.world_size > 1:
        require_all_gradients(run.state.model)
    return loss_sum, own_sum, int(images_seen)


def note_damaged(run: Run, messages: list[str]) -> None:
    """Notes images that this or another process could not decode.

    Raises:
        DataError: there are too many of them.
    """
    try:
        for theirs in run.processes.gather(messages):
            run.damage.add(theirs)
    except DataError as error:
        raise run.processes.everywhere(error) from None


def agree(run: Run, *sums: float) -> list[float]:
    """Adds up numbers over the processes, and lets these agree on what one of them knows.

    That is whether to stop, which is so as soon as one was told to, and whether a checkpoint is due, by the clock of
    the first.
    """
    due = time.monotonic() - run.saved > 60 * run.config.engine.checkpoint_minutes
    table = run.processes.table([*sums, run.stop.signum or 0, due])
    run.stop_signum = int(table[:, -2].max()) or None
    run.save_due = bool(table[0, -1])
    return table[:, :-2].sum(0).tolist()


def stop_or_save(run: Run) -> None:
    """Does what was agreed.

    Raises:
        Interrupted: asked to stop; the state is saved.
    """
    if run.stop_signum is not None:
        save(run)
        run.processes.gather(None)  # torchrun ends all as soon as one has left: not before the checkpoint is written
        reason = f"stopped after update {run.state.update} of {run.last_update}; saved in {run.folder}."
        raise run.processes.everywhere(Interrupted(run.stop_signum, f"{reason} The same command goes on from there."))
    if run.save_due:
        save(run)


def note_nonfinite(run: Run, loss: float, lr: float) -> None:
    """Counts an update that was left out, and ends the run when there are too many in a row.

    Raises:
        TrainingError: names the update and the first parameter whose gradient is not finite.
    """
    state, most = run.state, run.config.engine.max_nonfinite
    state.skipped += 1
    state.failures += 1
    named = ((name, local(p.grad)) for name, p in state.model.named_parameters() if p.grad is not None)
    mine = next((name for name, gradient in named if not gradient.isfinite().all()), None)
    bad = next((name for name in run.processes.gather(mine) if name is not None), "none")
    own = "" if math.isfinite(state.auxiliary) else f", the model's own loss {state.auxiliary}"
    found = (
        f"update {state.update}: loss {loss}{own}, gradient norm {state.grad_norm}, lr {lr:.2e}, "
        f"loss scale {state.scaler.get_scale():g}, first bad gradient: {bad}"
    )
    log.warning("Not finite, update left out (%d of %d in a row): %s", state.failures, most, found)
    if state.failures >= most:
        there = (run.folder / checkpoint.LAST).exists()
        kept = f"The last finite checkpoint is kept in {run.folder}" if there else "There is no checkpoint yet"
        reason = f"{state.failures} updates in a row were not finite ({found}). {kept}."
        remedy = "Lower recipe.lr, set recipe.clip_grad=1, or use engine.precision=fp32."
        raise run.processes.everywhere(TrainingError(f"{reason} {remedy}"))


def evaluate(run: Run) -> dict[str, Any]:
    """Scores the raw weights, and the averaged ones where there are any (columns `ema_*`), and examines the heads."""

    def between() -> None:
        agree(run)
        stop_or_save(run)

    def score(model: nn.Module) -> dict[str, Any]:
        copy_buffers(model, run.processes)
        blank = run.blank if is_sharded(model) else None
        return validate(
            model, run.val_loader, run.device, run.precision, run.memory_format, between, run.processes, blank
        )

    start = time.perf_counter()
    row = score(run.forward)
    if run.state.ema is not None:
        row |= {f"ema_{name}": value for name, value in score(run.state.ema.module).items() if name != "images"}
    row["eval_seconds"] = round(time.perf_counter() - start, 2)
    if decays := path_decays(run.state.model):
        row["gamma"] = decays
        assert isinstance(run.val_loader.dataset, EvalDataset)
        images = first_images(run.val_loader.dataset)
        row |= layer_health(run.state.model, images, run.device, run.precision, run.memory_format)
    return row


def save(run: Run, best: bool = False) -> None:
    """Writes the checkpoint: all state to `last.pt`, or what is needed to use the model to `best.pt`."""
    content = {**run.header, **run.state.state_dict()}  # of a sharded model all processes put it together
    if run.processes.first:
        checkpoint.require_finite(content["state_dict"])
        if best:
            kept = {name: value for name, value in content.items() if name not in ("optimizer", "scaler")}
            checkpoint.save(kept, run.folder / checkpoint.BEST)
        else:
            checkpoint.save(content, run.folder / checkpoint.LAST, previous=run.folder / checkpoint.PREVIOUS)
    if not best:
        run.saved = time.monotonic()


def write_files(run: Run) -> None:
    """Writes the metrics so far, and what else follows from them."""
    write_history(run.state.history, run.folder)
    for callback in run.after_epoch:
        callback(run.folder)


def report(run: Run, row: dict[str, Any]) -> None:
    """Writes and shows the metrics of an epoch."""
    if not run.processes.first:
        return
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
