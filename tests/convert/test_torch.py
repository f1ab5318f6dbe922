"""nn.MultiheadAttention and torch's transformer layers, against the formula in place of their softmax."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import infvit
from infvit.errors import ConfigError
from infvit.testing.conversion import Formula

MECHANISMS = ("infsa_pure", "infsa_linear")


def attention(**kwargs) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, **{"batch_first": True, **kwargs}).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
def test_self_attention_is_the_formula(name, mode):
    plain, x = attention().train(mode == "train"), torch.randn(2, 5, 8).double()
    converted = infvit.convert(plain, name)
    with Formula(name) as formula:
        expected = plain(x, x, x, need_weights=False)[0]
    assert formula.calls == 1
    with torch.set_grad_enabled(mode != "no_grad"):
        assert_close(converted(x, x, x)[0], expected)
    assert type(plain) is nn.MultiheadAttention


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    return nn.TransformerEncoder(layer, layers)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("padded", [False, True])
def test_encoder_fast_path_does_not_pass_converted_attention_by(name, padded):
    plain, x = encoder(), torch.randn(2, 5, 8).double()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padded else None
    real = slice(None) if padding is None else ~padding
    converted = infvit.convert(plain, name)
    with Formula(name) as formula:
        expected = plain(x, src_key_padding_mask=padding)[real]
    assert formula.calls == 2
    calls = []
    for layer in converted.layers:
        layer.self_attn.infsa.register_forward_hook(lambda *args: calls.append(1))
    for module in (converted, converted.eval()):
        assert_close(module(x, src_key_padding_mask=padding)[real], expected)
    with torch.no_grad():
        assert_close(converted(x, src_key_padding_mask=padding)[real], expected)
    assert len(calls) == 6
    reverted = infvit.revert(converted)
    with torch.no_grad():
        assert_close(
            reverted(x, src_key_padding_mask=padding)[real], plain.eval()(x, src_key_padding_mask=padding)[real]
        )
    assert type(reverted.layers[0].self_attn) is nn.MultiheadAttention


def test_nothing_to_convert_is_an_error_that_names_what_was_seen():
    class ForeignAttention(nn.Module):
        pass

    with pytest.raises(ConfigError, match=r"(?s)MultiheadAttention.*ForeignAttention"):
        infvit.convert(nn.Sequential(nn.Linear(2, 2), ForeignAttention()))
