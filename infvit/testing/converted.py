"""One row of the table of converted models: what was replaced, how far it is from the formula, what else holds."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from infvit.convert import ConversionReport, convert
from infvit.testing.conversion import Formula

Call = Callable[[nn.Module], Tensor]
LIBRARIES = ("torch", "timm", "transformers")  # each with its models in `converted_LIBRARY.py`
TOLERANCE = 1e-9  # of float64 through whole models


@dataclass(frozen=True)
class Subject:
    """A small model with random weights, and how to call it.

    Attributes:
        library: torch, torchvision, timm or transformers.
        name: of the model.
        build: makes it, in float32, without dropout.
        call: runs a model on fixed input; the same at every call.
        head_dim: channels per head; only for libraries that call softmax themselves.
        excluded: logits at or below take no part, see `Formula`.
        linear: whether Linear InfSA converts it; otherwise it must refuse.
        formula: what takes the place of its softmax.
        causal: runs a model and returns what earlier tokens give with two kinds of later ones; None: not causal.
        padding: runs a model and returns (output, output with padding) of the real tokens; None: takes no padding.
    """

    library: str
    name: str
    build: Callable[[], nn.Module]
    call: Call
    head_dim: int | None = None
    excluded: float = -1e4
    linear: bool = True
    formula: type[Formula] = Formula
    causal: Callable[[nn.Module], tuple[Tensor, Tensor]] | None = None
    padding: Callable[[nn.Module], tuple[Tensor, Tensor]] | None = None


@dataclass(frozen=True)
class Row:
    """What was found of one model with one mechanism; None where a check does not apply.

    Attributes:
        error: largest difference from the formula, over training mode, evaluation, and evaluation without gradients.
        scale: largest output.
        breaks: graph breaks of torch.compile.
        gradients: whether every parameter that learns got a gradient.
    """

    library: str
    model: str
    mechanism: str
    report: ConversionReport
    error: float
    scale: float
    causal: bool | None
    padding: bool | None
    gradients: bool
    breaks: int | None


def examine(subject: Subject, mechanism: str, compiled: bool = True) -> Row:
    """Converts a model in float64 and checks it.

    Args:
        subject: the model.
        mechanism: infsa_pure or infsa_linear.
        compiled: also count the graph breaks, which takes seconds.

    Raises:
        AssertionError: the formula saw no attention in the unconverted model, which would compare nothing.
    """
    torch.manual_seed(0)
    plain = subject.build().double()
    converted = convert(deepcopy(plain), mechanism, inplace=True)
    with subject.formula(mechanism, head_dim=subject.head_dim, excluded=subject.excluded) as formula:
        expected = subject.call(plain)
    assert formula.calls, f"{subject.name}: no softmax was seen"
    outputs = [subject.call(converted.train())]
    converted.zero_grad()
    outputs[0].square().sum().backward()
    gradients = all(p.grad is not None for p in converted.parameters() if p.requires_grad)
    outputs.append(subject.call(converted.eval()))
    with torch.no_grad():
        outputs.append(subject.call(converted))
        causal = None if subject.causal is None else _same(*subject.causal(converted))
        padding = None if subject.padding is None else _same(*subject.padding(converted))
    breaks = None
    if compiled:
        torch._dynamo.reset()
        breaks = int(torch._dynamo.explain(subject.call)(converted).graph_break_count)
    return Row(
        library=subject.library,
        model=subject.name,
        mechanism=mechanism,
        report=converted.conversion_report,  # type: ignore[arg-type]
        error=max(float((out - expected).abs().max()) for out in outputs),
        scale=float(expected.abs().max()),
        causal=causal,
        padding=padding,
        gradients=gradients,
        breaks=breaks,
    )


def _same(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE)


def subjects() -> list[Subject]:
    """Returns the models of all libraries that are installed."""
    found: list[Subject] = []
    for library in LIBRARIES:
        if find_spec(library):
            found += import_module(f"infvit.testing.converted_{library}").subjects()
    return found
