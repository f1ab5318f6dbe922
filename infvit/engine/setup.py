"""From a configuration to a run: everything that can be wrong is found here, before the first step."""

import importlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from timm.utils import ModelEmaV3

from infvit.config import TrainConfig
from infvit.data import (
    DamageLog,
    Preflight,
    TrainSampler,
    build_eval_loader,
    build_train_loader,
    eval_transform,
    preflight,
    resolve_img_size,
    train_transform,
)
from infvit.engine import checkpoint
from infvit.engine.device import seed_all, select_device, select_precision
from infvit.engine.folder import default_folder
from infvit.engine.loop import Run
from infvit.engine.record import build_logger
from infvit.engine.signals import StopRequest
from infvit.engine.state import RunState
from infvit.errors import ConfigError
from infvit.models.build import build_model, count_flops, count_parameters, model_arguments, patch_size
from infvit.models.weights import load_weights, pretrained_state
from infvit.recipe import BatchMixup, Schedule, build_optimizer, peak_lr
from infvit.recipe.optimizer import inactive_keys
from infvit.version import __version__

log = logging.getLogger(__name__)


def import_modules(names: Sequence[str]) -> None:
    """Imports the user's own modules, which register models or mechanisms.

    Raises:
        ConfigError: a module cannot be imported.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"imports: cannot import {name!r} ({error}); is it on PYTHONPATH?") from error


@dataclass(frozen=True)
class Plan:
    """What a run is going to do, before anything is built or written."""

    config: TrainConfig
    folder: Path
    device: torch.device
    precision: torch.dtype
    data: Preflight
    img_size: int
    sampler: TrainSampler
    inactive: dict[str, str]

    @property
    def num_classes(self) -> int:
        """Classes of the data set."""
        return len(self.data.classes)

    def headline(self) -> list[str]:
        """Returns the first lines of the log: which model, data, recipe, device and folder, and how to change them."""
        c, sampler = self.config, self.sampler
        lines = [
            f"model   {c.model.name}" + "".join(f", {k} {v}" for k, v in model_arguments(c.model).items()),
            f"data    {c.data.name}: {len(self.data.train)} training and {len(self.data.val)} held-out images, "
            f"{self.num_classes} classes, {self.img_size} px",
            f"recipe  {c.recipe.name}: {c.epochs} epochs of {sampler.updates_per_epoch} updates, batch {c.batch_size} "
            f"in {sampler.micro_batches} micro-batch(es), peak lr {peak_lr(c.recipe, c.batch_size):.3g}",
            f"device  {self.device}, {str(self.precision).removeprefix('torch.')}",
            f"folder  {self.folder}",
        ]
        if c.recipe.repeated_aug > 1:
            lines.append(
                f"note    repeated augmentation x{c.recipe.repeated_aug}: an epoch shows "
                f"{sampler.distinct_images} different images"
            )
        for reason in dict.fromkeys(self.inactive.values()):
            keys = ", ".join(key for key, why in self.inactive.items() if why == reason)
            lines.append(f"note    without effect, since {reason}: {keys}")
        lines += [f"warning {text}" for text in self.data.warnings]
        if c.data.name != "imagenet":
            lines.append(
                "ImageNet: python train.py model=infvit_linear_4l data=imagenet recipe=deit data.root=/path/to/imagenet"
            )
        elif c.recipe.name != "deit":
            lines.append("warning ImageNet is trained with recipe=deit in the paper")
        return lines


def make_plan(config: TrainConfig) -> Plan:
    """Checks the configuration against data, model and machine.

    Raises:
        UserError: whatever does not fit.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("training on several processes is not supported yet; start a single one, without torchrun.")
    device = select_device(config.engine.device)
    data = preflight(config.data, config.batch_size)
    img_size = resolve_img_size(config.data, data.train.native_size, patch_size(config.model))
    micro = config.data.micro_batch_size
    sampler = TrainSampler(len(data.train), config.batch_size, micro, config.recipe.repeated_aug, config.seed)
    with torch.device("meta"):
        _, ignored = build_model(config.model, len(data.classes), config.data.in_chans, img_size,
                                 config.recipe.drop_path, config.recipe.drop)  # fmt: skip
    names = {"drop_path_rate": "recipe.drop_path", "drop_rate": "recipe.drop", "img_size": "data.img_size"}
    inactive = {
        f"recipe.{key}": why for key, why in {**config.recipe.inactive(), **inactive_keys(config.recipe)}.items()
    }
    # A model without a fixed size simply takes images of any; only a size that was asked for is worth a note.
    inactive |= {names[k]: why for k, why in ignored.items() if k != "img_size"}
    folder = Path(config.run_dir) if config.run_dir else default_folder(config)
    precision = select_precision(config.engine.precision, device)
    return Plan(config, folder, device, precision, data, img_size, sampler, inactive)


def dry_run_lines(plan: Plan) -> list[str]:
    """Returns what `dry_run=true` prints: cost of the model, length and learning rates of the run, the data check."""
    c = plan.config
    with torch.device("meta"):
        model, _ = build_model(c.model, plan.num_classes, c.data.in_chans, plan.img_size)
    flops = count_flops(c.model, plan.num_classes, c.data.in_chans, plan.img_size)
    schedule = Schedule(
        build_optimizer(model, c.recipe, c.batch_size), c.recipe, c.epochs, plan.sampler.updates_per_epoch
    )
    per_epoch = plan.sampler.updates_per_epoch
    shown = sorted({*range(min(10, c.epochs)), *range(0, c.epochs, max(1, c.epochs // 10)), c.epochs - 1})
    return [
        f"parameters     {count_parameters(model):,}",
        f"FLOPs          {flops / 1e9:.3f} G for one forward pass of one {plan.img_size} px image (1 MAC = 2 FLOPs)",
        f"updates        {per_epoch} per epoch, {per_epoch * c.epochs} in all"
        + (f", stopped after {c.max_steps}" if c.max_steps else ""),
        *(["data           " + line for line in plan.data.lines]),
        "learning rate  at the first update of epoch",
        *(f"  {epoch + 1:>5}  {schedule.set(epoch * per_epoch):.3e}" for epoch in shown),
        f"  last   {schedule.set(per_epoch * c.epochs - 1):.3e}",
        "dry run: nothing was written.",
    ]


def build_run(plan: Plan, stop: StopRequest, after_epoch: Sequence[Callable[[Path], None]] = ()) -> Run:
    """Builds everything, and restores the state of an earlier start of the same run if the folder holds one."""
    config, device, recipe = plan.config, plan.device, plan.config.recipe
    seed_all(config.seed)
    model, _ = build_model(
        config.model, plan.num_classes, config.data.in_chans, plan.img_size, recipe.drop_path, recipe.drop
    )
    stored = checkpoint.read_last(plan.folder)
    if config.init_from and stored is None:
        _initialise(model, config)
    if config.engine.grad_checkpointing:
        _checkpoint_gradients(model, config.model.name)
    memory_format = torch.channels_last if config.engine.channels_last else torch.contiguous_format
    model.to(device)
    model.to(memory_format=memory_format)
    forward: Any = torch.compile(model, backend=config.engine.compile_backend) if config.compile else model
    optimizer = build_optimizer(model, recipe, config.batch_size)
    ema = ModelEmaV3(model, decay=recipe.ema_decay) if recipe.ema_decay is not None else None
    scaler = torch.amp.GradScaler(device.type, enabled=plan.precision == torch.float16)
    state = RunState(model, optimizer, ema, scaler)
    if stored is not None:
        state.load_state_dict(stored)
        log.info("Continuing after update %d (%d epochs on record).", state.update, len(state.history))
    logger = build_logger(config.logger, plan.folder, asdict(config), state.logger_id)
    state.logger_id = logger.id if logger else state.logger_id
    workers, pin = config.data.num_workers, device.type == "cuda"
    train = train_transform(recipe, config.data, plan.img_size)
    evaluation = eval_transform(recipe.crop_pct, recipe.interpolation, config.data, plan.img_size)
    eval_batch = config.data.micro_batch_size or min(config.batch_size, 256)
    return Run(
        config=config,
        folder=plan.folder,
        device=device,
        precision=plan.precision,
        state=state,
        forward=forward,
        sampler=plan.sampler,
        train_loader=build_train_loader(plan.data.train, train, plan.sampler, workers, pin),
        val_loader=build_eval_loader(plan.data.val, evaluation, eval_batch, workers, pin),
        schedule=Schedule(optimizer, recipe, config.epochs, plan.sampler.updates_per_epoch),
        mixup=BatchMixup(recipe, plan.num_classes, config.seed) if recipe.mixes else None,
        header=_header(plan),
        damage=DamageLog(config.data.max_damaged),
        logger=logger,
        stop=stop,
        after_epoch=after_epoch,
    )


def _checkpoint_gradients(model: Any, name: str) -> None:
    try:
        model.set_grad_checkpointing(True)
    except (AttributeError, AssertionError) as error:
        raise ConfigError(f"engine.grad_checkpointing=true: {name} does not support it.") from error


def _header(plan: Plan) -> dict[str, Any]:
    """Returns what a checkpoint needs to rebuild model and data: plain types only."""
    config = plan.config
    return {
        "arch": config.model.name,
        "model_args": model_arguments(config.model),
        "num_classes": plan.num_classes,
        "classes": list(plan.data.classes),
        "in_chans": config.data.in_chans,
        "img_size": plan.img_size,
        "config": asdict(config),
        "versions": {"infvit": __version__, "torch": str(torch.__version__), "timm": timm.__version__},
    }


def _initialise(model: torch.nn.Module, config: TrainConfig) -> None:
    """Loads the weights of `init_from`."""
    source = str(config.init_from)
    if source.startswith("timm/"):
        state = pretrained_state(source.removeprefix("timm/"))
    else:
        path = checkpoint.find(source)
        content = checkpoint.read(path)
        state = checkpoint.unwrapped(content.get("state_dict", content))
    for note in load_weights(model, state, f"init_from={source}", config.reset_head):
        log.info("init_from: %s", note)
