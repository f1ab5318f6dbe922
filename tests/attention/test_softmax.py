"""The softmax baseline: fused and unfused paths, empty rows, token maps."""

import pytest
import timm.layers
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from infvit.attention import Mask, SoftmaxAttention
from infvit.testing.cases import EXACT, TOKENS, build, declared_masks, gradients, inputs


@pytest.fixture
def both():
    fused, plain = build("softmax", {}), build("softmax", {})
    fused.fused, plain.fused = True, False
    return fused, plain


def test_fused_follows_timms_switch():
    before = timm.layers.use_fused_attn()
    try:
        for level, expected in ((True, True), (False, False)):
            timm.layers.set_fused_attn(level)
            assert SoftmaxAttention(2, 4).fused is expected
    finally:
        timm.layers.set_fused_attn(before)


def test_fused_and_plain_path_are_one_function(both):
    weight = torch.randn(2, 2, TOKENS, 4).double()
    for mask in declared_masks(both[0]):
        for a, b in zip(*(gradients(core, inputs(), mask, weight) for core in both), strict=True):
            assert_close(a, b, **EXACT)


def test_fused_path_calls_the_fused_kernel(both, monkeypatch):
    calls = []
    kernel = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(k) or kernel(*a, **k))
    for tokens in (TOKENS, 65):
        both[0](*inputs(tokens))
        both[1](*inputs(tokens))
    assert len(calls) == 2
    assert calls[1].get("attn_mask") is None  # a mask of all pairs would cost memory


@pytest.mark.parametrize("tokens", [*range(1, 18), 65])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fused_path_shows_nan_at_every_length(both, tokens, dtype):
    q, k, v = inputs(tokens, dtype=dtype)
    q[0, 0, 0, 0] = float("nan")
    for causal in (False, True):
        out = both[0](q, k, v, Mask(causal=causal))
        assert out[0, 0, 0].isnan().all()
        assert out.isnan().sum() == out[0, 0, 0].numel()


def test_queries_that_see_no_key_get_zero_and_finite_gradients(both):
    pairs = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    for core in both:
        with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either
            results = gradients(core, inputs(), Mask(pairs=pairs), torch.ones(2, 2, TOKENS, 4).double())
        assert not any(result.any() for result in results)


def test_token_maps():
    q, k, _ = inputs()
    core = build("softmax", {})
    weights = (q @ k.mT / 2).softmax(-1)
    assert_close(core.token_map(q, k), weights[:, :, 0], **EXACT)
    assert_close(core.token_map(q, k, kind="class_token"), weights[:, :, 0], **EXACT)
    assert_close(core.token_map(q, k, kind="in_degree"), weights.sum(-2), **EXACT)
