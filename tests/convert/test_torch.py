"""nn.MultiheadAttention and torch's transformer layers, against the formula in place of their softmax."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import infvit
from infvit.errors import ConfigError
from infvit.testing.conversion import Formula

MECHANISMS = ("infsa_pure", "infsa_linear")
TRIANGLE = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


def filled(module: nn.Module, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double()


def attention(**kwargs) -> nn.MultiheadAttention:
    return filled(nn.MultiheadAttention(8, 2, **{"batch_first": True, **kwargs}))


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
@pytest.mark.parametrize("bias", [True, False])
def test_self_attention_is_the_formula(name, mode, bias):
    plain, x = attention(bias=bias).train(mode == "train"), tokens(2, 5, 8)
    converted = infvit.convert(plain, name)
    with Formula(name) as formula:
        expected = plain(x, x, x, need_weights=False)[0]
    assert formula.calls == 1
    with torch.set_grad_enabled(mode != "no_grad"):
        assert_close(converted(x, x, x)[0], expected)
    assert type(plain) is nn.MultiheadAttention


MASKS = {
    "none": {},
    "bool": {"attn_mask": tokens(5, 6) > 0.5},
    "float": {"attn_mask": torch.where(tokens(5, 6) > 0.5, -torch.inf, tokens(5, 6, seed=2))},
    "per head": {"attn_mask": tokens(4, 5, 6) > 0.5},
    "padding": {"key_padding_mask": torch.arange(6) > torch.tensor([[5], [3]])},
    "float padding": {
        "key_padding_mask": torch.where(torch.arange(6) > torch.tensor([[5], [3]]), -torch.inf, 0.3).double()
    },
    "both": {"key_padding_mask": torch.arange(6) > torch.tensor([[5], [3]]), "attn_mask": tokens(5, 6) > 0.5},
}
SHAPES = {
    "plain": {},
    "kdim": {"kdim": 3, "vdim": 4},
    "no bias": {"bias": False, "kdim": 3},
    "added": {"add_bias_kv": True, "add_zero_attn": True},
    "zero": {"add_zero_attn": True},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_cross_attention_takes_every_argument_of_torchs(mask, shape):
    plain = attention(**SHAPES[shape])
    q, k, v = tokens(2, 5, 8), tokens(2, 6, plain.kdim, seed=2), tokens(2, 6, plain.vdim, seed=3)
    pure = infvit.convert(plain)
    for need, average in ((False, True), (True, True), (True, False)):
        weights = {"need_weights": need, "average_attn_weights": average}
        with Formula("infsa_pure", head_dim=4) as formula:
            expected = plain(q, k, v, **weights, **MASKS[mask])
        assert formula.calls == 1
        assert_close(pure(q, k, v, **weights, **MASKS[mask]), expected)
    seq_first = attention(**SHAPES[shape], batch_first=False)
    got, _ = infvit.convert(seq_first)(*(x.transpose(0, 1) for x in (q, k, v)), **MASKS[mask])
    assert_close(got.transpose(0, 1), pure(q, k, v, **MASKS[mask])[0])
    if mask in ("none", "padding"):
        with Formula("infsa_linear"):
            expected = plain(q, k, v, need_weights=False, **MASKS[mask])[0]
        got, weights = infvit.convert(plain, "infsa_linear")(q, k, v, **MASKS[mask])
        assert_close(got, expected)
        assert weights.shape == (2, 5, 6 + len(SHAPES[shape]) * (shape in ("added", "zero")))


@pytest.mark.parametrize("batch_first", [True, False])
def test_unbatched_input(batch_first):
    plain = attention(batch_first=batch_first)
    x, memory, padding = tokens(5, 8), tokens(6, 8, seed=2), torch.arange(6) > 3
    converted = infvit.convert(plain)
    with Formula("infsa_pure", head_dim=4):
        expected = plain(x, memory, memory, key_padding_mask=padding)
    got = converted(x, memory, memory, key_padding_mask=padding)
    assert got[0].shape == (5, 8)
    assert_close(got, expected)


@pytest.mark.parametrize("name", MECHANISMS)
def test_padded_tokens_of_self_attention_are_no_queries_either(name):
    x = tokens(2, 5, 8)
    for added in ({}, {"add_bias_kv": True}, {"add_zero_attn": True}):
        converted = infvit.convert(attention(**added), name)
        got, _ = converted(x, x, x, key_padding_mask=PADDING)
        short = x[1:, :3]
        assert_close(got[1:, :3], converted(short, short, short)[0])
        assert_close(got, converted(x, x.clone(), x, key_padding_mask=PADDING)[0])  # values are the queries' tokens
        floats = torch.zeros(2, 5, dtype=torch.float64).masked_fill(PADDING, -torch.inf)
        assert_close(got, converted(x, x, x, key_padding_mask=floats)[0])


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("added", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize("hint", [True, False])
@pytest.mark.parametrize("mask", [TRIANGLE, TRIANGLE < 0])
def test_a_causal_mask_leaks_nothing_through_the_norm(name, added, hint, mask):
    if name == "infsa_linear" and added:
        return  # pairs, refused: see below
    converted = infvit.convert(attention(**added), name)
    x = tokens(2, 5, 8).requires_grad_()
    call = {"attn_mask": mask, "is_causal": hint}
    out, weights = converted(x, x, x, **call)
    for i in range(5):
        (grad,) = torch.autograd.grad(out[:, i].sum(), x, retain_graph=True)
        assert not grad[:, i + 1 :].any(), f"token {i} feels later ones"
        assert grad[:, : i + 1].any()
        part = x[:, : i + 1]
        short = {"attn_mask": mask[: i + 1, : i + 1], "is_causal": hint}
        assert_close(converted(part, part, part, **short)[0], out[:, : i + 1])
    assert not weights[..., :5].triu(1).any()


def test_what_a_mechanism_cannot_do_is_refused_in_the_call():
    linear, x = infvit.convert(attention(), "infsa_linear"), tokens(2, 5, 8)
    for mask in (tokens(5, 5) > 0.5, tokens(5, 5)):
        with pytest.raises(ConfigError, match="infsa_linear"):
            linear(x, x, x, attn_mask=mask)
    with pytest.raises(ConfigError, match="logits of single pairs"):
        linear(x, x, x, key_padding_mask=tokens(2, 5).abs())
    added = infvit.convert(attention(add_bias_kv=True), "infsa_linear")
    with pytest.raises(ConfigError, match="infsa_linear"):
        added(x, x, x, attn_mask=TRIANGLE, is_causal=True)
    pure = infvit.convert(attention())
    for wrong in ({"attn_mask": TRIANGLE[:3]}, {"attn_mask": TRIANGLE[None]}, {"key_padding_mask": PADDING[:, :4]}):
        with pytest.raises(ConfigError, match="shape"):
            pure(x, x, x, **wrong)
    with pytest.raises(ConfigError, match="shape"):
        pure(x[None], x[None], x[None])
    nested = torch.nested.as_nested_tensor([x[0], x[1, :3]])
    with pytest.raises(ConfigError, match="nested"):
        pure(nested, nested, nested)


def test_linear_takes_masks_that_are_padding_or_causal_in_effect():
    linear, x = infvit.convert(attention(), "infsa_linear"), tokens(2, 5, 8)
    real = (~PADDING)[:, None].expand(-1, 5, -1).repeat_interleave(2, 0)
    expected = linear(x, x.clone(), x.clone(), key_padding_mask=PADDING)[0]
    assert_close(linear(x, x.clone(), x.clone(), attn_mask=~real)[0], expected)


def encoder(layers: int = 2, **kwargs) -> nn.TransformerEncoder:
    kwargs = {"batch_first": True, "dropout": 0.0, **kwargs}
    return filled(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, **kwargs), layers))


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("masks", [{}, {"src_key_padding_mask": PADDING}, {"mask": TRIANGLE}])
def test_encoder_fast_path_does_not_pass_converted_attention_by(name, masks):
    plain, x = encoder(), tokens(2, 5, 8)
    real = ~PADDING if "src_key_padding_mask" in masks else slice(None)
    converted = infvit.convert(plain, name)
    with Formula(name) as formula:
        expected = plain(x, **masks)[real]
    assert formula.calls == 2
    calls = []
    for layer in converted.layers:
        layer.self_attn.infsa.register_forward_hook(lambda *args: calls.append(1))
    for module in (converted, converted.eval()):
        assert_close(module(x, **masks)[real], expected)
    with torch.no_grad():
        assert_close(converted(x, **masks)[real], expected)
        assert len(calls) == 6
        reverted, plain = infvit.revert(converted), plain.eval()
        assert_close(reverted(x, **masks)[real], plain(x, **masks)[real])
    assert type(reverted.layers[0].self_attn) is nn.MultiheadAttention
    assert reverted.use_nested_tensor == plain.use_nested_tensor
    assert set(reverted.state_dict()) == set(plain.state_dict())


@pytest.mark.parametrize("kwargs", [{"norm_first": True}, {"batch_first": False}, {"activation": "gelu"}], ids=str)
def test_part_of_an_encoder(kwargs):
    x, plain = tokens(2, 5, 8), encoder(**kwargs)
    part = infvit.convert(plain, exclude="layers.0").eval()
    middle = plain.layers[0](x)
    with Formula("infsa_pure"):
        expected = plain.layers[1](middle)
    with torch.no_grad():
        assert_close(part(x), expected)
        assert_close(infvit.convert(plain, "softmax").eval()(x), plain.eval()(x))


def decoder(**kwargs) -> nn.TransformerDecoder:
    kwargs = {"batch_first": True, "dropout": 0.0, **kwargs}
    return filled(nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, **kwargs), 2))


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("norm_first", [True, False])
def test_decoder_is_the_formula(name, norm_first):
    plain, x, memory = decoder(norm_first=norm_first), tokens(2, 5, 8), tokens(2, 6, 8, seed=2)
    padding = {"memory_key_padding_mask": torch.arange(6) > torch.tensor([[5], [3]])}
    converted = infvit.convert(plain, name)
    with Formula(name) as formula:
        expected = plain(x, memory, **padding)
    assert formula.calls == 4
    for module in (converted, converted.eval()):
        assert_close(module(x, memory, **padding), expected)
    with torch.no_grad():
        assert_close(converted(x, memory, **padding), expected)
    assert_close(infvit.convert(plain, "softmax")(x, memory, tgt_mask=TRIANGLE), plain(x, memory, tgt_mask=TRIANGLE))
    assert type(infvit.revert(converted).layers[0]) is nn.TransformerDecoderLayer


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("call", [{"tgt_is_causal": True}, {}, {"tgt_is_causal": False}], ids=str)
def test_decoder_is_causal_through_its_cross_attention_too(name, call):
    converted, memory = infvit.convert(decoder(), name), tokens(2, 6, 8, seed=2)
    x = tokens(2, 5, 8).requires_grad_()
    out = converted(x, memory, tgt_mask=TRIANGLE, **call)
    for i in range(5):
        (grad,) = torch.autograd.grad(out[:, i].sum(), x, retain_graph=True)
        assert not grad[:, i + 1 :].any(), f"token {i} feels later ones"
    assert grad[:, :4].any()


@pytest.mark.parametrize("name", MECHANISMS)
def test_decoder_with_padded_targets(name):
    converted, x, memory = infvit.convert(decoder(), name), tokens(2, 5, 8), tokens(2, 6, 8, seed=2)
    got = converted(x, memory, tgt_key_padding_mask=PADDING)
    assert_close(got[1:, :3], converted(x[1:, :3], memory[1:]))
    assert_close(got[:1], converted(x[:1], memory[:1]))


def test_nn_transformer_and_a_block_of_ones_own():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            return x + self.attn(y, y, y)[0]

    block, x = filled(Block()), tokens(2, 5, 8)
    with Formula("infsa_pure", head_dim=4):
        expected = block(x)
    assert_close(infvit.convert(block).eval()(x), expected)
    whole = filled(nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True))
    with Formula("infsa_pure") as formula:
        expected = whole(x, x)
    assert formula.calls == 3
    assert_close(infvit.convert(whole).eval()(x, x), expected)


def test_dropout_of_the_weights_acts_in_training_only():
    converted, x = infvit.convert(attention(dropout=0.5)), tokens(2, 5, 8)
    assert not torch.equal(converted(x, x, x)[0], converted(x, x, x)[0])
    assert_close(converted.eval()(x, x, x), infvit.convert(attention())(x, x, x))


def test_a_subclass_with_its_own_forward_is_refused_by_name():
    class Odd(nn.MultiheadAttention):
        pass

    with pytest.raises(ConfigError, match=r"Odd.*subclass"):
        infvit.convert(nn.Sequential(Odd(8, 2)))


def test_nan_in_a_mask_is_not_an_exclusion():
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(1, 5, 8)
    mask = torch.zeros(5, 5)
    mask[1, 2] = float("nan")
    out, _ = infvit.convert(attention, "infsa_pure")(x, x, x, attn_mask=mask, need_weights=False)
    assert out.isnan().any()
    with pytest.raises(ConfigError, match="adds one that is not 0"):
        infvit.convert(attention, "infsa_linear")(x, x, x, attn_mask=mask)
