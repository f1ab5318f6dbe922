"""Mixup and CutMix: where the random numbers come from, and that mixing parts is mixing the whole."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from infvit.config import RecipeConfig
from infvit.data import TrainSampler
from infvit.recipe import BatchMixup

CLASSES, SIDE = 5, 8
BOTH = RecipeConfig()
MIXUP = replace(BOTH, cutmix=0.0)
CUTMIX = replace(BOTH, mixup=0.0)
IMAGES = torch.rand(24, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(24) % CLASSES


def mixed(recipe: RecipeConfig, update: int, seed: int = 0, images: Tensor = IMAGES, targets: Tensor = TARGETS):
    return BatchMixup(recipe, CLASSES, seed)(images.clone(), targets, update)


def lam(targets: Tensor, own: Tensor, mirror: Tensor, smoothing: float) -> float:
    """Reads lambda out of the dense targets of a pair of different classes."""
    i = int((own != mirror).nonzero()[0])
    off = smoothing / CLASSES
    return float((targets[i, own[i]] - off) / (1 - smoothing))


def test_a_function_of_seed_and_update():
    first = mixed(BOTH, 3)
    np.random.seed(99)
    again = mixed(BOTH, 3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for other in (mixed(BOTH, 4), mixed(BOTH, 3, seed=1)):
        assert not torch.equal(first[0], other[0])
    lams = {lam(mixed(MIXUP, u)[1], TARGETS, TARGETS.flip(0), 0.1) for u in range(20)}
    assert len(lams) == 20


def test_one_object_keeps_no_state():
    mixup = BatchMixup(BOTH, CLASSES, 0)
    mixup(IMAGES.clone(), TARGETS, 0)
    assert torch.equal(mixup(IMAGES.clone(), TARGETS, 3)[0], mixed(BOTH, 3)[0])


def test_numpys_generator_is_left_alone():
    np.random.seed(5)
    before = np.random.get_state()
    mixed(BOTH, 0)
    after = np.random.get_state()
    assert np.array_equal(before[1], after[1])
    assert before[2:] == after[2:]
    with pytest.raises(AssertionError, match="even"):
        mixed(BOTH, 0, images=IMAGES[:3], targets=TARGETS[:3])
    assert np.random.get_state()[2] == before[2], "also after an error"


@pytest.mark.parametrize("recipe", [MIXUP, CUTMIX, BOTH], ids=["mixup", "cutmix", "both"])
@pytest.mark.parametrize(("micro", "world_size"), [(4, 1), (10, 1), (6, 2), (None, 3)])
def test_mixing_micro_batches_is_mixing_the_batch(recipe: RecipeConfig, micro: int | None, world_size: int):
    samplers = [TrainSampler(24, 24, micro, 1, 0, rank, world_size) for rank in range(world_size)]
    order = [view.index for batch in TrainSampler(24, 24, None, 1, 0) for view in batch]
    for update in range(6):
        images, targets = mixed(recipe, update, images=IMAGES[order], targets=TARGETS[order])
        whole = {index: (images[i], targets[i]) for i, index in enumerate(order)}
        seen = 0
        for sampler in samplers:
            for batch in sampler:
                indices = [view.index for view in batch]
                part = mixed(recipe, update, images=IMAGES[indices], targets=TARGETS[indices])
                for i, index in enumerate(indices):
                    assert torch.equal(part[0][i], whole[index][0])
                    assert torch.equal(part[1][i], whole[index][1])
                    seen += 1
        assert seen == 24


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixup_by_its_formula(smoothing: float):
    images, targets = mixed(replace(MIXUP, smoothing=smoothing), 2)
    own, mirror = TARGETS, TARGETS.flip(0)
    weight = lam(targets, own, mirror, smoothing)
    assert 0 < weight < 1
    torch.testing.assert_close(images, weight * IMAGES + (1 - weight) * IMAGES.flip(0))
    eye = torch.eye(CLASSES)
    expected = (1 - smoothing) * (weight * eye[own] + (1 - weight) * eye[mirror]) + smoothing / CLASSES
    torch.testing.assert_close(targets, expected)
    torch.testing.assert_close(targets.sum(1), torch.ones(24))


def test_cutmix_weight_is_the_area_that_is_left():
    areas = set()
    for update in range(8):
        images, targets = mixed(CUTMIX, update)
        pasted = (images != IMAGES).any(1)
        assert torch.equal(torch.where(pasted[:, None], IMAGES.flip(0), IMAGES), images)
        assert (pasted == pasted[0]).all(), "one box for the whole batch"
        rows, columns = pasted[0].any(1), pasted[0].any(0)
        assert int(pasted[0].sum()) == int(rows.sum()) * int(columns.sum()), "a box"
        share = 1 - pasted[0].float().mean()
        weight = lam(targets, TARGETS, TARGETS.flip(0), 0.1)
        assert weight == pytest.approx(float(share), abs=1e-6)
        areas.add(float(share))
    assert len(areas) > 3


def test_probabilities():
    """The share of mixed updates, and of CutMix among them, follow their keys."""

    def kinds(recipe: RecipeConfig) -> list[str]:
        found = []
        for update in range(60):
            images, targets = mixed(recipe, update, images=IMAGES[:4], targets=torch.arange(4))
            changed = (images != IMAGES[:4]).any(1)
            # CutMix leaves pixels as they were, or pastes the whole mirror
            whole = bool(changed.all()) and not torch.equal(images, IMAGES[:4].flip(0))
            found.append("mixup" if whole else "cutmix" if changed.any() else "none")
            assert targets.shape == (4, CLASSES)
        return found

    assert kinds(replace(BOTH, mixup_switch_prob=0.0)).count("mixup") == 60
    assert kinds(replace(BOTH, mixup_switch_prob=1.0)).count("mixup") == 0
    assert 15 < kinds(BOTH).count("mixup") < 45
    some = kinds(replace(MIXUP, mixup_prob=0.3))
    assert 8 < some.count("mixup") < 30
    assert some.count("cutmix") == 0
