"""What a conversion leaves as it was."""

import copy
import io
import pickle
import warnings

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.testing import assert_close

import infvit
from infvit.attention import get_mechanism, list_mechanisms
from infvit.convert.torch import InfSAMultiheadAttention
from infvit.errors import ConfigError

MECHANISMS = ("infsa_pure", "infsa_linear")
X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def encoder(**kwargs) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    kwargs = {"dropout": 0.0, "batch_first": True, **kwargs}
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, **kwargs), 2)


def test_weights_names_modes_gradients_and_hooks():
    model, calls = encoder(), []
    model.layers[0].eval()
    model.layers[1].self_attn.in_proj_weight.requires_grad_(False)
    model.layers[0].self_attn.register_forward_hook(lambda *args: calls.append("hook"))
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    converted = infvit.convert(model, inplace=True)
    assert converted is model
    after = model.state_dict()
    assert set(after) - set(before) == {f"layers.{i}.self_attn.infsa.decay.logit" for i in (0, 1)}
    assert_close({name: after[name] for name in before}, before, rtol=0, atol=0)
    assert not model.layers[0].self_attn.infsa.training
    assert model.layers[1].self_attn.infsa.training
    assert not model.layers[1].self_attn.in_proj_weight.requires_grad
    model(X)
    assert calls == ["hook"]
    assert infvit.revert(model) is model
    assert set(model.state_dict()) == set(before)
    assert not hasattr(model, "conversion_report")


def test_without_inplace_the_model_that_was_given_is_untouched():
    model = encoder()
    expected = model(X)
    converted = infvit.convert(model)
    assert not any(isinstance(module, InfSAMultiheadAttention) for module in model.modules())
    assert model.use_nested_tensor
    assert_close(model(X), expected, rtol=0, atol=0)
    assert converted.conversion_report.copied


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype(dtype):
    converted = infvit.convert(encoder().to(dtype))
    assert {p.dtype for p in converted.parameters()} == {dtype}
    assert converted(X.to(dtype)).dtype == dtype


def test_meta_device():
    with torch.device("meta"):
        model = encoder()
    converted = infvit.convert(model)
    assert {p.device.type for p in converted.parameters()} == {"meta"}
    assert converted(X.to("meta"), src_key_padding_mask=torch.zeros(2, 5, device="meta", dtype=torch.bool)).is_meta
    ready = converted.to_empty(device="cpu")
    ready.load_state_dict(infvit.convert(encoder()).state_dict())
    assert_close(ready(X), infvit.convert(encoder())(X))


def test_converting_again_changes_nothing_unless_the_arguments_do():
    converted = infvit.convert(encoder())
    with torch.no_grad():
        converted.layers[0].self_attn.infsa.decay.logit.fill_(2.0)  # learned
    for same in ({}, {"gamma": 0.7}, {"activation": "relu", "gamma_trainable": True}, {"rho_init": np.float64(0.7)}):
        again = infvit.convert(converted, **same)
        assert_close(again.state_dict(), converted.state_dict(), rtol=0, atol=0)
        assert not again.conversion_report.converted
    other = infvit.convert(converted, gamma=0.3, gamma_trainable=False)
    assert len(other.conversion_report.converted) == 2
    assert other.layers[0].self_attn.infsa.decay().item() == pytest.approx(0.3)
    assert not other.layers[0].self_attn.infsa.decay.logit.requires_grad
    assert infvit.convert(converted, gamma=np.float32(0.25)).layers[0].self_attn.infsa.decay.initial == 0.25
    linear = infvit.convert(converted, "infsa_linear")
    assert linear.layers[0].self_attn.infsa.name == "infsa_linear"


def test_a_module_in_two_places_is_converted_once_and_stays_one():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    converted = infvit.convert(nn.ModuleList([attention, attention]))
    assert converted[0] is converted[1]
    assert len(converted.conversion_report.converted) == 1
    ready = infvit.convert(attention, inplace=True)  # the model is the attention itself
    assert ready is attention
    assert ready(X, X, X)[0].shape == X.shape


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save", "state_dict"])
def test_round_trips_come_back_converted(way):
    converted = infvit.convert(encoder(), gamma=0.4).eval()
    if way == "deepcopy":
        back = copy.deepcopy(converted)
    elif way == "pickle":
        back = pickle.loads(pickle.dumps(converted))
    elif way == "torch.save":
        file = io.BytesIO()
        torch.save(converted, file)
        file.seek(0)
        back = torch.load(file, weights_only=False)
    else:
        back = infvit.convert(encoder()).eval()
        back.load_state_dict(converted.state_dict())
    with torch.no_grad():
        assert_close(back(X), converted(X), rtol=0, atol=0)
    assert str(back.conversion_report)
    assert set(infvit.revert(back).state_dict()) == set(encoder().state_dict())


OTHERS = [name for name in list_mechanisms() if name not in ("agf", "singularformer", "softmax", "softmax_unfused")]


@pytest.mark.parametrize("name", OTHERS)
def test_a_converted_state_dict_does_not_load_into_an_unconverted_model(name):
    args = {} if get_mechanism(name).capabilities.any_length else {"num_tokens": 5}
    converted = infvit.convert(encoder(), name, **args)
    assert converted(X).shape == X.shape
    with pytest.raises(RuntimeError, match=r"Unexpected key.*infsa"):
        encoder().load_state_dict(converted.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*infsa"):
        converted.load_state_dict(encoder().state_dict())


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_parameter_gets_a_gradient(name):
    for model in (encoder(), nn.Transformer(8, 2, 1, 1, 16, batch_first=True)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            converted = infvit.convert(model, name)
        out = converted(X) if isinstance(model, nn.TransformerEncoder) else converted(X, X)
        out.square().sum().backward()
        for parameter_name, parameter in converted.named_parameters():
            assert parameter.grad is not None, parameter_name
            if "bias" not in parameter_name:
                assert parameter.grad.any(), parameter_name


@pytest.mark.parametrize("name", MECHANISMS)
def test_autocast(name):
    converted = infvit.convert(encoder(), name)
    with torch.autocast("cpu", torch.bfloat16):
        out = converted(X)
    assert_close(out.float(), converted(X), rtol=0, atol=0.1)


@pytest.mark.parametrize("name", MECHANISMS)
def test_compiles_to_one_graph(name):
    converted = infvit.convert(encoder().layers[0], name).eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    triangle = nn.Transformer.generate_square_subsequent_mask(5)
    torch._dynamo.reset()
    compiled = torch.compile(converted, fullgraph=True, backend="eager")
    for call in ({}, {"src_key_padding_mask": padding}, {"src_mask": triangle, "is_causal": True}):
        assert_close(compiled(X, **call), converted(X, **call))


def test_a_compiled_graph_refuses_a_bias_that_linear_cannot_add():
    attention = infvit.convert(nn.MultiheadAttention(8, 2, batch_first=True), "infsa_linear")
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    padding = torch.zeros(2, 5)
    assert_close(compiled(X, X, X, key_padding_mask=padding)[0], attention(X, X, X, key_padding_mask=padding)[0])
    with pytest.raises(RuntimeError, match="bias"):
        compiled(X, X, X, key_padding_mask=padding + 0.5)


def test_wrapped_models_and_other_things_are_refused():
    for wrong, match in {
        torch.compile(encoder(), backend="eager"): "OptimizedModule",
        nn.DataParallel(encoder()): "DataParallel",
        3: "torch.nn.Module",
    }.items():
        with pytest.raises(ConfigError, match=match):
            infvit.convert(wrong)
    with pytest.raises(ConfigError, match="nothing in"):
        infvit.revert(encoder())
    for kwargs, match in (
        ({"mechanism": "infsa_pur"}, "Did you mean"),
        ({"slope": 1}, "no 'slope'"),
        ({"mechanism": "softmax", "gamma": 0.5}, "no 'gamma'. It takes none"),
        ({"mechanism": "agf"}, "projection of its own"),
        ({"mechanism": "linformer"}, "num_tokens"),
        ({"gamma": 1.5}, "strictly between"),
        ({"include": "no_such_name"}, "not asked for"),
        ({"target_types": nn.Linear}, "not asked for"),
    ):
        with pytest.raises(ConfigError, match=match):
            infvit.convert(encoder(), **kwargs)


def test_infvits_own_layers_and_unknown_attention_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"AttentionLayer.*attention="):
        infvit.convert(timm.create_model("vit_mini", img_size=16, patch_size=8))

    class DeformableAttention(nn.Module):
        pass

    model = nn.ModuleDict({"encoder": encoder(), "cross": DeformableAttention()})
    report = infvit.convert(model).conversion_report
    assert [entry.name for entry in report.refused] == ["cross"]
    assert "DeformableAttention" in report.refused[0].note
    assert "2 converted, 0 kept, 1 refused" in str(report)


def test_linear_says_once_what_it_cannot_do():
    class TinyForCausalLM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = encoder()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = infvit.convert(TinyForCausalLM(), "infsa_linear")
        infvit.convert(encoder(), "infsa_linear")
        infvit.convert(TinyForCausalLM(), "infsa_pure")
        infvit.convert(timm.create_model("test_vit", img_size=32), "infsa_linear")
    assert len(caught) == 1
    assert "0.43 and 0.36" in str(caught[0].message)
    assert str(caught[0].message) in str(model.conversion_report)
    with pytest.warns(UserWarning, match=r"0\.43"):
        infvit.convert(timm.create_model("test_vit", img_size=32, features_only=True), "infsa_linear")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gamma": 1.5}, "gamma=1.5"),
        ({"gamma": "0.5"}, "gamma='0.5'"),
        ({"activation": "swish"}, "unknown activation 'swish'"),
        ({"mechanism": "linformer", "num_tokens": 0}, "num_tokens=0"),
        ({"mechanism": "cosformer", "eps": -1.0}, "eps=-1.0"),
        ({"mechanism": InfSAMultiheadAttention}, "mechanism must be the name"),
        ({"target_types": "Attention"}, "target_types takes classes"),
        ({"target_types": [nn.Linear, 3]}, "target_types takes classes"),
        ({"include": 3}, "include takes"),
        ({"exclude": ["a", 3]}, "exclude takes"),
        ({"include_patterns": ["["]}, r"include_patterns: '\[' is no regular expression"),
        ({"inplace": "no"}, "inplace='no'"),
        ({"gamma_trainable": "no"}, "gamma_trainable='no'"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named_first(wrong, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        infvit.convert(encoder(), **wrong)


def test_a_parametrized_module_is_neither_converted_nor_reverted():
    for module in (nn.MultiheadAttention(8, 2), infvit.convert(nn.MultiheadAttention(8, 2))):
        register_parametrization(module, "in_proj_weight", nn.Identity())
        with pytest.raises(ConfigError, match="remove_parametrizations"):
            infvit.convert(module)
    with pytest.raises(ConfigError, match="cannot be reverted: it is parametrized"):
        infvit.revert(module)
    remove_parametrizations(module, "in_proj_weight")
    assert type(infvit.revert(module)) is nn.MultiheadAttention


def test_dropout_follows_the_module():
    module = infvit.convert(nn.MultiheadAttention(8, 2, 0.5, batch_first=True))
    assert not torch.equal(module(X, X, X)[0], module(X, X, X)[0])
    module.dropout = 0.0
    assert_close(module(X, X, X), module.eval()(X, X, X), rtol=0, atol=0)
    module.train().dropout = 0.9
    assert not torch.equal(module(X, X, X)[0], module(X, X, X)[0])
    with pytest.raises(ConfigError, match="no weights between pairs"):
        infvit.convert(nn.MultiheadAttention(8, 2, 0.5, batch_first=True), "efficient")
    factored = infvit.convert(nn.MultiheadAttention(8, 2, batch_first=True), "efficient")
    factored.dropout = 0.5
    with pytest.raises(ConfigError, match="no weights between pairs"):
        factored(X, X, X)
