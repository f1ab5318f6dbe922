"""The weights a run starts from: `init_from`."""

import logging
from pathlib import Path
from typing import Any

from torch import nn

from infvit.config import TrainConfig
from infvit.engine import checkpoint
from infvit.errors import CheckpointError
from infvit.models.weights import HUB, load_weights, pretrained_state

REMOTE = ("timm/", HUB)

log = logging.getLogger(__name__)


def initial_state(config: TrainConfig, folder: Path) -> dict[str, Any] | None:
    """Returns the weights of `init_from`; None without it, and where the run in the folder goes on with its own.

    Raises:
        CheckpointError: they cannot be had, or lie where the run is going to be.
    """
    going_on = not config.fresh and any((folder / name).exists() for name in (checkpoint.LAST, checkpoint.PREVIOUS))
    if config.init_from is None or going_on:
        return None
    local = not config.init_from.startswith(REMOTE)
    if local and config.fresh and Path(config.init_from).expanduser().resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"init_from={config.init_from} lies in run_dir={folder}, which fresh=true moves aside.")
    return _read(config.init_from)


def initialise(model: nn.Module, config: TrainConfig) -> None:
    """Loads the weights of `init_from` into a model, and logs what was resized and what was not loaded.

    Raises:
        CheckpointError: they cannot be had, or do not fit the model.
    """
    source = str(config.init_from)
    report = load_weights(model, _read(source), f"init_from={source}", reset_head=config.reset_head, transfer=True)
    for line in (report.summary(), *report.changes()):
        log.info("init_from: %s", line)
    for line in report.warnings():
        log.warning("init_from: %s", line)


def _read(source: str) -> dict[str, Any]:
    """Returns the weights of a run folder, a file, `timm/NAME` or `hf-hub:ORG/MODEL`."""
    if source.startswith(REMOTE):
        return pretrained_state(source.removeprefix("timm/"))
    content = checkpoint.read(checkpoint.find(source))
    return checkpoint.unwrapped(content.get("state_dict", content.get("model", content)))  # "model": DeiT's files
