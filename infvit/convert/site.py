"""A place of attention in somebody's model, and how another mechanism gets in and out of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infvit.attention import Mechanism, SoftmaxAttention, get_mechanism
from infvit.attention.mechanism import check_hyperparameters
from infvit.errors import ConfigError


class Converted:
    """Marks the classes that converted modules have: the library's class with a forward that calls `self.infsa`.

    A subclass is `class InfSAThing(Converted, Thing)`, at the top of a module, so that it can be pickled.
    """

    infsa: Mechanism

    @classmethod
    def original(cls) -> type[nn.Module]:
        """Returns the library's class."""
        return next(base for base in cls.__mro__ if issubclass(base, nn.Module) and not issubclass(base, Converted))


def library_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class that a library gave to a module, converted or not."""
    return module.original() if isinstance(module, Converted) else type(module)


def check_mechanism(name: str, args: dict[str, Any]) -> type[Mechanism]:
    """Returns a mechanism by name, if it takes these hyperparameters.

    Raises:
        ConfigError: unknown mechanism or hyperparameter, a value that is not allowed, or a missing number of tokens.
    """
    cls = get_mechanism(name)
    check_hyperparameters(cls, args)
    cls(1, 8, device="meta", **args)  # raises where a value is wrong, whatever model it is for
    return cls


def build_core(
    cls: type[Mechanism],
    num_heads: int,
    head_dim: int,
    dropout: float,
    factory: dict[str, Any],
    args: dict[str, Any],
    projection: nn.Linear | None = None,
) -> Mechanism:
    """Returns a mechanism for somebody else's projections.

    One that takes a further projection of the tokens has it as `extra`, made like `projection`; see `Site`.

    Raises:
        ConfigError: a hyperparameter is not allowed, or the mechanism needs more than queries, keys and values.
    """
    core = cls(num_heads, head_dim, dropout, **factory, **args)
    if core.extra_dim:
        if projection is None:
            raise ConfigError(f"{cls.name} needs a projection of its own, which this attention lacks")
        bias = projection.bias is not None
        core.extra = nn.Linear(projection.in_features, num_heads * core.extra_dim, bias, **factory)
        nn.init.trunc_normal_(core.extra.weight, std=0.02)  # as timm initialises its own
        if bias:
            nn.init.zeros_(core.extra.bias)
    core.__dict__["built_with"] = args
    if not core.state_dict() and not issubclass(cls, SoftmaxAttention):
        # A state dict must not load without a word into the model that was not converted.
        core.register_buffer("converted", torch.empty(0, **factory))
    return core


def converted_core(module: nn.Module) -> Mechanism | None:
    """Returns the mechanism that a conversion put into a module; None where it put none."""
    core = module._modules.get("infsa")
    return core if isinstance(core, Mechanism) else None


@dataclass(frozen=True)
class Site:
    """One module of attention that a library knows.

    Attributes:
        name: its path in `model.named_modules()`.
        module: the library's module.
        num_heads: heads of the queries.
        head_dim: channels of a query per head.
        converted: the class it gets; None where the library has another door (the module keeps its class then).
        dropout: probability with which it drops attention weights in training.
        needs: fields of `Capabilities` that its calls always need, beyond those of plain self-attention.
        refusal: why it cannot be converted exactly; None where it can.
        projection: its projection of the tokens it is given, beside which a mechanism that takes one more projection of
            them gets it (`infsa.extra`); None where it cannot.
    """

    name: str
    module: nn.Module
    num_heads: int
    head_dim: int
    converted: type[nn.Module] | None = None
    dropout: float = 0.0
    needs: frozenset[str] = frozenset()
    refusal: str | None = None
    projection: nn.Linear | None = None

    def install(self, core: Mechanism) -> None:
        """Puts a mechanism into the module, in the module's mode; a mechanism that was there goes."""
        self.module.infsa = core.train(self.module.training)
        if self.converted is not None:
            self.module.__class__ = self.converted

    def remove(self) -> None:
        """Gives the module back what it was."""
        del self.module.infsa
        self.module.__class__ = library_class(self.module)

    def factory(self) -> dict[str, Any]:
        """Returns the device and dtype of the module's weights."""
        for parameter in self.module.parameters():
            if parameter.is_floating_point():
                return {"device": parameter.device, "dtype": parameter.dtype}
        return {"device": None, "dtype": torch.get_default_dtype()}


@dataclass(frozen=True)
class Library:
    """What infvit knows of one library.

    Attributes:
        name: for the report.
        find: the sites in a model, converted ones included.
        settle: called after each conversion and reversion; brings what the library keeps outside its attention modules
            in line with which of them are converted.
    """

    name: str
    find: Callable[[nn.Module], list[Site]]
    settle: Callable[[nn.Module], None] | None = None
