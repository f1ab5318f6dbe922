"""From a plan to a run: model, optimiser, loaders, and the state of an earlier start."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm
import torch
from timm.utils import ModelEmaV3

from infvit.data import (
    DamageLog,
    build_eval_loader,
    build_train_loader,
)
from infvit.engine import checkpoint
from infvit.engine.device import seed_all
from infvit.engine.folder import changes
from infvit.engine.initial import initialise
from infvit.engine.loop import Run
from infvit.engine.parallel import replicate, shard
from infvit.engine.plan import Plan
from infvit.engine.signals import StopRequest
from infvit.engine.state import RunState
from infvit.errors import ConfigError
from infvit.models.build import build_model, convert_arguments, model_arguments
from infvit.recipe import BatchMixup, Schedule, build_optimizer
from infvit.version import __version__

log = logging.getLogger(__name__)


def build_run(plan: Plan, stop: StopRequest, after_epoch: Sequence[Callable[[Path], None]] = ()) -> Run:
    """Builds everything, and restores the state of an earlier start of the same run if the folder holds one.

    Without collective operations, so that the processes may fail one by one; `connect` makes them one run.
    """
    config, device, recipe, processes = plan.config, plan.device, plan.config.recipe, plan.processes
    seed_all(config.seed)
    model, _ = build_model(
        config.model, plan.num_classes, config.data.in_chans, plan.img_size, recipe.drop_path, recipe.drop
    )
    stored = checkpoint.read_last(plan.folder)
    if config.init_from and stored is None:
        initialise(model, config)
    if config.engine.grad_checkpointing:
        _checkpoint_gradients(model, config.model.name)
    memory_format = torch.channels_last if config.engine.channels_last else torch.contiguous_format
    model.to(device)
    model.to(memory_format=memory_format)
    if config.engine.parallel == "fsdp" and processes.world_size > 1:
        shard(model, config.model.name)
    forward: Any = torch.compile(model, backend=config.engine.compile_backend) if config.compile else model
    optimizer = build_optimizer(model, recipe, config.batch_size)
    # Before the optimiser gets its old state, which holds the peak rate of then; `allow_change` may have changed it.
    schedule = Schedule(optimizer, recipe, config.epochs, plan.sampler.updates_per_epoch)
    ema = ModelEmaV3(model, decay=recipe.ema_decay) if recipe.ema_decay is not None else None
    scaler = torch.amp.GradScaler(device.type, enabled=plan.precision == torch.float16)
    state = RunState(model, optimizer, ema, scaler)
    changed: list[str] = []
    if stored is not None:
        if stored.get("format") == checkpoint.FORMAT:  # else it is refused just below
            # The record beside it may be lost, or the checkpoint may be that of another run.
            changed = changes(config, stored["config"], plan.folder)
        state.load_state_dict(stored)
        log.info("Found the state after update %d in %s.", state.update, plan.folder)
    workers, pin = config.data.num_workers, device.type == "cuda"
    eval_batch = config.data.micro_batch_size or min(config.batch_size // processes.world_size, 256)
    run = Run(
        config=config,
        folder=plan.folder,
        device=device,
        precision=plan.precision,
        processes=processes,
        state=state,
        forward=forward,
        training=forward,
        sampler=plan.sampler,
        train_loader=build_train_loader(plan.data.train, plan.train_transform, plan.sampler, workers, pin, device),
        val_loader=build_eval_loader(
            plan.data.val, plan.eval_transform, eval_batch, workers, pin, processes.rank, processes.world_size
        ),
        schedule=schedule,
        mixup=BatchMixup(recipe, plan.num_classes, config.seed) if recipe.mixes else None,
        header=_header(plan),
        damage=DamageLog(config.data.max_damaged, state.damaged),
        stop=stop,
        after_epoch=after_epoch,
    )
    if state.update > run.last_update or (changed and run.finished):
        raise ConfigError(
            f"nothing is left to train: epochs={config.epochs} ends after update {run.last_update}, and {plan.folder} "
            f"is at {state.update} already. Choose more epochs (allow_change=[epochs]), or another run_dir=..."
        )
    for change in changed:
        log.warning("Changed on the way, %s.", change)
    return run


def connect(run: Run) -> None:
    """Lets the processes train one model.

    Raises:
        DataError: they did not all find the same state.
    """
    where = f"updates of the checkpoint in {run.folder}, which must lie on a shared file system"
    run.processes.require_same(run.state.update, where)
    run.training = replicate(run.forward, run.device, run.processes)


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
        "convert": convert_arguments(config.model),
        "num_classes": plan.num_classes,
        "classes": list(plan.data.classes),
        "in_chans": config.data.in_chans,
        "img_size": plan.img_size,
        "config": asdict(config),
        "versions": {"infvit": __version__, "torch": str(torch.__version__), "timm": timm.__version__},
    }
