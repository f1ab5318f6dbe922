"""From a plan to a run: model, optimiser, loaders, and the state of an earlier start."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm
import torch
from timm.utils import ModelEmaV3

from infvit.config import TrainConfig
from infvit.data import (
    DamageLog,
    build_eval_loader,
    build_train_loader,
)
from infvit.engine import checkpoint
from infvit.engine.device import seed_all
from infvit.engine.loop import Run
from infvit.engine.plan import Plan
from infvit.engine.signals import StopRequest
from infvit.engine.state import RunState
from infvit.errors import ConfigError
from infvit.models.build import build_model, model_arguments
from infvit.models.weights import load_weights, pretrained_state
from infvit.recipe import BatchMixup, Schedule, build_optimizer
from infvit.version import __version__

log = logging.getLogger(__name__)


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
        log.info("Found the state after update %d in %s.", state.update, plan.folder)
    workers, pin = config.data.num_workers, device.type == "cuda"
    eval_batch = config.data.micro_batch_size or min(config.batch_size, 256)
    return Run(
        config=config,
        folder=plan.folder,
        device=device,
        precision=plan.precision,
        state=state,
        forward=forward,
        sampler=plan.sampler,
        train_loader=build_train_loader(plan.data.train, plan.train_transform, plan.sampler, workers, pin),
        val_loader=build_eval_loader(plan.data.val, plan.eval_transform, eval_batch, workers, pin),
        schedule=Schedule(optimizer, recipe, config.epochs, plan.sampler.updates_per_epoch),
        mixup=BatchMixup(recipe, plan.num_classes, config.seed) if recipe.mixes else None,
        header=_header(plan),
        damage=DamageLog(config.data.max_damaged),
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
        state = checkpoint.unwrapped(content.get("state_dict", content.get("model", content)))  # "model": DeiT's files
    for note in load_weights(model, state, f"init_from={source}", config.reset_head):
        log.info("init_from: %s", note)
