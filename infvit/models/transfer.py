"""Weights of one attention mechanism in the layers of another: what has a place there and what has none.

A state dict does not say which mechanism it is from, but its form does: how many projections are fused in `qkv` (two
where the keys are tied to the queries), what the mechanism has of its own (`core.*`, `extra.*`), whether a second
output projection follows the first. Layers of the same form are not touched here, and so stay strict.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from infvit.attention import AttentionLayer

NO_SOURCE = "kept as initialised, since the source has none"
NO_PLACE = "not loaded, since the model's attention has none"
KEYS_LEFT_OUT = (
    "loaded without the rows of the keys, since the model ties its keys to the queries (not with "
    "model.args.tie_key=false)"
)
KEYS_FROM_QUERIES = "loaded with the rows of the queries as those of the keys, since the source ties them"
CONVERTED = ".infsa."  # in the names of what `infvit.convert` adds to a model
IDENTITY = "set to the identity, since the source has one output projection only"


@dataclass(frozen=True)
class Transfer:
    """How weights of another form enter a model.

    Attributes:
        tensors: by name, what stands for the source's tensor or adds to the source.
        partial: names in source and model whose tensor was changed, with how.
        kept: names in the model that the source has nothing for, with where their values come from.
        skipped: names in the source that the model has no place for, with why.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    partial: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Form:
    """What tells the weights of one kind of attention layer from those of another."""

    width: int
    projections: int  # 3, or 2 where the keys are tied to the queries
    double: bool  # a second output projection
    core: frozenset[str]  # parameters of the mechanism, and of the projection that only it has


def transfer_attention(model: nn.Module, source: dict[str, Tensor]) -> Transfer:
    """Fits the attention weights of another mechanism to the attention layers of a model.

    Queries, values and output projection have the same part in every mechanism and are taken over. Keys are, where
    both sides have them; tied keys are the queries, and so can become keys of their own without a change of the
    function. A second output projection becomes the identity, which leaves the source's one as it is.

    Args:
        model: where the weights are going; only `AttentionLayer` counts.
        source: weights by name.

    Returns:
        What to change; nothing where the forms agree, or where the source's layers differ among themselves, are
        incomplete or of another width: then it is not another mechanism that keeps them from fitting.
    """
    own = model.state_dict()
    names = [name for name, module in model.named_modules() if isinstance(module, AttentionLayer)]
    forms = {_form(_below(source, name)) for name in names}
    transfer = Transfer()
    theirs = forms.pop() if len(forms) == 1 else None
    for name in names if theirs else ():
        ours = _form(_below(own, name))
        if ours is None or theirs is None or ours.width != theirs.width:
            return Transfer()
        transfer.kept.update({f"{name}.{key}": NO_SOURCE for key in ours.core - theirs.core})
        transfer.skipped.update({f"{name}.{key}": NO_PLACE for key in theirs.core - ours.core})
        if ours.projections != theirs.projections:
            how = KEYS_LEFT_OUT if ours.projections == 2 else KEYS_FROM_QUERIES
            for key in (f"{name}.qkv.weight", f"{name}.qkv.bias"):
                if key in source:
                    parts = source[key].chunk(theirs.projections)
                    middle = parts[:1] if ours.projections == 3 else ()
                    transfer.tensors[key] = torch.cat([parts[0], *middle, parts[-1]])
                    transfer.partial[key] = how
        if ours.double and not theirs.double:
            like = source[f"{name}.qkv.weight"]
            made = {f"{name}.proj2.weight": torch.eye(ours.width), f"{name}.proj2.bias": torch.zeros(ours.width)}
            transfer.tensors.update({key: value.to(like) for key, value in made.items() if key in own})
            transfer.kept.update({key: IDENTITY for key in made if key in own})
    transfer.kept.update({key: NO_SOURCE for key in own if CONVERTED in key and key not in source})
    transfer.skipped.update({key: NO_PLACE for key in source if CONVERTED in key and key not in own})
    return transfer


def _below(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """Returns the tensors of one module, by their names inside it."""
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}


def _form(layer: dict[str, Tensor]) -> _Form | None:
    """Returns the form of a layer's weights; None where they are not those of an attention layer."""
    weight = layer.get("qkv.weight")
    if weight is None or weight.ndim != 2 or len(weight) not in (2 * weight.shape[1], 3 * weight.shape[1]):
        return None
    return _Form(
        width=weight.shape[1],
        projections=len(weight) // weight.shape[1],
        double="proj2.weight" in layer,
        core=frozenset(key for key in layer if key.startswith(("core.", "extra."))),
    )
