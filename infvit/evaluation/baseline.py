"""A model of timm's registry, or any weights for one, scored as timm does: its own size, crop and normalisation."""

from pathlib import Path
from typing import Any

import timm
from timm.data import infer_imagenet_subset, resolve_data_config
from timm.data.imagenet_info import ImageNetInfo
from torch import Tensor

from infvit.config import DataConfig, EvalConfig, ModelConfig, RecipeConfig
from infvit.data.class_list import read_class_list
from infvit.data.ground_truth import imagenet_classes
from infvit.engine import checkpoint
from infvit.errors import CheckpointError, ConfigError, did_you_mean
from infvit.evaluation.rebuild import Rebuilt, from_stored, rebuild
from infvit.models.build import build_model
from infvit.models.weights import load_weights, pretrained_state

REMOTE = "timm/"


def open_model(config: EvalConfig) -> Rebuilt:
    """Builds the model that `checkpoint` and `model` name: that of a run, or one of timm's registry.

    Raises:
        UserError: as `rebuild` and `baseline`.
    """
    if config.model.name or str(config.checkpoint).startswith(REMOTE):
        return baseline(config)
    return rebuild(str(config.checkpoint), config.weights, config.data)


def baseline(config: EvalConfig) -> Rebuilt:
    """Builds the model of `model=timm/NAME` (or another of the registry), or of `checkpoint=timm/NAME`.

    Weights are those of the checkpoint file, else timm's pretrained ones. The classes are those of ImageNet where the
    number of them says so, otherwise those listed in `data.classes`, in that order.

    Raises:
        CheckpointError: the weights cannot be had, or do not fit.
        ConfigError: a key that does not fit the model, or a model whose classes are not known.
    """
    model_config, source = config.model, config.checkpoint
    if source is not None and source.startswith(REMOTE):
        name = source.removeprefix(REMOTE)
        if model_config.name not in ("", name):
            raise ConfigError(
                f"model={model_config.name} and checkpoint={source} name different models; leave one out."
            )
        model_config, source = ModelConfig(**{**vars(model_config), "name": name}), None
    if not timm.is_model(model_config.name):
        known = timm.list_models()
        raise ConfigError(f"unknown model={model_config.name}. {did_you_mean(model_config.name, known)}")
    if config.weights != "raw":
        raise CheckpointError(f"weights={config.weights}: only runs of train.py keep an average; use weights=raw.")
    state, path, folder = _weights(model_config.name, source)
    known_cfg = timm.get_pretrained_cfg(model_config.name)
    cfg = known_cfg.to_dict() if known_cfg is not None else {}
    num_classes = _num_classes(state, cfg)
    overrides = {name: value for name, value in config.data.items() if value is not None}
    if overrides.get("num_classes", num_classes) != num_classes:
        raise ConfigError(f"data.num_classes={overrides['num_classes']}, but {path} has {num_classes}.")
    channels = overrides.get("in_chans", 3)
    model, _ = build_model(model_config, num_classes, channels, overrides.get("img_size"))
    report = load_weights(model, state, str(path))
    resolved = resolve_data_config({}, pretrained_cfg=cfg, model=model, use_test_size=True)
    height, width = resolved["input_size"][-2:]
    if height != width and "img_size" not in overrides:
        raise ConfigError(f"{model_config.name} takes {height} x {width} px, which is not square; set data.img_size.")
    data = from_stored(
        DataConfig,
        {"name": "imagenet", "val_split": "val", "num_workers": 8, "in_chans": channels}
        | {name: list(resolved[name])[:channels] for name in ("mean", "std")}
        | config.data,
    )
    return Rebuilt(
        path=path,
        model=model.eval(),
        data=data,
        recipe=RecipeConfig(crop_pct=resolved["crop_pct"], interpolation=resolved["interpolation"]),
        classes=_classes(num_classes, config.data.get("classes")),
        img_size=data.img_size or height,
        notes=report.changes(),
        folder=folder,
        crop_mode=resolved["crop_mode"],
    )


def _weights(name: str, source: str | None) -> tuple[dict[str, Tensor], Path, Path]:
    """Returns the weights, what to call them, and where results go."""
    if source is None:
        return pretrained_state(name, "model"), Path(REMOTE + name), Path("runs") / f"timm-{name}"
    path = checkpoint.find(source)
    content = checkpoint.read(path)
    if "config" in content and "classes" in content:
        raise ConfigError(f"{path} is of a run, which knows its model; leave out model={name}.")
    state = checkpoint.unwrapped(content.get("state_dict", content.get("model", content)))
    return state, path, path.parent


def _num_classes(state: dict[str, Tensor], cfg: dict[str, Any]) -> int:
    """Returns the number of classes: that of the classifier's bias or weight, else what timm says."""
    heads = cfg.get("classifier") or "head"
    head = heads if isinstance(heads, str) else heads[0]
    found = next((state[f"{head}.{kind}"] for kind in ("bias", "weight") if f"{head}.{kind}" in state), None)
    return int(found.shape[0] if found is not None else cfg.get("num_classes", 1000))


def _classes(num_classes: int, listed: str | None) -> tuple[str, ...]:
    """Returns the class names in the order of the logits."""
    subset = infer_imagenet_subset({"num_classes": num_classes})
    if subset is not None:
        return tuple(ImageNetInfo(subset).label_names())
    if listed is None:
        raise ConfigError(f"which {num_classes} classes does the model have? List them in a file: data.classes=FILE.")
    names = read_class_list(listed, imagenet_classes())
    if len(names) != num_classes:
        raise ConfigError(f"data.classes={listed} lists {len(names)} classes, but the model has {num_classes}.")
    return names
