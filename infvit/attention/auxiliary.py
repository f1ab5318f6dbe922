"""A loss of a model's own, beside that of its task: the one hook by which the training loop gets to know of it.

A model needs an `AuxiliaryLoss` somewhere in it and a call of that module in its forward pass, no more. Without a loop
that asks for it the call does nothing: nothing is computed, and nothing is kept.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from infvit.errors import ConfigError


class AuxiliaryLoss(nn.Module):
    """One term of a model's own loss. A subclass implements `term`; the model calls the module where it has the input.

    Terms of one class are averaged over the calls of a forward pass (one for each layer), those of several classes
    are added.

    Args:
        weight: what the term is multiplied with; 0: it is never computed.

    Raises:
        ConfigError: the weight is negative or not finite.
    """

    def __init__(self, weight: float) -> None:
        super().__init__()
        if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ConfigError(f"{type(self).__name__}: the weight {weight} of a loss must be finite and at least 0.")
        self.weight = weight
        # Both stay through the backward pass: activation checkpointing then repeats the forward pass, where the same
        # has to be computed, but not kept a second time.
        self.wanted = self.taken = False
        self.values: list[Tensor] = []

    def term(self, *inputs: Tensor) -> Tensor:
        """Returns the loss of each sample, (B,), without the weight."""
        raise NotImplementedError(f"{type(self).__name__}.term is missing: it is the loss.")

    def forward(self, *inputs: Tensor) -> None:
        """Computes the term and keeps it for the training loop, if that asked for it; only in training mode.

        Raises:
            ConfigError: there is no gradient to be had here.
        """
        if not (self.wanted and self.training):
            return
        if not torch.is_grad_enabled():
            raise ConfigError(
                "a model with a loss of its own cannot train under activation checkpointing of torch's old, reentrant "
                "kind, which hides the gradient of that loss: unset TIMM_REENTRANT_CKPT."
            )
        value = self.weight * self.term(*inputs)
        if not self.taken:
            self.values.append(value)

    def extra_repr(self) -> str:
        return f"weight={self.weight}"


def auxiliary_losses(model: nn.Module) -> list[AuxiliaryLoss]:
    """Returns the terms of a model's own loss whose weight is not 0."""
    return [module for module in model.modules() if isinstance(module, AuxiliaryLoss) and module.weight]


@contextmanager
def collect_losses(model: nn.Module) -> Iterator[Callable[[], Tensor | None]]:
    """Asks a model for its own loss, during one forward pass and the backward pass that follows.

    Yields:
        A function to call between the two, once: it returns the weighted loss summed over the samples, a scalar with
        its graph, or None where the model has no such loss.
    """
    modules = auxiliary_losses(model)

    def forget(wanted: bool) -> None:
        for module in modules:
            module.wanted, module.taken = wanted, False
            module.values.clear()

    def take() -> Tensor | None:
        kinds: dict[type, list[Tensor]] = {}
        for module in modules:
            kinds.setdefault(type(module), []).extend(module.values)
            module.taken = True
            module.values.clear()
        terms = [torch.stack(values).mean(0).sum() for values in kinds.values() if values]
        return torch.stack(terms).sum() if terms else None

    forget(wanted=True)
    try:
        yield take
    finally:
        forget(wanted=False)
