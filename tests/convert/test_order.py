"""Masks that keep queries from later keys keep them from later tokens altogether, also through the norm of Pure."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import infvit
from infvit.attention.pure import last_rows
from infvit.errors import ConfigError

X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ROW, COL = torch.arange(6)[:, None], torch.arange(6)
HIDDEN = {
    "causal": COL > ROW,
    "blocks": COL // 2 > ROW // 2,
    "prefix": (COL > ROW) & (COL > 2),
    "window": (COL > ROW) | (COL < ROW - 1),
    "padded on the right": (COL > ROW) | (ROW > 3) | (COL > 3),
    "padded on the left": ((COL > ROW) | (ROW < 2) | (COL < 2)),
    "last queries": (COL > ROW)[3:],
    "blocks of the last queries": (COL // 2 > ROW // 2)[3:],
}


def attention(**kwargs) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return infvit.convert(nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64, **kwargs))


def added_to_logits(hidden: torch.Tensor, value: float = -torch.inf) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=X.dtype).masked_fill(hidden, value)


def expected_rows(hidden: torch.Tensor) -> list[int]:
    """For each query that sees something: the last one that sees nothing behind what it sees."""
    ends = [max((j for j, out in enumerate(row) if not out), default=-1) for row in hidden.tolist()]
    return [max((i for i, end in enumerate(ends) if 0 <= end <= this), default=0) for this in ends]


@pytest.mark.parametrize("added", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("name", HIDDEN)
def test_a_query_feels_nothing_behind_its_last_key(name, added):
    hidden, module = HIDDEN[name], attention(**added)
    x = X.clone().requires_grad_()
    for mask in (hidden, hidden.repeat(4, 1, 1), added_to_logits(hidden)):
        query = x if len(hidden) == 6 else x[:, 3:]
        out, _ = module(query, x, x, attn_mask=mask)
        for i, row in enumerate(hidden):
            (grad,) = torch.autograd.grad(out[:, i].sum(), x, retain_graph=True)
            seen = (~row).nonzero()
            last = max(int(seen.max()) if len(seen) else 0, i + 6 - len(hidden))
            assert not grad[:, last + 1 :].any(), f"query {i} feels tokens behind {last}"
            if len(seen) > 0:
                assert grad[:, : last + 1].any()


@pytest.mark.parametrize("name", HIDDEN)
def test_the_norm_runs_over_rows_that_see_no_later_key(name):
    hidden, module = HIDDEN[name], attention()
    query = X if len(hidden) == 6 else X[:, 3:]
    _, got = module(query, X, X, attn_mask=hidden, average_attn_weights=False)
    weights, biases = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
    q, k = (
        (x @ w.T + b).unflatten(-1, (2, 4)).transpose(1, 2)
        for x, w, b in zip((query, X), weights[:2], biases[:2], strict=True)
    )
    scores = (q @ k.mT / 4).relu().masked_fill(hidden, 0)
    for i, last in enumerate(expected_rows(hidden)):
        norm = scores[:, :, : last + 1].square().sum((-2, -1), keepdim=True).sqrt()
        assert_close(got[:, :, i], 0.7 * scores[:, :, i] / (norm[..., 0] + 1e-6))


def test_masks_in_no_order_keep_the_norm_of_the_whole_matrix():
    blocks = ROW // 2 == COL // 2  # symmetric
    permuted = ~HIDDEN["causal"][[0, 2, 1, 3, 4, 5]]
    for allowed in (blocks, ROW == COL, COL >= ROW, (ROW < 4) & (COL < 4), permuted, (COL < 4).expand(6, 6)):
        assert last_rows(allowed).tolist() == [5] * 6
    both = torch.stack([blocks, ~HIDDEN["blocks"]])
    assert last_rows(both).tolist() == [[5] * 6, [1, 1, 3, 3, 5, 5]]  # each sample by itself


def test_a_graph_takes_masks_in_order_and_in_none():
    module = attention()
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    for hidden in (HIDDEN["blocks"], ROW // 2 != COL // 2):
        assert_close(compiled(X, X, X, attn_mask=hidden)[0], module(X, X, X, attn_mask=hidden)[0])


@pytest.mark.parametrize("value", [-100.0, -9000.0])
def test_a_causal_mask_of_finite_numbers_is_refused_and_other_biases_are_not(value):
    module = attention()
    causal = added_to_logits(HIDDEN["causal"], value)
    with pytest.raises(ConfigError, match="mask with -inf"):
        module(X, X, X, attn_mask=causal)
    for bias in (
        causal + causal.T,
        causal / 1000,
        causal.masked_fill(HIDDEN["causal"], -1e4),
        -200.0 * (ROW - COL).abs(),
    ):
        assert module(X, X, X, attn_mask=bias.double())[0].isfinite().all()


def test_cross_attention_of_a_decoder_under_a_mask_of_blocks():
    torch.manual_seed(0)
    layer = infvit.convert(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True, dtype=torch.float64))
    x = X.clone().requires_grad_()
    out = layer(x, X[:, :5], tgt_mask=HIDDEN["blocks"])
    (grad,) = torch.autograd.grad(out[:, 3].sum(), x)
    assert grad[:, :4].any()
    assert not grad[:, 4:].any()


def test_cross_attention_of_a_subclass_of_torchs_decoder_layer_is_refused_by_name():
    class Mine(nn.TransformerDecoderLayer):
        pass

    report = infvit.convert(nn.ModuleList([Mine(8, 2, 16)])).conversion_report
    assert [entry.name for entry in report.converted] == ["0.self_attn"]
    assert [entry.name for entry in report.refused] == ["0.multihead_attn"]
    assert "Mine" in report.refused[0].note
