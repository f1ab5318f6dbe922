"""What a run is going to do. Everything that can be wrong is found here, before anything is built or written."""

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from infvit.config import TrainConfig
from infvit.data import (
    Preflight,
    TrainSampler,
    TrainTransform,
    Transform,
    eval_transform,
    preflight,
    resolve_img_size,
    train_transform,
    unused_keys,
)
from infvit.engine.device import select_device, select_precision
from infvit.engine.folder import default_folder
from infvit.engine.initial import initial_state
from infvit.engine.processes import ALONE, Processes
from infvit.errors import ConfigError, did_you_mean
from infvit.models.build import (
    build_model,
    check_forward,
    convert_arguments,
    count_flops,
    count_parameters,
    model_arguments,
    patch_size,
)
from infvit.models.weights import match_weights
from infvit.recipe import Schedule, build_optimizer, peak_lr
from infvit.recipe.optimizer import inactive_keys


def import_modules(names: Sequence[str]) -> None:
    """Imports the user's own modules, which register models or mechanisms; also from the folder of the command.

    Raises:
        ConfigError: a module cannot be imported.
    """
    if names and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"imports: cannot import {name!r} ({error}); is it on PYTHONPATH?") from error
        except (Exception, SystemExit) as error:  # it is not our code
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"imports: {name!r} fails ({reason}); debug=true shows where.") from error


@dataclass(frozen=True)
class Plan:
    """What a run is going to do, before anything is built or written."""

    config: TrainConfig
    folder: Path
    device: torch.device
    precision: torch.dtype
    processes: Processes
    data: Preflight
    img_size: int
    sampler: TrainSampler
    train_transform: TrainTransform
    eval_transform: Transform
    model: nn.Module  # on the meta device: its shape, without its weights
    schedule: Schedule  # of that model
    inactive: dict[str, str]

    @property
    def num_classes(self) -> int:
        """Classes of the data set."""
        return len(self.data.classes)

    def headline(self) -> list[str]:
        """Returns the first lines of the log: which model, data, recipe, device and folder, and how to change them."""
        c, sampler, world_size = self.config, self.sampler, self.processes.world_size
        pieces = f"{sampler.micro_batches} micro-batch{'es' if sampler.micro_batches > 1 else ''}"
        each = f" on each of {world_size} processes" if world_size > 1 else ""
        how = f", {world_size} processes, {c.engine.parallel}" if world_size > 1 else ""
        arguments = {**model_arguments(c.model), **convert_arguments(c.model)}
        lines = [
            f"model   {c.model.name}" + "".join(f", {k} {v}" for k, v in arguments.items()),
            f"data    {c.data.name}: {len(self.data.train)} training and {len(self.data.val)} held-out images, "
            f"{self.num_classes} classes, {self.img_size} px",
            f"recipe  {c.recipe.name}: {c.epochs} epochs of {sampler.updates_per_epoch} updates, batch {c.batch_size} "
            f"in {pieces}{each}, peak lr {peak_lr(c.recipe, c.batch_size):.3g}",
            f"device  {self.device.type}, {str(self.precision).removeprefix('torch.')}{how}",
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


def make_plan(config: TrainConfig, processes: Processes = ALONE) -> Plan:
    """Checks the configuration against data, model and machine.

    Raises:
        UserError: whatever does not fit.
    """
    recipe, device = config.recipe, select_device(config.engine.device)
    backends = torch.compiler.list_backends(exclude_tags=())
    if config.compile and config.engine.compile_backend not in backends:
        raise ConfigError(
            f"unknown engine.compile_backend={config.engine.compile_backend!r}. "
            f"{did_you_mean(config.engine.compile_backend, backends)}"
        )
    folder = Path(config.run_dir) if config.run_dir else default_folder(config)
    initial = initial_state(config, folder)
    data = preflight(config.data, config.batch_size)
    img_size = resolve_img_size(config.data, data.train.native_size, patch_size(config.model))
    micro, rank, world_size = config.data.micro_batch_size, processes.rank, processes.world_size
    sampler = TrainSampler(
        len(data.train), config.batch_size, micro, recipe.repeated_aug, config.seed, rank, world_size
    )
    with torch.device("meta"):
        model, ignored = build_model(
            config.model, len(data.classes), config.data.in_chans, img_size, recipe.drop_path, recipe.drop
        )
    check_forward(model, config.model.name, config.data.in_chans, img_size)
    if initial is not None:  # read again for the run: a plan holds no weights
        match_weights(model, initial, f"init_from={config.init_from}", reset_head=config.reset_head, transfer=True)
    optimizer = build_optimizer(model, recipe, config.batch_size)
    inactive = {f"recipe.{key}": why for key, why in {**recipe.inactive(), **inactive_keys(recipe)}.items()}
    # A model without a fixed size simply takes images of any; only what was asked for is worth a note.
    names = {"drop_path_rate": "recipe.drop_path", "drop_rate": "recipe.drop"}
    inactive |= {names[argument]: why for argument, why in ignored.items() if argument in names}
    inactive |= {f"data.{key}": f"data={config.data.name} does not use it" for key in unused_keys(config.data)}
    return Plan(
        config=config,
        folder=folder,
        device=device,
        precision=select_precision(config.engine.precision, device),
        processes=processes,
        data=data,
        img_size=img_size,
        sampler=sampler,
        train_transform=train_transform(recipe, config.data, img_size),
        eval_transform=eval_transform(recipe.crop_pct, recipe.interpolation, config.data, img_size),
        model=model,
        schedule=Schedule(optimizer, recipe, config.epochs, sampler.updates_per_epoch),
        inactive=inactive,
    )


def dry_run_lines(plan: Plan) -> list[str]:
    """Returns what `dry_run=true` prints: cost of the model, length and learning rates of the run, the data check."""
    c = plan.config
    flops = count_flops(c.model, plan.num_classes, c.data.in_chans, plan.img_size)
    per_epoch = plan.sampler.updates_per_epoch
    shown = sorted({*range(min(10, c.epochs)), *range(0, c.epochs, max(1, c.epochs // 10)), c.epochs - 1})
    return [
        f"parameters     {count_parameters(plan.model):,}",
        f"FLOPs          {flops / 1e9:.3f} G for one forward pass of one {plan.img_size} px image (1 MAC = 2 FLOPs)",
        f"updates        {per_epoch} per epoch, {per_epoch * c.epochs} in all"
        + (f", stopped after {c.max_steps}" if c.max_steps else ""),
        *(["data           " + line for line in plan.data.lines]),
        "learning rate  at the first update of epoch",
        *(f"  {epoch + 1:>5}  {plan.schedule.set(epoch * per_epoch):.3e}" for epoch in shown),
        f"  last   {plan.schedule.set(per_epoch * c.epochs - 1):.3e}",
        "dry run: nothing was written.",
    ]
