"""Loading weights of another run, another size or another model, with every tensor accounted for."""

import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import timm
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from infvit.errors import CheckpointError, did_you_mean
from infvit.models.infvit import InfViT
from infvit.models.transfer import Transfer, transfer_attention

HUB = "hf-hub:"
NEW_HEAD = "kept as initialised (reset_head)"
OLD_HEAD = "left out (reset_head)"
CONVERTED = "renamed or dropped by timm's checkpoint filter"


@dataclass(frozen=True)
class LoadReport:
    """What became of every tensor of a source and of the model it was loaded into.

    Each name in the source is in one of `loaded`, `resized`, `partial`, `skipped`, and each name in the model in one
    of `loaded`, `resized`, `partial`, `kept`.

    Attributes:
        loaded: names of the tensors taken as they are.
        resized: names of the tensors taken in another size, with both sizes.
        partial: names of the tensors of which only some rows were taken, with which.
        kept: names in the model with nothing in the source, with where their values come from.
        skipped: names in the source with no place in the model, with why.
    """

    loaded: tuple[str, ...]
    resized: dict[str, str]
    partial: dict[str, str]
    kept: dict[str, str]
    skipped: dict[str, str]

    def summary(self) -> str:
        """Returns the counts in a line."""
        given = len(self.loaded) + len(self.resized) + len(self.partial)
        return f"loaded {given} of the model's {given + len(self.kept)} tensors"

    def changes(self) -> list[str]:
        """Returns what was resized, a line each."""
        return [f"{name} {how}" for name, how in self.resized.items()]

    def warnings(self) -> list[str]:
        """Returns what was not loaded or only in part, a line for each reason."""
        return [
            f"{reason}: {_alike([name for name, why in group.items() if why == reason])}"
            for group in (self.partial, self.kept, self.skipped)
            for reason in dict.fromkeys(group.values())
        ]


def pretrained_state(name: str, key: str = "init_from") -> dict[str, Tensor]:
    """Returns the pretrained weights of a timm model, fetched by timm, from its cache where they are there.

    Args:
        name: name in timm's registry, with or without a tag, or `hf-hub:ORG/MODEL`.
        key: the configuration key that names it, for messages.

    Raises:
        CheckpointError: unknown name, or the weights cannot be had.
    """
    source = f"{key}={name}" if name.startswith(HUB) else f"{key}=timm/{name}"
    if not name.startswith(HUB):
        if not timm.is_model(name):
            raise CheckpointError(f"{source}: unknown model. {did_you_mean(name, timm.list_models())}")
        if not timm.is_model_pretrained(name):
            known = timm.list_pretrained(f"{name.split('.')[0]}.*") or timm.list_pretrained()
            raise CheckpointError(f"{source}: timm has no such weights. {did_you_mean(name, known)}")
    try:
        with _quiet():
            return timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:  # the hub client raises errors of many kinds
        reason = f"no model of timm's: it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(
            f"{source}: weights not available ({shorten(reason.rstrip('.'), 200, placeholder=' ...')}). Check the name "
            "and the network; without one, fetch them elsewhere, set HF_HOME to that cache and HF_HUB_OFFLINE=1, or "
            "give a checkpoint file."
        ) from error


def load_weights(
    model: nn.Module, state: dict[str, Any], source: str, *, reset_head: bool = False, transfer: bool = False
) -> LoadReport:
    """Loads a state dict into a model; see `match_weights`, which does all but the loading."""
    matched, report = match_weights(model, state, source, reset_head=reset_head, transfer=transfer)
    model.load_state_dict(matched)
    return report


def match_weights(
    model: nn.Module, state: dict[str, Any], source: str, *, reset_head: bool = False, transfer: bool = False
) -> tuple[dict[str, Tensor], LoadReport]:
    """Fits a state dict to a model; position embeddings and patches are resized to the model's.

    Args:
        model: where to load; may be on the meta device.
        state: weights by name, without wrapper prefixes.
        source: where they are from, for messages.
        reset_head: leave the classifier as it was initialised, with the pooled layer before it if the source has none.
        transfer: take what can be taken from another attention mechanism; otherwise that is an error like any other.

    Returns:
        A complete state dict of the model, and what became of every tensor.

    Raises:
        CheckpointError: something besides the attention or the reset head does not fit; the first names are listed.
    """
    if not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{source} holds no weights, only: {', '.join(map(str, list(state)[:5])) or 'nothing'}.")
    own = model.state_dict()
    given = _resized(model, state)
    head = {name for name in {**own, **given} if name.startswith(_head_prefixes(model, given))}
    other = transfer_attention(model, given) if transfer else Transfer()
    kept, skipped = dict(other.kept), {name: CONVERTED for name in state if name not in given} | other.skipped
    if reset_head:
        kept |= {name: NEW_HEAD for name in own if name in head}
        skipped |= {name: OLD_HEAD for name in given if name in head}
    matched = {
        **{name: own[name] for name in kept},
        **{name: value for name, value in given.items() if name not in skipped},
        **other.tensors,
    }
    _require_fit(own, matched, source, () if reset_head else head)
    resized = {
        name: f"resized from {tuple(state[name].shape)} to {tuple(value.shape)}"
        for name, value in given.items()
        if name in state and name not in skipped and value is not state[name]
    }
    loaded = tuple(name for name in matched if name not in resized and name not in other.partial and name not in kept)
    return matched, LoadReport(loaded, resized, other.partial, kept, skipped)


def _resized(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights as timm's filter for vision transformers makes them; tensors left alone are the same objects.

    Where it cannot resize, they stay as they are: the shapes, which then differ, tell more than its error would.
    """
    if not isinstance(model, VisionTransformer):
        return state
    try:
        with _quiet():
            return checkpoint_filter_fn(dict(state), model)  # a copy: some formats are taken apart
    except RuntimeError:
        return state


def _head_prefixes(model: nn.Module, given: dict[str, Tensor]) -> tuple[str, ...]:
    """Returns how the names of the head begin.

    The pooled layer of InfViT is part of it only where the source has none: other vision transformers do not.
    """
    names = getattr(model, "pretrained_cfg", {}).get("classifier", "head")
    names = (names,) if isinstance(names, str) else tuple(names or ())
    if isinstance(model, InfViT) and not any(name.startswith("pooler.") for name in given):
        names += ("pooler",)
    return tuple(f"{name}." for name in names)


def _require_fit(own: dict[str, Tensor], matched: dict[str, Tensor], source: str, head: Any) -> None:
    """Raises `CheckpointError` unless names and shapes agree; names `reset_head` if only tensors of `head` do not."""
    missing = sorted(own.keys() - matched.keys())
    unexpected = sorted(matched.keys() - own.keys())
    wrong = [name for name in sorted(own.keys() & matched.keys()) if matched[name].shape != own[name].shape]
    if not missing and not unexpected and not wrong:
        return
    shapes = [f"{name} {tuple(matched[name].shape)} instead of {tuple(own[name].shape)}" for name in wrong]
    parts = [
        f"{len(names)} {what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        for names, what in ((missing, "missing"), (unexpected, "unknown"), (shapes, "of another shape"))
        if names
    ]
    remedy = " reset_head=true starts with a new classifier." if {*missing, *unexpected, *wrong} <= set(head) else ""
    raise CheckpointError(f"{source} does not fit the model ({'; '.join(parts)}).{remedy}")


def _alike(names: list[str]) -> str:
    """Returns names in a line; those that differ in a block's number only are counted."""
    patterns = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    single = {re.sub(r"\.\d+\.", ".*.", name): name for name in names}
    return ", ".join(single[p] if count == 1 else f"{p} ({count})" for p, count in sorted(patterns.items()))


@contextmanager
def _quiet() -> Iterator[None]:
    """Holds back what timm tells and the hub client warns of (each retry): our own line says what came of it."""
    levels = {"timm": logging.WARNING, "huggingface_hub": logging.ERROR}
    loggers = {logging.getLogger(name): level for name, level in levels.items()}
    before = {logger: logger.level for logger in loggers}
    for logger, level in loggers.items():
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)
