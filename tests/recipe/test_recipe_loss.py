"""The loss is a sum, equals timm's and torch's, and adds up over micro-batches."""

import pytest
import torch
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch.nn import functional as F

from infvit.recipe import training_loss

LOGITS = torch.randn(12, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float32) * 3
TARGETS = torch.arange(12) % 7
SOFT = torch.softmax(torch.randn(12, 7, generator=torch.Generator().manual_seed(1)), 1)


def test_a_sum_not_a_mean():
    assert training_loss(LOGITS, TARGETS, 0.0).item() == pytest.approx(12 * F.cross_entropy(LOGITS, TARGETS).item())


@pytest.mark.parametrize("smoothing", [0.1, 0.4])
def test_smoothing_is_timms_and_torchs(smoothing: float):
    loss = training_loss(LOGITS, TARGETS, smoothing).item()
    assert loss == pytest.approx(12 * LabelSmoothingCrossEntropy(smoothing)(LOGITS, TARGETS).item(), rel=1e-6)
    assert loss == pytest.approx(12 * F.cross_entropy(LOGITS, TARGETS, label_smoothing=smoothing).item(), rel=1e-6)
    assert loss != pytest.approx(training_loss(LOGITS, TARGETS, 0.0).item(), rel=1e-3)


def test_dense_targets_are_timms_and_not_smoothed_again():
    expected = 12 * SoftTargetCrossEntropy()(LOGITS, SOFT).item()
    for smoothing in (0.0, 0.3):
        assert training_loss(LOGITS, SOFT, smoothing).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("targets", [TARGETS, SOFT], ids=["indices", "dense"])
def test_unequal_micro_batches_add_up(targets: torch.Tensor):
    logits = LOGITS.double().requires_grad_()
    targets = targets.double() if targets.is_floating_point() else targets
    # training_loss computes in float32, so the gradients agree to its rounding
    (whole,) = torch.autograd.grad(training_loss(logits, targets, 0.1), logits)
    parts = [(0, 5), (5, 6), (6, 12)]
    summed = sum(training_loss(logits[a:b], targets[a:b].float() if targets.ndim == 2 else targets[a:b], 0.1)
                 for a, b in parts)  # fmt: skip
    torch.testing.assert_close(torch.autograd.grad(summed, logits)[0], whole, rtol=1e-5, atol=1e-7)


def test_computed_in_float32():
    big = torch.full((2, 3), 60000.0, dtype=torch.float16)
    big[:, 0] = -60000.0
    loss = training_loss(big, torch.zeros(2, dtype=torch.long), 0.0)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(240000.0, rel=1e-3)
