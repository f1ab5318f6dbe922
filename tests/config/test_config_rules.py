"""Every rule of `infvit/config/`, with its message, and the border case that is still allowed."""

from typing import Any

import pytest

from infvit.config import (
    DataConfig,
    EngineConfig,
    EvalConfig,
    LoggerConfig,
    ModelConfig,
    RecipeConfig,
    TrainConfig,
)
from infvit.errors import ConfigError

INF, NAN = float("inf"), float("nan")
PLAIN = {"mixup": 0.0, "cutmix": 0.0}


def quick(**changes: Any) -> RecipeConfig:
    return RecipeConfig(**{"warmup_epochs": 0, **PLAIN, **changes})


REFUSED: list[tuple[type, dict[str, Any], str]] = [
    *[(ModelConfig, {"gamma": g}, f"model.gamma={g} must lie strictly between 0 and 1.") for g in (0, 1, -1, 1.5, NAN)],
    (ModelConfig, {"args": {"num_classes": 3}}, "model.args.num_classes is set by data.num_classes; use that key."),
    (ModelConfig, {"args": {"drop_rate": 0.1}}, "model.args.drop_rate is set by recipe.drop; use that key."),
    (DataConfig, {"in_chans": 2, "mean": [0.5], "std": [0.5]}, "data.in_chans=2 must be 1 or 3."),
    *[(DataConfig, {k: 0}, f"data.{k}=0 must be at least 1.") for k in
      ("num_classes", "img_size", "micro_batch_size", "num_samples")],
    *[(DataConfig, {k: -1}, f"data.{k}=-1 must be at least 0.") for k in ("num_workers", "max_damaged")],
    (DataConfig, {"mean": [0.5, 0.5]}, "data.mean has 2 values, data.in_chans=3."),
    (DataConfig, {"std": [1.0] * 4}, "data.std has 4 values, data.in_chans=3."),
    (DataConfig, {"in_chans": 1}, "data.mean has 3 values, data.in_chans=1."),
    (DataConfig, {"std": [0.5, 0.0, 0.5]}, "data.std=[0.5, 0.0, 0.5] must be positive."),
    *[(RecipeConfig, {k: v}, f"recipe.{k}={v} must be between 0 and 1.") for v in (-0.1, 1.1, NAN) for k in
      ("smoothing", "drop_path", "drop", "mixup_prob", "mixup_switch_prob", "hflip", "reprob", "ema_decay")],
    *[(RecipeConfig, {k: -1.0}, f"recipe.{k}=-1.0 must be at least 0.") for k in
      ("weight_decay", "opt_eps", "mixup", "cutmix", "min_lr", "warmup_epochs", "warmup_lr")],
    *[(RecipeConfig, {k: 0}, f"recipe.{k}=0 must be at least 1.") for k in
      ("repeated_aug", "recount", "lr_base_batch")],
    *[(RecipeConfig, {"lr": v}, f"recipe.lr={v} must be positive.") for v in (0.0, -1.0, NAN, INF)],
    *[(RecipeConfig, {"opt_betas": v}, f"recipe.opt_betas={v} must each lie in [0, 1).") for v in
      ([0.9, 1.0], [-0.1, 0.9])],
    *[(RecipeConfig, {"crop_pct": v}, f"recipe.crop_pct={v} must lie in (0, 1].") for v in (0.0, 1.1)],
    *[(RecipeConfig, {"clip_grad": v}, f"recipe.clip_grad={v} must be positive.") for v in (0.0, -1.0)],
    *[(RecipeConfig, {"layer_decay": v}, f"recipe.layer_decay={v} must lie in (0, 1].") for v in (0.0, 1.5)],
    (RecipeConfig, {"remode": "black"}, "recipe.remode='black' must be one of const, rand, pixel."),
    *[(RecipeConfig, {"warmup_epochs": v}, f"recipe.warmup_epochs={v} is a fraction, which needs "
       "recipe.sched_on_updates=true.") for v in (0.5, INF)],
    *[(RecipeConfig, {k: v}, f"recipe.{k}={v} must be [low, high].") for k in ("scale", "ratio") for v in
      ([0.5], [0.9, 0.1], [0.0, 1.0], [0.1, 0.5, 1.0])],
    (EngineConfig, {"device": "tpu"}, "engine.device='tpu' must be one of auto, cpu, cuda, mps."),
    (EngineConfig, {"precision": "fp8"}, "engine.precision='fp8' must be one of auto, fp32, bf16, fp16."),
    (EngineConfig, {"best_metric": "loss"}, "engine.best_metric='loss' must be one of top1, ema_top1."),
    *[(EngineConfig, {k: 0}, f"engine.{k}=0 must be at least 1.") for k in ("eval_every", "max_nonfinite")],
    *[(EngineConfig, {k: -1}, f"engine.{k}=-1 must be at least 0.") for k in ("log_seconds", "checkpoint_minutes")],
    (LoggerConfig, {"wandb_mode": "on"}, "logger.wandb_mode='on' must be one of online, offline, disabled."),
    *[(TrainConfig, {k: v}, f"{k}={v} must be at least 1.") for k in ("epochs", "max_steps", "batch_size")
      for v in (0, -1)],
    (TrainConfig, {"seed": -1}, "seed=-1 must be between 0 and 4294967295."),
    (TrainConfig, {"epochs": 5}, "recipe.warmup_epochs=5 leaves nothing of epochs=5; lower it or train for longer."),
    *[(TrainConfig, {"batch_size": 9, "recipe": RecipeConfig(**on)},
       "batch_size=9 is odd, but mixup and cutmix mix images in pairs: make it even, or switch them off with "
       "recipe.mixup=0 recipe.cutmix=0.") for on in ({"mixup": 0.0}, {"cutmix": 0.0}, {})],
    (TrainConfig, {"batch_size": 8, "data": DataConfig(micro_batch_size=3)}, "data.micro_batch_size=3 is odd, but "
     "mixup and cutmix mix images in pairs: make it even, or switch them off with recipe.mixup=0 recipe.cutmix=0."),
    (TrainConfig, {"engine": EngineConfig(best_metric="ema_top1"), "recipe": quick(ema_decay=None)},
     "engine.best_metric=ema_top1 needs recipe.ema_decay."),
    (TrainConfig, {"reset_head": True}, "reset_head=true has no effect without init_from=..."),
    (EvalConfig, {}, "checkpoint=... is missing: name a run folder, e.g. checkpoint=runs/my_run, or model=timm/NAME."),
    (EvalConfig, {"checkpoint": "x", "weights": "best"}, "weights='best' must be one of raw, ema."),
    (EvalConfig, {"checkpoint": "x", "precision": "fp8"}, "precision='fp8' must be one of auto, fp32, bf16, fp16."),
    (EvalConfig, {"checkpoint": "x", "device": "tpu"}, "device='tpu' must be one of auto, cpu, cuda, mps."),
    (EvalConfig, {"checkpoint": "x", "batch_size": 0}, "batch_size=0 must be at least 1."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "values", "message"), REFUSED, ids=lambda v: v.__name__ if isinstance(v, type) else None
)
def test_refused(schema: type, values: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        schema(**values)
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)


ALLOWED: list[tuple[type, dict[str, Any]]] = [
    (ModelConfig, {"gamma": 0.999}),
    (ModelConfig, {"args": {"depth": 2}}),
    (DataConfig, {"in_chans": 1, "mean": [0.5], "std": [0.5]}),
    (DataConfig, {"mean": [0.5], "std": [0.5]}),
    (DataConfig, {"num_workers": 0, "max_damaged": 0}),
    (RecipeConfig, {"smoothing": 0, "ema_decay": 1, "crop_pct": 1.0, "layer_decay": 1.0, "lr_base_batch": None}),
    (RecipeConfig, {"warmup_epochs": 0.5, "sched_on_updates": True}),
    (RecipeConfig, {"scale": [1.0, 1.0], "opt_betas": [0.0, 0.999]}),
    (TrainConfig, {"epochs": 6, "max_steps": 1}),
    (TrainConfig, {"batch_size": 9, "recipe": quick()}),
    (TrainConfig, {"batch_size": 9, "recipe": RecipeConfig(mixup_prob=0.0)}),
    (TrainConfig, {"batch_size": 8, "data": DataConfig(micro_batch_size=16)}),
    (TrainConfig, {"reset_head": True, "init_from": "x"}),
    (EngineConfig, {"log_seconds": 0, "checkpoint_minutes": 0}),
    (EvalConfig, {"checkpoint": "x", "weights": "ema", "batch_size": 1}),
]


@pytest.mark.parametrize(("schema", "values"), ALLOWED)
def test_allowed(schema: type, values: dict[str, Any]):
    config = schema(**values)
    assert all(getattr(config, name) == value for name, value in values.items())


def test_defaults_are_not_shared():
    first = ModelConfig()
    first.args["depth"] = 2
    assert ModelConfig().args == {}
    RecipeConfig().opt_betas.append(0.5)
    assert RecipeConfig().opt_betas == [0.9, 0.999]
