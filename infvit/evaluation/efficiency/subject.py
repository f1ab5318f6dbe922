"""A model, or its attention function alone, ready to be called again and again."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from infvit.attention import AttentionLayer, collect_losses
from infvit.config import ModelConfig, RecipeConfig
from infvit.engine import checkpoint
from infvit.engine.device import autocast
from infvit.engine.plan import import_modules
from infvit.errors import ConfigError
from infvit.evaluation.efficiency.cells import Cell
from infvit.evaluation.rebuild import from_stored
from infvit.models import reparameterize
from infvit.models.build import build_model, unfuse
from infvit.recipe import build_optimizer

UNFUSED = ":unfused"
TIMM = "timm/"


@dataclass(frozen=True)
class Blueprint:
    """What a model is built from: of the registry, or that of a run, at any image size and without its weights."""

    config: ModelConfig
    num_classes: int = 1000
    in_chans: int = 3


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        call: one forward pass, or one whole training step.
        model: in the form that is called; not compiled.
        plain: the same call without torch.compile.
    """

    call: Callable[[], Any]
    model: nn.Module
    plain: Callable[[], Any]


def runs_in(model: str) -> list[str]:
    """Returns the runs that an entry of `models` stands for: those in the folder of a sweep; else the entry itself.

    Raises:
        ConfigError: a folder without runs.
    """
    folder = Path(model)
    if not folder.is_dir() or is_run(folder):
        path = Path(model.removesuffix(UNFUSED))
        if len(path.parts) > 1 and not model.startswith((TIMM, "hf-hub:")) and not path.is_dir():
            raise ConfigError(f"models: there is no folder {path}, and names of models have no slash but in timm/NAME.")
        return [model]
    runs = sorted(str(path) for path in folder.iterdir() if is_run(path))
    if not runs:
        raise ConfigError(f"models: {folder} is neither a run nor a sweep with runs that have a checkpoint.")
    return runs


def is_run(folder: Path) -> bool:
    """Whether a model can be rebuilt from a folder."""
    return any((folder / name).exists() for name in (checkpoint.BEST, checkpoint.LAST, checkpoint.PREVIOUS))


@cache
def blueprint(model: str) -> Blueprint:
    """Returns what an entry of `models` is built from.

    Raises:
        CheckpointError: the checkpoint of a run cannot be read.
    """
    name = model.removesuffix(UNFUSED)
    if is_run(Path(name)):
        content = checkpoint.read(checkpoint.find(name))
        import_modules(content["config"].get("imports", []))
        stored = from_stored(ModelConfig, content["config"]["model"])
        return Blueprint(stored, content["num_classes"], content["in_chans"])
    name = name.removeprefix(TIMM)
    known = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    return Blueprint(ModelConfig(name=name), known.num_classes if known else 1000)


def create(cell: Cell) -> nn.Module:
    """Builds the model of a cell, for inference in the form for inference unless the cell says otherwise.

    Raises:
        ConfigError: no such model, no image of this size, or `:unfused` for a model without a fused kernel.
    """
    plan = blueprint(cell.model)
    model, _ = build_model(plan.config, plan.num_classes, plan.in_chans, cell.resolution)
    if cell.model.endswith(UNFUSED) and not unfuse(model):
        raise ConfigError(f"models: {cell.model}: {plan.config.name} has no fused attention to switch off.")
    if cell.mode == "training":
        return model.train()
    return reparameterize(model.eval()) if cell.reparameterize else model.eval()


def attention_layer(model: nn.Module) -> AttentionLayer | None:
    """Returns the first of our attention layers, which stands for all of them; None where there is none."""
    return next((module for module in model.modules() if isinstance(module, AttentionLayer)), None)


def token_count(model: nn.Module) -> int | None:
    """Returns the tokens of an image, or None for models that do not tell."""
    patches = getattr(getattr(model, "patch_embed", None), "num_patches", None)
    return None if patches is None else patches + int(getattr(model, "num_prefix_tokens", 0))


def prepare(cell: Cell, device: torch.device, precision: torch.dtype, compiled: bool = False) -> Subject:
    """Builds what a cell measures, with random weights and images.

    Inference: weights and images in the precision. Training: float32 weights under autocast, as `train.py` does it;
    a step is forward, cross-entropy (and the model's own loss, if it has one), backward and AdamW.

    Raises:
        ConfigError: see `create`; or the attention function alone of a model that has none of ours.
    """
    torch.manual_seed(0)
    model = create(cell)
    if cell.scope == "attention":
        return _attention(cell, model, device, precision, compiled)
    training = cell.mode == "training"
    model.to(device, torch.float32 if training else precision)
    dtype = next(model.parameters()).dtype
    shape = (cell.batch, blueprint(cell.model).in_chans, cell.resolution, cell.resolution)
    images = torch.randn(shape, device=device, dtype=dtype)
    if not training:
        return _inference(model, (images,), compiled)
    optimizer = build_optimizer(model, RecipeConfig(), cell.batch)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == torch.float16)
    labels = torch.arange(cell.batch, device=device)

    def step(forward: Callable[..., Tensor]) -> float:
        optimizer.zero_grad(set_to_none=True)
        with collect_losses(model) as own_loss:
            with autocast(device, precision):
                logits = forward(images)
                loss = F.cross_entropy(logits, labels % logits.shape[-1])
            own = own_loss()
            scaler.scale(loss if own is None else loss + own / cell.batch).backward()
        scaler.step(optimizer)
        scaler.update()
        return float(loss.detach())

    return _both(step, model, compiled)


def _attention(cell: Cell, model: nn.Module, device: torch.device, precision: torch.dtype, compiled: bool) -> Subject:
    """Returns the mechanism on random q, k, v; training: forward, and backward into q, k, v and its parameters."""
    layer, tokens = attention_layer(model), token_count(model)
    if layer is None or tokens is None:
        raise ConfigError(f"efficiency.scopes: attention: {cell.model} has none of our attention layers.")
    core, training = layer.core.to(device), cell.mode == "training"
    shape = (cell.batch, layer.num_heads, tokens, layer.head_dim)
    widths = (layer.head_dim + core.extra_dim, layer.head_dim, layer.head_dim)
    q, k, v = (
        torch.randn(*shape[:-1], width, device=device, dtype=precision, requires_grad=training) for width in widths
    )
    if not training:
        return _inference(core, (q, k, v), compiled)
    gradient = torch.randn(shape, device=device, dtype=precision)
    leaves = [q, k, v, *(p for p in core.parameters() if p.requires_grad)]

    def step(forward: Callable[..., Tensor]) -> float:
        gradients = torch.autograd.grad(forward(q, k, v), leaves, gradient)
        return float(gradients[0].flatten()[0])

    return _both(step, core, compiled)


def _inference(module: nn.Module, inputs: tuple[Tensor, ...], compiled: bool) -> Subject:
    def call(forward: Callable[..., Tensor]) -> Tensor:
        with torch.inference_mode():
            return forward(*inputs)

    return _both(call, module, compiled)


def _both(call: Callable[[Callable[..., Any]], Any], module: nn.Module, compiled: bool) -> Subject:
    fast: Callable[..., Any] = torch.compile(module) if compiled else module
    return Subject(lambda: call(fast), module, lambda: call(module))
