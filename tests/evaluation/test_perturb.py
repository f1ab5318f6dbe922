"""Perturbation on a model whose evidence is known, and its figures from curves that are known."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from infvit.evaluation.attention_quality import perturbation_values
from infvit.evaluation.perturb import Perturber


class Toy(nn.Module):
    """Its class 1 is as likely as patch 5 is bright, and nothing else counts."""

    def forward(self, images: Tensor) -> Tensor:
        bright = images[:, :, 4:8, 4:8].mean((1, 2, 3))
        return torch.stack([torch.zeros_like(bright), bright], 1)


def perturbed(relevance: Tensor, batch_size: int = 5) -> np.ndarray:
    """Returns the probabilities of the curves of the toy on a bright image; 16 patches of 4 px."""
    images = torch.full((1, 3, 16, 16), 3.0)
    perturber = Perturber(Toy(), batch_size, (4, 4), lambda x: x.new_zeros(1, 1, 1, 1), seed=0)
    perturber.add(images, Toy()(images), relevance[None], [0])
    perturber.finish()
    return perturber.scores[0]


def test_a_toy_model_whose_evidence_is_one_patch() -> None:
    """A map that points at it: MoRF falls at the first step that removes a patch, LeRF at the last."""
    intact, gone = torch.tensor(3.0).sigmoid().item(), 0.5
    scores = perturbed(nn.functional.one_hot(torch.tensor(5), 16).float())
    assert scores[0] == pytest.approx([intact] + [gone] * 20)  # 5 % of 16 patches is one
    assert scores[1] == pytest.approx([intact] * 20 + [gone])
    values = perturbation_values(scores)
    rest = gone / intact
    assert values["morf_aoc"] == pytest.approx(100 * (1 - (rest + 0.025 * (1 - rest))))
    assert values["lerf_auc"] == pytest.approx(100 * (1 - 0.025 * (1 - rest)))
    assert values["deletion"] == pytest.approx(100 * (gone + 0.025 * (intact - gone)))


def test_a_constant_map_gives_one_curve() -> None:
    """All ties: MoRF and LeRF remove the same patches, and no order of ties decides between two maps."""
    scores = perturbed(torch.zeros(16))
    assert (scores[0] == scores[1]).all()
    values = perturbation_values(scores)
    assert values["morf_aoc"] == pytest.approx(100 - values["lerf_auc"])
    assert (perturbed(torch.zeros(16), batch_size=64) == scores).all()


def test_a_score_that_rises_is_clipped() -> None:
    scores = np.tile(np.linspace(0.2, 1.0, 21), (3, 1))
    assert perturbation_values(scores)["lerf_auc"] == pytest.approx(100)
