"""Everything that changes while a run goes on, as one object."""

from dataclasses import dataclass, field
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import nn

from infvit.engine.checkpoint import FORMAT
from infvit.engine.parallel import is_sharded, shared_like, whole
from infvit.errors import CheckpointError


@dataclass
class RunState:
    """The state of a run. Data order, augmentation, mixing, dropout and rate follow from `update` and the seed.

    Attributes:
        model: the trained model, without wrappers.
        optimizer: its optimiser.
        ema: the weight average, or None.
        scaler: the loss scaler; does nothing unless the precision is fp16.
        update: updates done.
        history: one row of metrics per finished epoch.
        best: the best value of the deciding metric, or None.
        epoch_loss: sum of the training losses of the images seen in the epoch under way.
        epoch_auxiliary: likewise, of the model's own loss.
        epoch_images: number of those images.
        auxiliary: mean of the model's own loss in the last update; 0 without one.
        grad_norm: norm of the last gradient.
        skipped: updates left out since their loss or gradient was not finite.
        failures: how many of them came last, in a row.
        damaged: training images that could not be decoded, a message each.
        logger_id: identity of the run at an external logger.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: ModelEmaV3 | None
    scaler: torch.amp.GradScaler
    update: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    best: float | None = None
    epoch_loss: float = 0.0
    epoch_auxiliary: float = 0.0
    auxiliary: float = 0.0
    epoch_images: int = 0
    grad_norm: float = 0.0
    skipped: int = 0
    failures: int = 0
    damaged: list[str] = field(default_factory=list)
    logger_id: str | None = None

    _PLAIN = (
        "update",
        "history",
        "best",
        "epoch_loss",
        "epoch_auxiliary",
        "epoch_images",
        "grad_norm",
        "skipped",
        "failures",
        "damaged",
        "logger_id",
    )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in tensors and plain types. Plain timm reads the raw weights from `state_dict`.

        It does not tell how many processes made it: of a sharded model it holds whole tensors, which all of its
        processes put together.
        """
        content = {
            "format": FORMAT,
            "state_dict": self.model.state_dict(),
            "ema_state_dict": None if self.ema is None else self.ema.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            **{name: getattr(self, name) for name in self._PLAIN},
        }
        return whole(content) if is_sharded(self.model) else content

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Restores the state.

        Raises:
            CheckpointError: the checkpoint is not of this run, or of another format.
        """
        if content.get("format") != FORMAT:
            raise CheckpointError(f"checkpoint format {content.get('format')}, this version reads {FORMAT}.")
        try:
            own = self.model.state_dict()
            self.model.load_state_dict(
                {name: shared_like(value, own.get(name, value)) for name, value in content["state_dict"].items()}
            )
            if self.ema is not None:
                self.ema.module.load_state_dict(content["ema_state_dict"])
            self.optimizer.load_state_dict(self._shared_optimizer(content["optimizer"]))
            if content["scaler"]:  # empty when it was written in another precision than fp16
                self.scaler.load_state_dict(content["scaler"])
            content = {"epoch_auxiliary": 0.0, **content}  # models had no loss of their own when format 2 began
            for name in self._PLAIN:
                setattr(self, name, content[name])
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"the checkpoint in the run folder is not of this run ({type(error).__name__}: {reason}). "
                "Choose another run_dir=..., or fresh=true to move it aside."
            ) from error

    def _shared_optimizer(self, content: dict[str, Any]) -> dict[str, Any]:
        """Returns a whole optimiser state with this process's share of the tensors that are shaped as a parameter."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        state = {
            index: {
                name: shared_like(value, parameters[index]) if isinstance(value, torch.Tensor) else value
                for name, value in values.items()
            }
            for index, values in content["state"].items()
        }
        return {**content, "state": state}
