"""Top-1, top-5 and loss against scikit-learn, also where there is little to choose from."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss, top_k_accuracy_score
from torch import Tensor, nn

from infvit.data import EvalBatch
from infvit.engine.validate import validate
from infvit.metrics import ClassificationScores


def scored(logits: Tensor, targets: Tensor, batch: int = 1000) -> dict[str, float | int]:
    scores = ClassificationScores()
    for part in range(0, len(targets), batch):
        scores.update(logits[part : part + batch], targets[part : part + batch])
    return scores.result()


@pytest.mark.parametrize("classes", [2, 5, 6, 100])
def test_equal_to_scikit_learn(classes: int) -> None:
    """With fewer than five classes all of them are the top five."""
    generator = torch.Generator().manual_seed(classes)
    logits = torch.randn(400, classes, generator=generator)
    targets = torch.randint(classes, (400,), generator=generator)
    logits[torch.arange(400), targets] += 1
    result = scored(logits, targets)
    probabilities, labels = logits.double().softmax(1).numpy(), np.arange(classes)
    assert result["images"] == 400
    assert result["top1"] == pytest.approx(100 * accuracy_score(targets, probabilities.argmax(1)))
    if classes > 5:
        assert result["top5"] == pytest.approx(100 * top_k_accuracy_score(targets, probabilities, k=5, labels=labels))
        assert result["top1"] < result["top5"] < 100
    else:
        assert result["top5"] == 100
    assert result["loss"] == pytest.approx(log_loss(targets, probabilities, labels=labels), rel=1e-6)
    for batch in (1, 3, 399):
        other = scored(logits, targets, batch)
        assert other["loss"] == pytest.approx(result["loss"], rel=1e-12)
        assert (other["top1"], other["top5"]) == (result["top1"], result["top5"])


def test_the_fifth_counts_and_the_sixth_does_not() -> None:
    logits = torch.arange(10.0).flip(0).expand(10, 10)
    assert scored(logits, torch.arange(10)) == {
        "top1": 10.0,
        "top5": 50.0,
        "loss": pytest.approx(float(nn.functional.cross_entropy(logits.double(), torch.arange(10)))),
        "images": 10,
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_wrong(value: float) -> None:
    """Wherever the value stands; NaN sorts above every number. The other rows keep their scores."""
    for column in range(3):
        logits = torch.tensor([[5.0, 1.0, 0.0]] * 4)
        logits[0, column] = value
        result = scored(logits, torch.zeros(4, dtype=torch.int64))
        assert (result["top1"], result["top5"]) == (75.0, 75.0)
    assert math.isnan(scored(torch.full((1, 3), math.nan), torch.zeros(1, dtype=torch.int64))["loss"])


def test_ties_name_one_class() -> None:
    """A model that says nothing is right by chance: one class in ten, five classes in ten."""
    result = scored(torch.zeros(10, 10), torch.arange(10))
    assert (result["top1"], result["top5"]) == (10.0, 50.0)
    assert result == scored(torch.zeros(10, 10), torch.arange(10), batch=1)


def test_nothing_scored_is_an_error() -> None:
    with pytest.raises(ValueError, match="no image was scored"):
        ClassificationScores().result()


class Switch(nn.Module):
    """Right in evaluation mode, wrong in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dropout(0.5)

    def forward(self, images: Tensor) -> Tensor:
        label = images[:, 0, 0, 0].long() + int(self.training or self.inner.training)
        assert not torch.is_grad_enabled()
        return nn.functional.one_hot(label % 3, 3).float()


def test_validation_is_in_evaluation_mode_and_puts_the_mode_back() -> None:
    """Also after an error, and each sample counts once, the smaller last batch too."""
    targets = torch.tensor([0, 1, 2, 0, 1])
    images = targets.float().view(5, 1, 1, 1).expand(5, 3, 2, 2)
    loader = [EvalBatch(images[i : i + 2], targets[i : i + 2], torch.arange(i, min(i + 2, 5))) for i in (0, 2, 4)]
    for mode in (True, False):
        model = Switch().train(mode)
        result = validate(model, loader, torch.device("cpu"))
        assert (result["images"], result["top1"]) == (5, 100.0)
        assert model.training == model.inner.training == mode
    model.train()
    calls: list[int] = []

    def between() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        validate(model, loader, torch.device("cpu"), between=between)
    assert model.training
    assert model.inner.training
