"""The learning rate, against formulas written here and not against timm."""

import math
import random
from dataclasses import replace

import pytest
import torch

from infvit.config import RecipeConfig
from infvit.errors import ConfigError
from infvit.recipe import Schedule, build_optimizer

DEIT = RecipeConfig()
UPDATES = 7


def schedule(recipe: RecipeConfig = DEIT, epochs: int = 300, batch_size: int = 1024) -> Schedule:
    return Schedule(build_optimizer(torch.nn.Linear(3, 3), recipe, batch_size), recipe, epochs, UPDATES)


def closed_form(t: float, total: float, warmup: float, peak: float = 1e-3, low: float = 1e-5, first: float = 1e-6):
    """Linear warm-up, then the cosine over the whole length, as seen at time t."""
    if t < warmup:
        return first + (peak - first) * t / warmup
    return low + (peak - low) * (1 + math.cos(math.pi * t / total)) / 2


def test_first_ten_epochs_of_deit():
    """Pinned: peak 5e-4 * 1024 / 512 = 1e-3, five epochs of warm-up from 1e-6, then on the cosine of 300 epochs."""
    expected = [1e-6, 2.008e-4, 4.006e-4, 6.004e-4, 8.002e-4]
    expected += [0.5 * (1e-3 + 1e-5) + 0.5 * (1e-3 - 1e-5) * math.cos(math.pi * e / 300) for e in (5, 6, 7, 8, 9)]
    assert expected[5:8] == pytest.approx([9.993216e-4, 9.990232e-4, 9.986706e-4], rel=1e-6)
    found = [schedule().set(epoch * UPDATES) for epoch in range(10)]
    assert found == pytest.approx(expected, rel=1e-12)


def test_whole_curve_of_deit():
    rates = schedule()
    for update in range(300 * UPDATES):
        assert rates.set(update) == pytest.approx(closed_form(update // UPDATES, 300, 5), rel=1e-12)
    assert rates.set(300 * UPDATES - 1) == pytest.approx(1e-5 + 0.5 * 9.9e-4 * (1 - math.cos(math.pi / 300)))


@pytest.mark.parametrize("warmup", [0, 2, 0.5, 1.3])
def test_on_updates(warmup: float):
    """Also with a fraction of an epoch as warm-up."""
    recipe = replace(DEIT, sched_on_updates=True, warmup_epochs=warmup)
    rates = schedule(recipe, epochs=10)
    for update in range(10 * UPDATES):
        expected = closed_form(update, 10 * UPDATES, warmup * UPDATES)
        assert rates.set(update) == pytest.approx(expected, rel=1e-12), update


@pytest.mark.parametrize("on_updates", [False, True])
@pytest.mark.parametrize("sched", ["cosine", "constant", "poly", "tanh"])
def test_a_function_of_the_update_alone(sched: str, on_updates: bool):
    recipe = replace(DEIT, sched=sched, sched_on_updates=on_updates)
    updates = list(range(10 * UPDATES))
    in_order = [schedule(recipe, epochs=10).set(update) for update in updates]
    random.shuffle(updates)
    rates = schedule(recipe, epochs=10)
    assert {update: rates.set(update) for update in updates} == dict(enumerate(in_order))
    assert len(set(in_order)) > (5 if sched == "constant" else 9)


def test_constant_keeps_the_peak_after_warm_up():
    rates = schedule(replace(DEIT, sched="constant"), epochs=20)
    assert [rates.set(e * UPDATES) for e in (0, 1, 5, 19)] == pytest.approx([1e-6, 2.008e-4, 1e-3, 1e-3])


def test_a_restored_optimizer_goes_on_with_the_same_rates():
    """Its groups hold the rate of the moment, which must not become the peak."""
    first = schedule()
    first.set(100 * UPDATES)
    optimizer = build_optimizer(torch.nn.Linear(3, 3), DEIT, 1024)
    optimizer.load_state_dict(first.optimizer.state_dict())
    second = Schedule(optimizer, DEIT, 300, UPDATES)
    assert [second.set(e * UPDATES) for e in (0, 5, 101)] == [first.set(e * UPDATES) for e in (0, 5, 101)]


def test_layer_scales_are_respected():
    a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": [a], "lr_scale": 0.25}, {"params": [b], "lr_scale": 1.0}], lr=1e-3)
    rates = Schedule(optimizer, DEIT, 300, UPDATES)
    for epoch in (0, 3, 5, 150, 299):
        shown = rates.set(epoch * UPDATES)
        assert shown == pytest.approx(closed_form(epoch, 300, 5), rel=1e-12), "the largest rate is the one shown"
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([shown / 4, shown], rel=1e-12)


@pytest.mark.parametrize(
    ("sched", "message"),
    [("cosin", "unknown recipe.sched='cosin'. Did you mean 'cosine'"), ("plateau", "unknown recipe.sched='plateau'")],
)
def test_unknown_schedule(sched: str, message: str):
    with pytest.raises(ConfigError, match=message):
        schedule(replace(DEIT, sched=sched))
