"""Converted timm models, against the formula in float64 from queries, keys and values that are written out here."""

import json
import pickle
from copy import deepcopy

import pytest
import timm
import torch
from scipy.special import eval_jacobi
from timm.layers import Attention
from timm.models import save_for_hf
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import infvit
from infvit.convert.timm import FusedDoor
from infvit.errors import ConfigError
from infvit.testing.converted_timm import BIASED, MODELS, NAFLEX, build, images, naflex

GAMMA = 0.6


def heads(x, layer):
    return x.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)


def fused_qkv(layer, x, bias=None):
    q, k, v = F.linear(x, layer.qkv.weight, layer.qkv.bias if bias is None else bias).chunk(3, -1)
    return heads(q, layer), heads(k, layer), heads(v, layer)


def normed(norm, x):
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps) if isinstance(norm, nn.LayerNorm) else x


def plain(layer, x, **_):
    q, k, v = fused_qkv(layer, x)
    return normed(layer.q_norm, q), normed(layer.k_norm, k), v, 0.0, None


def rotated(x, rope):
    """Turns channels 2 i and 2 i + 1 as one complex number, all tokens but the class token."""
    sin, cos = rope.chunk(2, -1)
    turned = torch.view_as_complex(x[:, :, 1:].unflatten(-1, (-1, 2)).contiguous())
    turned = turned * torch.complex(cos[..., ::2].double(), sin[..., ::2].double())
    return torch.cat([x[:, :, :1], torch.view_as_real(turned).flatten(-2)], 2)


def without_key_bias(layer, x):
    return fused_qkv(layer, x, torch.cat([layer.q_bias, torch.zeros_like(layer.q_bias), layer.v_bias]))


def eva(layer, x, rope, **_):
    q, k, v = without_key_bias(layer, x)
    return rotated(q, rope), rotated(k, rope), v, 0.0, None


def beit(layer, x, **_):
    bias = layer.relative_position_bias_table[layer.relative_position_index].permute(2, 0, 1)
    return *without_key_bias(layer, x), bias, None


def swin(layer, x, mask=None, **_):
    q, k, v = fused_qkv(layer, x)
    bias = layer.relative_position_bias_table[layer.relative_position_index].permute(2, 0, 1)
    pairs = None if mask is None else (mask > -50).repeat(len(x) // len(mask), 1, 1)[:, None]
    return q, k, v, bias, pairs


READ = {
    **dict.fromkeys(MODELS, plain),
    "eva02_tiny_patch14_224": eva,
    "beit_base_patch16_224": beit,
    "swin_tiny_patch4_window7_224": swin,
}
"""How queries, keys, values, bias and pairs of a layer come about."""


def create(name: str, **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return build(name, **kwargs).double().eval()


def layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "infsa")]


def record(model: nn.Module) -> list[tuple]:
    """Notes what each converted layer is given and returns."""
    calls = []

    def note(layer, args, kwargs, out):
        calls.append((layer, args[0].detach(), {"mask": args[1]} if len(args) > 1 else kwargs, out))

    for layer in layers(model):
        layer.register_forward_hook(note, with_kwargs=True)
    return calls


def pure(q, k, v, bias, pairs, phi=F.relu):
    dim = q.shape[-1]
    scores = phi((q @ k.mT / dim**0.5 + bias) / dim**0.5)
    if pairs is not None:
        scores = scores * pairs
    return GAMMA * scores / (scores.square().sum((-2, -1), keepdim=True).sqrt() + 1e-6) @ v


def linear(q, k, v, bias, pairs):
    assert pairs is None
    assert bias == 0
    q, k = q / q.shape[-1] ** 0.5, k / k.shape[-1] ** 0.5
    norms = q.square().sum(-1, keepdim=True).sqrt()
    pooled = (norms * q).sum(-2, keepdim=True) / (norms.sum(-2, keepdim=True) + 1e-6)
    scores = F.relu(pooled @ k.mT)
    return (GAMMA * scores / (scores.sum(-1, keepdim=True) + 1e-6) @ v).expand_as(q)


def output(layer, x):
    """What follows the attention of all these layers."""
    x = normed(getattr(layer, "norm", None), x.transpose(1, 2).flatten(2))
    return F.linear(x, layer.proj.weight, layer.proj.bias)


FORMULA = {"infsa_pure": pure, "infsa_linear": linear}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mechanism", FORMULA)
def test_each_layer_is_the_formula(name, mechanism):
    model, x = create(name), images(name)
    if mechanism == "infsa_linear" and name in BIASED:
        with pytest.raises(ConfigError, match="infsa_linear does not support what it needs: bias"):
            infvit.convert(model, mechanism)
        return
    converted = infvit.convert(model, mechanism, gamma=GAMMA)
    assert len(layers(converted)) == len(converted.conversion_report.converted) == 2
    calls = record(converted)
    for train, grad in ((True, True), (False, True), (False, False)):
        calls.clear()
        with torch.set_grad_enabled(grad):
            converted.train(train)(x)
        assert len(calls) == 2
        for layer, tokens, kwargs, out in calls:
            q, k, v, bias, pairs = READ[name](layer, tokens, **kwargs)
            assert_close(out, output(layer, FORMULA[mechanism](q, k, v, bias, pairs)))
    if mechanism == "infsa_pure" and name.startswith("swin"):
        assert [kwargs.get("mask") is not None for _, _, kwargs, _ in calls] == [False, True]


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224"])
def test_windows_that_are_no_neighbours_are_left_out_whatever_the_activation(name):
    converted = infvit.convert(create(name), gamma=GAMMA, activation="abs")
    calls = record(converted)
    converted(images(name))
    for layer, tokens, kwargs, out in calls:
        assert_close(out, output(layer, pure(*swin(layer, tokens, **kwargs), phi=torch.abs)))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mechanism", FORMULA)
def test_gradients_reach_gamma_and_every_weight(name, mechanism):
    if mechanism == "infsa_linear" and name in BIASED:
        pytest.skip("refused, as tested above")
    model = infvit.convert(create(name), mechanism, inplace=True).train()
    model(images(name)).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        if key.endswith("infsa.decay.logit"):
            assert parameter.grad.abs() > 0, key


def test_a_model_compiles_without_a_graph_break():
    model = infvit.convert(create("vit_tiny_patch16_224", depth=1).float(), inplace=True)
    x = images("vit_tiny_patch16_224").float()
    torch._dynamo.reset()
    expected, out = model(x), torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert_close(out, expected)
    for a, b in zip(*(torch.autograd.grad(y.sum(), list(model.parameters())) for y in (out, expected)), strict=True):
        assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "swin_tiny_patch4_window7_224"])
def test_layers_compile_without_a_graph_break(name):
    model = infvit.convert(create(name), inplace=True)
    calls = record(model)
    with torch.no_grad():
        model(images(name))
        layer, tokens, kwargs, out = calls[-1]  # in Swin, of shifted windows
        torch._dynamo.reset()
        assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(tokens, **kwargs), out)


def test_no_key_of_the_state_dict_changes_but_gamma_is_added():
    model = create("vit_tiny_patch16_224")
    converted = infvit.convert(model)
    added = [f"blocks.{i}.attn.infsa.decay.logit" for i in range(2)]
    assert sorted(converted.state_dict()) == sorted([*model.state_dict(), *added])
    other = infvit.convert(create("vit_tiny_patch16_224", qkv_bias=True), gamma=0.2)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other.load_state_dict(converted.state_dict())
    x = images("vit_tiny_patch16_224")
    assert_close(other(x), converted(x))
    with pytest.raises(RuntimeError, match=r"infsa\.decay\.logit"):
        model.load_state_dict(converted.state_dict())


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "swin_tiny_patch4_window7_224"])
@pytest.mark.parametrize(
    "copied", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copies_stay_converted(name, copied):
    model, x = create(name), images(name)
    converted = infvit.convert(model)
    copy = copied(converted)
    assert [type(layer) for layer in layers(copy)] == [type(layer) for layer in layers(converted)]
    assert_close(copy(x), converted(x), rtol=0, atol=0)
    assert not torch.allclose(copy(x), model(x))
    assert_close(infvit.revert(copy)(x), model(x), rtol=0, atol=0)
    assert type(copy) is type(model)


@pytest.mark.parametrize("mechanism", ["infsa_pure", "cosformer"])
def test_saved_for_the_hub_a_converted_model_does_not_come_back_as_softmax(mechanism, tmp_path):
    name = "vit_tiny_patch16_224"
    converted = infvit.convert(create(name), mechanism)
    save_for_hf(
        converted, tmp_path, model_args={**MODELS[name], "depth": 2, "num_classes": 5}, safe_serialization="both"
    )
    # With a new head timm is lenient with weights that it does not expect.
    for other in ({}, {"num_classes": 3}, {"num_classes": 0}, {"features_only": True}):
        with pytest.raises(RuntimeError, match=rf"{name}\+{mechanism}"):
            timm.create_model(f"local-dir:{tmp_path}", pretrained=True, **other)
    kept = json.loads((tmp_path / "config.json").read_text())
    again = infvit.convert(timm.create_model(name, **kept["model_args"]).double(), mechanism).eval()
    again.load_state_dict(torch.load(tmp_path / "pytorch_model.bin"))
    assert_close(again(images(name)), converted(images(name)))
    assert again.pretrained_cfg["architecture"] == f"{name}+{mechanism}"
    save_for_hf(infvit.revert(again), tmp_path / "reverted", model_args=kept["model_args"])
    assert type(timm.create_model(f"local-dir:{tmp_path / 'reverted'}", pretrained=True)) is type(again)


@pytest.mark.parametrize("name", ["vit_srelpos_small_patch16_224", "beit_base_patch16_224"])
def test_linear_refuses_a_bias_of_the_whole_model_at_once(name):
    shared = {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True} if name.startswith("beit") else {}
    model = timm.create_model(name, img_size=32, depth=1, embed_dim=48, num_heads=3, **shared)
    with pytest.raises(ConfigError, match="does not support what it needs: bias"):
        infvit.convert(model, "infsa_linear")


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "beit_base_patch16_224"])
@pytest.mark.parametrize("mechanism", ["infsa_pure", "softmax"])
def test_mixing_matrices_of_a_converted_model_are_those_that_mixed(name, mechanism):
    model, x = create(name), images(name)
    converted = infvit.convert(model, mechanism)
    maps = infvit.attention_maps(converted, x, kind="in_degree")
    calls = record(converted)
    matrices = infvit.mixing_matrices(converted, x)
    if mechanism == "softmax":
        assert_close(matrices, infvit.mixing_matrices(model, x))
    for matrix, (layer, tokens, kwargs, out) in zip(matrices, calls, strict=True):
        assert_close(output(layer, matrix @ READ[name](layer, tokens, **kwargs)[2]), out)
    gamma = 0.7 if mechanism == "infsa_pure" else 1.0  # in-degree is of A, before the path decay
    assert_close(maps.flatten(-2) * gamma, matrices.sum(-2)[..., 1:])


def tokens_of(converted: nn.Module) -> tuple[nn.Module, torch.Tensor]:
    layer = layers(converted)[0]
    return layer, torch.randn(2, 6, layer.qkv.in_features).double()


@pytest.mark.parametrize("mechanism", FORMULA)
@pytest.mark.parametrize("additive", [False, True])
def test_padding_leaves_the_real_tokens_as_they_are(mechanism, additive):
    layer, x = tokens_of(infvit.convert(create("vit_tiny_patch16_224"), mechanism))
    real = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    mask = real[:, None, None]
    if additive:
        mask = torch.zeros(mask.shape).double().masked_fill(~mask, float("-inf"))
    out = layer(torch.where(real[..., None], x, float("nan")), attn_mask=mask)
    assert_close(out[0], layer(x[:1])[0])
    assert_close(out[1, :4], layer(x[1:, :4])[0])


@pytest.mark.parametrize("mechanism", FORMULA)
def test_no_token_feels_a_later_one_under_a_causal_mask(mechanism):
    layer, x = tokens_of(infvit.convert(create("vit_tiny_patch16_224"), mechanism))
    changed = x.clone()
    changed[:, 4:] += 1
    before, after = layer(x, is_causal=True), layer(changed, is_causal=True)
    assert_close(before[:, :4], after[:, :4], rtol=0, atol=0)
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_masks_over_pairs():
    layer, x = tokens_of(infvit.convert(create("vit_tiny_patch16_224"), gamma=GAMMA))
    pairs = (torch.rand(6, 6) < 0.7).fill_diagonal_(True)
    assert pairs.triu(1).any()
    bias = torch.randn(2, 1, 6, 6).double()
    q, k, v, *_ = plain(layer, x)
    assert_close(layer(x, attn_mask=pairs), output(layer, pure(q, k, v, 0.0, pairs)))
    additive = bias.masked_fill(~pairs, float("-inf"))
    assert_close(layer(x, attn_mask=additive), output(layer, pure(q, k, v, bias, pairs)))


@pytest.mark.parametrize("mechanism", FORMULA)
def test_naflex_images_are_what_they_are_without_padding(mechanism):
    converted = infvit.convert(create(NAFLEX), mechanism)
    assert_close(naflex(converted, padding=3), naflex(converted))


def test_dropout_of_the_weights_is_kept():
    model = create("vit_tiny_patch16_224", attn_drop_rate=0.5)
    layer, x = tokens_of(infvit.convert(model).train())
    assert layer.infsa.attn_drop.p == 0.5
    assert not torch.allclose(layer(x), layer(x))
    assert_close(layer.eval()(x), layer(x))
    layer.train().attn_drop.p = 0.0  # what the module has now counts
    assert_close(layer(x), layer.eval()(x))


def test_timms_switch_between_its_kernels_changes_nothing_and_is_kept():
    model, x = create("vit_tiny_patch16_224"), images("vit_tiny_patch16_224")
    expected = infvit.convert(model)(x)
    for block in model.blocks:
        block.attn.fused_attn = False
    converted = infvit.convert(model)
    assert_close(converted(x), expected)
    for fused in (True, False):
        converted.blocks[0].attn.fused_attn = fused
        assert_close(converted(x), expected)
        assert infvit.revert(deepcopy(converted)).blocks[0].attn.fused_attn is fused


def test_gate_of_the_output_stays():
    layer = Attention(12, num_heads=2, gated=True).double()
    converted, x = infvit.convert(layer, gamma=GAMMA), torch.randn(2, 5, 12).double()
    q, k, v, *_ = plain(layer, x)
    mixed = (
        pure(q, k, v, 0.0, None).transpose(1, 2).flatten(2) * F.linear(x, layer.gate.weight, layer.gate.bias).sigmoid()
    )
    assert_close(converted(x), F.linear(mixed, layer.proj.weight, layer.proj.bias))


def test_agf_gets_a_projection_of_its_own():
    model = create("vit_tiny_patch16_224")
    converted = infvit.convert(model, "agf", order=2, a=1.0, b=0.5)
    assert converted.conversion_report.converted[0].note.endswith("and a new projection infsa.extra")
    layer, x = tokens_of(converted)
    assert layer.infsa.extra.weight.detach().std() == pytest.approx(0.02, rel=0.1)
    assert not layer.infsa.extra.bias.any()
    nn.init.normal_(layer.infsa.extra.weight)
    nn.init.normal_(layer.infsa.theta)
    q, k, v, *_ = plain(layer, x)
    s = heads(F.linear(x, layer.infsa.extra.weight, layer.infsa.extra.bias), layer).sigmoid().detach().numpy()
    theta = layer.infsa.theta.tanh().detach()
    filtered = 1 + sum(theta[n - 1] * torch.as_tensor(eval_jacobi(n, 1.0, 0.5, s)) for n in (1, 2))
    assert_close(layer(x), output(layer, q.softmax(-1) * filtered @ (k.softmax(-2).mT @ v)))


def test_agf_is_refused_where_the_projection_has_no_place():
    with pytest.raises(ConfigError, match="agf needs a projection of its own"):
        infvit.convert(create("eva02_tiny_patch14_224"), "agf")


def test_what_is_not_known_exactly_is_refused_by_name_and_reason():
    class Mine(Attention):
        pass

    model = create("vit_tiny_patch16_224")
    model.blocks[0].attn.__class__ = Mine
    converted = infvit.convert(model)
    (entry,) = converted.conversion_report.refused
    assert (entry.name, entry.kind) == ("blocks.0.attn", "Mine")
    assert "subclass of timm's attention" in entry.note
    model.blocks[1].attn.scale = 0.5
    with pytest.raises(ConfigError, match=r"(?s)Mine.*scale is 0.5, which timm's fused kernel ignores"):
        infvit.convert(model)
    with pytest.raises(ConfigError, match=r"AttentionLayer.*attention=\.\.\."):
        infvit.convert(timm.create_model("vit_mini"))


def test_a_forward_that_mixes_elsewhere_fails_loudly():
    layer = infvit.convert(Attention(12, num_heads=2))
    layer.watched = (torch.bmm,)
    with pytest.raises(ConfigError, match="Attention of this timm mixes tokens in 0 calls"):
        layer(torch.randn(1, 4, 12))
    assert FusedDoor.watched == (F.scaled_dot_product_attention,)
