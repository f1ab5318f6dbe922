"""No key without effect: each recipe key is flipped in a real, tiny run, and what it is meant to change changes.

What is looked at: the rates of all updates, the weights and their average after three updates, and the images of the
evaluation. A key that does nothing beside others must be on the list that the run shows, and must then change nothing.
"""

from dataclasses import fields, replace
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
import yaml

import infvit  # noqa: F401 - registers the models
from infvit.config import DataConfig, ModelConfig, RecipeConfig, TrainConfig
from infvit.data import digits
from infvit.engine.device import seed_update
from infvit.engine.loop import train_update
from infvit.engine.plan import make_plan
from infvit.engine.setup import build_run
from infvit.engine.signals import StopRequest
from infvit.errors import ConfigError

UPDATES = 3
LEARNING = {"weights", "ema"}

# Everything on, so that a single key can be flipped.
BASE = RecipeConfig(
    name="test",
    lr=1e-2,
    warmup_epochs=1,
    warmup_lr=1e-3,
    min_lr=1e-4,
    layer_decay=0.9,
    clip_grad=1.0,
    drop=0.1,
    drop_path=0.3,
    ema_decay=0.5,
    repeated_aug=1,
    auto_augment="rand-m9-mstd0.5-inc1",
    color_jitter=None,
    reprob=0.9,
    remode="const",
)

# key: (what else is changed first, the new value, what must change: exactly that)
EFFECTS: dict[str, tuple[dict[str, Any], Any, set[str]]] = {
    "opt": ({}, "nadamw", LEARNING),
    "opt_eps": ({}, 1e-2, LEARNING),
    "opt_betas": ({}, [0.5, 0.9], LEARNING),
    "weight_decay": ({}, 0.5, LEARNING),
    "layer_decay": ({}, 0.5, LEARNING),
    "clip_grad": ({"opt": "sgd"}, 0.1, LEARNING),
    "lr": ({"warmup_epochs": 0}, 2e-2, LEARNING | {"rates"}),
    "lr_base_batch": ({"warmup_epochs": 0}, 64, LEARNING | {"rates"}),
    "sched": ({}, "tanh", {"rates"}),
    "sched_on_updates": ({}, True, LEARNING | {"rates"}),
    "min_lr": ({}, 1e-3, {"rates"}),
    "warmup_epochs": ({}, 0, LEARNING | {"rates"}),
    "warmup_lr": ({}, 2e-3, LEARNING | {"rates"}),
    "smoothing": ({}, 0.3, LEARNING),
    "drop_path": ({}, 0.0, LEARNING),
    "drop": ({}, 0.0, LEARNING),
    "mixup": ({"mixup_switch_prob": 0.0}, 0.2, LEARNING),
    "cutmix": ({"mixup_switch_prob": 1.0}, 0.2, LEARNING),
    "mixup_prob": ({}, 0.01, LEARNING),
    "mixup_switch_prob": ({}, 1.0, LEARNING),
    "ema_decay": ({}, 0.9, {"ema"}),
    "repeated_aug": ({}, 3, LEARNING),
    "auto_augment": ({}, None, LEARNING),
    "color_jitter": ({"auto_augment": None}, 0.3, LEARNING),
    "hflip": ({}, 0.0, LEARNING),
    "scale": ({}, [0.5, 1.0], LEARNING),
    "ratio": ({}, [1.0, 1.0], LEARNING),
    "interpolation": ({}, "nearest", LEARNING | {"eval"}),
    "resize": ({}, "timm", LEARNING),
    "reprob": ({}, 0.1, LEARNING),
    "remode": ({}, "pixel", LEARNING),
    "recount": ({}, 4, LEARNING),
    "crop_pct": ({}, 0.5, {"eval"}),
}

# key: (what makes it inactive, the new value, the reason that is shown)
INACTIVE: dict[str, tuple[dict[str, Any], Any, str]] = {
    "color_jitter": ({"color_jitter": 0.3}, 0.8, "timm skips colour jitter when auto_augment is set"),
    "resize": ({"interpolation": "nearest"}, "timm", "only timm resizes with interpolation=nearest"),
    "remode": ({"reprob": 0.0}, "pixel", "reprob is 0"),
    "recount": ({"reprob": 0.0}, 4, "reprob is 0"),
    "mixup_prob": ({"mixup": 0.0, "cutmix": 0.0}, 0.5, "neither mixup nor cutmix is on"),
    "mixup_switch_prob": ({"mixup": 0.0}, 0.9, "only one of mixup and cutmix is on"),
    "mixup": ({"mixup_prob": 0.0}, 0.2, "mixup_prob is 0"),
    "cutmix": ({"mixup_prob": 0.0}, 0.2, "mixup_prob is 0"),
    "warmup_lr": ({"warmup_epochs": 0}, 2e-3, "warmup_epochs is 0"),
    "min_lr": ({"sched": "constant"}, 1e-3, "a constant schedule does not fall"),
    "sched_on_updates": (
        {"sched": "constant", "warmup_epochs": 0}, True, "a constant schedule without warm-up never changes",
    ),
    "opt_betas": ({"opt": "sgd"}, [0.5, 0.9], "sgd has no betas"),
    "opt_eps": ({"opt": "sgd"}, 1e-2, "sgd has no epsilon"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _few_digits(monkeypatch: pytest.MonkeyPatch):
    """64 images are enough, and leave an epoch four updates."""
    images, labels = digits.digit_arrays("train")
    monkeypatch.setattr(digits, "digit_arrays", lambda split: (images[:64], labels[:64]))


def configuration(recipe: RecipeConfig, side: int = 16, **model: Any) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(**{"name": "infvit_linear_mini", "args": {"depth": 2}} | model),
        data=DataConfig(img_size=side, num_workers=0, mean=[0.5] * 3, std=[0.5] * 3),
        recipe=recipe,
        epochs=4,
        batch_size=16,
        run_dir="/nonexistent/run",
    )


def observe(recipe: RecipeConfig) -> dict[str, bytes]:
    return _observe(yaml.safe_dump({f.name: getattr(recipe, f.name) for f in fields(recipe)}))


@cache
def _observe(text: str) -> dict[str, bytes]:
    """Runs three updates as the loop does."""
    run = build_run(make_plan(configuration(RecipeConfig(**yaml.safe_load(text)))), StopRequest())
    run.sampler.start(0)
    batches = iter(run.train_loader)
    run.forward.train()
    for update in range(UPDATES):
        run.schedule.set(update)
        seed_update(0, update, torch.device("cpu"))
        *_, taken = train_update(run, islice(batches, run.sampler.micro_batches))
        assert taken
        run.state.update += 1
    updates = 4 * run.sampler.updates_per_epoch
    rates = torch.tensor([run.schedule.set(update) for update in range(updates)], dtype=torch.float64)
    state = run.state.state_dict()
    return {
        "rates": rates.numpy().tobytes(),
        "weights": _bytes(state["state_dict"]),
        "ema": _bytes(state["ema_state_dict"]),
        "eval": next(iter(run.val_loader)).images.numpy().tobytes(),
    }


def _bytes(tensors: dict[str, torch.Tensor] | None) -> bytes:
    return b"" if tensors is None else b"".join(t.numpy().tobytes() for t in tensors.values())


def changed(before: RecipeConfig, after: RecipeConfig) -> set[str]:
    a, b = observe(before), observe(after)
    return {name for name in a if a[name] != b[name]}


def test_every_key_is_looked_at():
    """A new field needs an entry: say what it changes."""
    assert EFFECTS.keys() == {f.name for f in fields(RecipeConfig)} - {"name"}


@pytest.mark.parametrize("key", EFFECTS)
def test_flipping_a_key_changes_what_it_should(key: str):
    others, value, expected = EFFECTS[key]
    recipe = replace(BASE, **others)
    assert getattr(recipe, key) != value
    assert changed(recipe, replace(recipe, **{key: value})) == expected
    assert f"recipe.{key}" not in make_plan(configuration(recipe)).inactive


@pytest.mark.parametrize("key", INACTIVE)
def test_an_inactive_key_is_named_and_changes_nothing(key: str):
    others, value, reason = INACTIVE[key]
    recipe = replace(BASE, **{"ema_decay": 0.5, **others})
    flipped = replace(recipe, **{key: value})
    assert getattr(recipe, key) != value
    assert changed(recipe, flipped) == set()
    for one in (recipe, flipped):
        plan = make_plan(configuration(one))
        assert plan.inactive[f"recipe.{key}"] == reason
        assert any(reason in line and f"recipe.{key}" in line for line in plan.headline())


def test_nothing_is_called_inactive_that_acts():
    assert make_plan(configuration(BASE)).inactive == {}


def test_the_same_recipe_gives_the_same_run():
    """Otherwise every flip would seem to change something."""
    text = yaml.safe_dump({f.name: getattr(BASE, f.name) for f in fields(BASE)})
    assert _observe.__wrapped__(text) == _observe.__wrapped__(text)


def test_switching_the_average_off():
    assert changed(BASE, replace(BASE, ema_decay=None)) == {"ema"}


def test_jitter_acts_beside_three_augment():
    """timm leaves colour jitter on for `3a`, so it must not be called inactive."""
    recipe = replace(BASE, auto_augment="3a", color_jitter=0.3)
    assert "color_jitter" not in recipe.inactive()
    assert changed(recipe, replace(recipe, color_jitter=0.8)) == LEARNING


@pytest.mark.parametrize(
    ("name", "inactive"),
    [
        ("resnet18", {}),
        ("vgg11", {"recipe.drop_path": "vgg11 takes no drop_path_rate"}),
        ("vit_tiny_patch16_224", {}),
    ],
)
def test_a_model_without_stochastic_depth(name: str, inactive: dict[str, str]):
    assert make_plan(configuration(BASE, side=32, name=name, args={})).inactive == inactive


@pytest.mark.parametrize("name", ["drop_path_rate", "drop_rate", "num_classes", "img_size", "in_chans", "pretrained"])
def test_what_has_a_key_is_refused_as_an_argument_of_the_model(name: str):
    with pytest.raises(ConfigError, match=rf"^model.args.{name} is set by [a-z_./A-Z=]+; use that key.$"):
        ModelConfig(args={name: 1})
