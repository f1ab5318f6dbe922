"""Loading weights of another run, another size or another model, with every key accounted for."""

from typing import Any

import timm
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from infvit.errors import CheckpointError, did_you_mean


def pretrained_state(name: str) -> dict[str, Tensor]:
    """Returns the pretrained weights of a timm model, downloaded by timm.

    Raises:
        CheckpointError: unknown name, or the weights cannot be had.
    """
    if not timm.is_model(name):
        raise CheckpointError(f"init_from=timm/{name}: unknown model. {did_you_mean(name, timm.list_models())}")
    try:
        return timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:  # the hub client raises errors of many kinds
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"init_from=timm/{name}: weights not available ({reason}).") from error


def load_weights(model: nn.Module, state: dict[str, Any], source: str, reset_head: bool) -> list[str]:
    """Loads a state dict into a model; position embeddings and patches are resized to the model's.

    Args:
        model: where to load.
        state: weights by name, without wrapper prefixes.
        source: where they are from, for messages.
        reset_head: leave the classifier as it was initialised.

    Returns:
        What was resized or left out, a line each.

    Raises:
        CheckpointError: less than the whole model could be loaded; the first names are listed.
    """
    if not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{source} holds no weights, only: {', '.join(map(str, list(state)[:5])) or 'nothing'}.")
    own = model.state_dict()
    shapes = {name: value.shape for name, value in state.items()}
    if isinstance(model, VisionTransformer):
        state = checkpoint_filter_fn(state, model)
    notes = [
        f"{name} resized from {tuple(shapes[name])} to {tuple(value.shape)}"
        for name, value in state.items()
        if name in shapes and value.shape != shapes[name]
    ]
    if reset_head:
        classifier = tuple(f"{name}." for name in _classifier_names(model))
        kept = {name: value for name, value in state.items() if not name.startswith(classifier)}
        notes += [f"{name} left out (reset_head)" for name in state.keys() - kept.keys()]
        state = {**kept, **{name: value for name, value in own.items() if name.startswith(classifier)}}
    missing = sorted(own.keys() - state.keys())
    unexpected = sorted(state.keys() - own.keys())
    wrong = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(own[name].shape)}"
        for name in sorted(own.keys() & state.keys())
        if state[name].shape != own[name].shape
    ]
    if missing or unexpected or wrong:
        parts = [
            f"{len(names)} {what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
            for names, what in ((missing, "missing"), (unexpected, "unknown"), (wrong, "of another shape"))
            if names
        ]
        layers = {name.split(" ")[0].rsplit(".", 1)[0] for name in missing + unexpected + wrong}
        only_head = layers <= set(_classifier_names(model))
        remedy = " reset_head=true starts with a new classifier." if only_head and not reset_head else ""
        raise CheckpointError(f"{source} does not fit the model ({'; '.join(parts)}).{remedy}")
    model.load_state_dict(state)
    return notes


def _classifier_names(model: nn.Module) -> tuple[str, ...]:
    names = getattr(model, "pretrained_cfg", {}).get("classifier", "head")
    return (names,) if isinstance(names, str) else tuple(names or ())
