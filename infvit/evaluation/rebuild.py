"""Model and data of a checkpoint, as they were, at this size or another."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from infvit.config import DataConfig, ModelConfig, RecipeConfig
from infvit.data import unused_keys
from infvit.engine import checkpoint
from infvit.engine.plan import import_modules
from infvit.errors import CheckpointError, ConfigError, did_you_mean
from infvit.models import InfViT, reparameterize
from infvit.models.build import build_model
from infvit.models.weights import load_weights


@dataclass(frozen=True)
class Rebuilt:
    """A trained model with what is needed to feed it.

    Attributes:
        path: the checkpoint file.
        model: in evaluation mode, on the CPU.
        data: data configuration of the run, with the replaced keys.
        recipe: recipe of the run.
        classes: class names in index order.
        img_size: image side in pixels.
        notes: what was resized on the way.
        folder: where results go by default.
        crop_mode: how timm's transform crops: center, squash or border.
    """

    path: Path
    model: nn.Module
    data: DataConfig
    recipe: RecipeConfig
    classes: tuple[str, ...]
    img_size: int
    notes: list[str]
    folder: Path
    crop_mode: str = "center"


def model_labels(models: Sequence[Rebuilt]) -> list[str]:
    """Returns short names of models: their folder's, or the whole path where two are alike."""
    names = [str(m.path) if str(m.path).startswith("timm/") else m.path.absolute().parent.name for m in models]
    return [str(m.path) if names.count(name) > 1 else name for m, name in zip(models, names, strict=True)]


def rebuild(source: str, weights: str, data_overrides: dict[str, Any]) -> Rebuilt:
    """Rebuilds the model of a checkpoint.

    Args:
        source: run folder or checkpoint file.
        weights: raw or ema.
        data_overrides: data keys that replace those of the run; `img_size` resizes the position embedding.

    Raises:
        CheckpointError: not a checkpoint of a run, or it holds no such weights.
        ConfigError: an unknown data key, or a value that does not fit the model.
    """
    path = checkpoint.find(source)
    content = checkpoint.read(path)
    needed = ("config", "num_classes", "classes", "in_chans", "img_size", "state_dict")
    missing = [name for name in needed if name not in content]
    if missing:
        raise CheckpointError(f"{path} is not a checkpoint of train.py: it lacks {', '.join(missing)}.")
    state = content["state_dict"] if weights == "raw" else content.get("ema_state_dict")
    if state is None:
        raise CheckpointError(f"{path} holds no EMA weights (recipe.ema_decay was null); use weights=raw.")
    stored = content["config"]
    import_modules(stored.get("imports", []))
    _check_overrides(data_overrides, content)
    data = from_stored(DataConfig, {**stored["data"], **data_overrides})
    for name in data_overrides.keys() & unused_keys(data):
        raise ConfigError(f"data.{name} has no effect: data={data.name} does not use it.")
    model_config = from_stored(ModelConfig, stored["model"])
    img_size = content["img_size"] if data_overrides.get("img_size") is None else data.img_size
    model, _ = build_model(model_config, content["num_classes"], content["in_chans"], img_size)
    report = load_weights(model, checkpoint.unwrapped(state), str(path))
    return Rebuilt(
        path=path,
        model=model.eval(),
        data=data,
        recipe=from_stored(RecipeConfig, stored["recipe"]),
        classes=tuple(content["classes"]),
        img_size=img_size,
        notes=report.changes(),
        folder=path.parent,
    )


def use_inference_form(rebuilt: Rebuilt) -> None:
    """Brings a model of ours into its form for inference and notes it; leaves others alone."""
    if any(isinstance(module, InfViT) for module in rebuilt.model.modules()):
        reparameterize(rebuilt.model)
        rebuilt.notes.append(
            "inference form: output projections folded, last MLP on the class token only; the same function up to "
            "rounding (reparameterize=false: as trained)"
        )


def _check_overrides(overrides: dict[str, Any], content: dict[str, Any]) -> None:
    known = [f.name for f in fields(DataConfig)]
    for name in overrides:
        if name not in known:
            raise ConfigError(f"unknown key 'data.{name}'. {did_you_mean(name, known)}")
    for name in ("num_classes", "in_chans"):
        if overrides.get(name) not in (None, content[name]):
            raise ConfigError(f"data.{name}={overrides[name]}, but the checkpoint's model has {content[name]}.")


def from_stored(schema: type[Any], stored: dict[str, Any]) -> Any:
    """Builds a configuration from a stored one; keys of another version are left out, new ones take their default."""
    known = {f.name for f in fields(schema)}
    try:
        return OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(schema), {k: v for k, v in stored.items() if k in known})
        )
    except OmegaConfBaseException as error:
        raise ConfigError(f"data.{error.full_key}: {str(error).splitlines()[0]}.") from error
