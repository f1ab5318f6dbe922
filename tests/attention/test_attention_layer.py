"""The layer around a mechanism: absorbed projections, masks, options, and timm's own layer as judge."""

from itertools import product

import pytest
import timm.layers
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from infvit.attention import AttentionLayer, get_mechanism, list_mechanisms
from infvit.attention.layer import read_mask
from infvit.errors import ConfigError
from infvit.testing.cases import EXACT, awake, with_tokens

DIM, HEADS, TOKENS = 12, 3, 7
REAL = torch.tensor([[True, False, True, True, True, False, False], [True] * 7, [False] * 7])
PADDING = REAL[:, None, None]
PADDED = [name for name in list_mechanisms() if get_mechanism(name).capabilities.padding]
# Do not feel a shift of all keys.
NO_SHIFT = {"softmax", "softmax_unfused", "efficient", "nystromformer", "agf", "singularformer"}


def make(mechanism="infsa_linear", dtype=torch.float64, **kwargs):
    """A layer whose biases are not zero; equal for equal arguments."""
    torch.manual_seed(0)
    args = with_tokens(get_mechanism(mechanism), kwargs.pop("mechanism_args", {}), TOKENS)
    kwargs = {"qkv_bias": True, **kwargs}
    layer = AttentionLayer(DIM, HEADS, mechanism=mechanism, mechanism_args=args, dtype=dtype, **kwargs)
    awake(layer.core)
    return layer


@pytest.fixture
def x():
    return torch.randn(3, TOKENS, DIM, dtype=torch.float64)


@pytest.fixture
def core_calls():
    """Counts how often a layer's core mixes projected tokens."""

    def watch(layer):
        calls = []
        layer.core.register_forward_hook(lambda *_: calls.append(1))
        return calls

    return watch


def results(layer, x, *mask):
    """Output and the gradients of the input and every parameter."""
    x = x.clone().requires_grad_()
    out = layer(x, *mask)
    weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out).sin() / out.shape[1]
    return [out, *torch.autograd.grad((out * weight).sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("activation", ["relu", "gelu", "abs"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_absorbed_equals_plain_form(x, core_calls, training, masked, activation):
    for tie_key, qkv_bias, double, per_head, fused in product([True, False], repeat=5):
        kwargs = {"tie_key": tie_key, "qkv_bias": qkv_bias, "double_proj": double, "scale_norm": double}
        kwargs["mechanism_args"] = {"activation": activation, "gamma_per_head": per_head}
        kwargs["norm_layer"] = nn.LayerNorm
        absorbed, plain = make(**kwargs).train(training), make(**kwargs).train(training)
        absorbed.core.fused = fused
        plain.core.absorbs = lambda mask: False
        calls = core_calls(absorbed), core_calls(plain)
        mask = (PADDING,) if masked else ()
        for a, b in zip(results(absorbed, x, *mask), results(plain, x, *mask), strict=True):
            assert_close(a, b, **EXACT)
        assert [len(c) for c in calls] == [0, 1]


def test_absorbed_with_attention_dropout_in_evaluation_only(x, core_calls):
    layer = make(attn_drop=0.5)
    calls = core_calls(layer)
    layer.eval()(x)
    assert not calls
    assert not torch.allclose(layer.train()(x), layer(x))
    assert len(calls) == 2


@pytest.mark.parametrize("kwargs", [{"qk_norm": True, "norm_layer": nn.LayerNorm}, {}], ids=["qk_norm", "causal"])
def test_plain_form_where_absorbing_is_not_valid(x, core_calls, kwargs):
    layer = make(**kwargs)
    calls = core_calls(layer)
    layer(x, is_causal=not kwargs)
    assert len(calls) == 1


def test_qk_norm_normalises_queries_and_keys_separately(x):
    layer = make("softmax", qk_norm=True, norm_layer=nn.LayerNorm)
    with torch.no_grad():
        layer.k_norm.weight.mul_(3)
    q, k, _ = layer.project(x)
    raw_q, raw_k, _ = layer.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    assert_close(q, nn.functional.layer_norm(raw_q, (DIM // HEADS,)), **EXACT)
    assert_close(k, 3 * nn.functional.layer_norm(raw_k, (DIM // HEADS,)), **EXACT)


@pytest.mark.parametrize(("tie_key", "fused"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("factor", [1, 100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_absorbed_at_4096_tokens_in_half_precision(dtype, factor, tie_key, fused):
    x = (factor * torch.randn(1, 4096, DIM)).to(dtype)
    half = make(dtype=dtype, tie_key=tie_key)
    half.core.fused = fused
    exact = make(tie_key=tie_key)
    exact.load_state_dict(half.state_dict())
    (out, *grads), (expected, *_) = results(half, x), results(exact, x.double())
    assert out.dtype == dtype
    assert_close(out.double(), expected, rtol=0, atol=2e-2 * expected.abs().max().item())
    assert all(g.isfinite().all() for g in grads)


def test_absorbed_projects_queries_only(x):
    """What makes it fast: of the projections, only the query's is applied to every token."""
    layer = make(tie_key=False)
    with FlopCounterMode(display=False) as products:
        layer(torch.randn(1, 500, DIM, dtype=torch.float64))
    one_projection = 2 * 500 * DIM * DIM
    of_heads = 2 * 500 * DIM * (1 + 2 * HEADS)  # pooled query, scores against H vectors, H weighted sums of tokens
    assert products.get_total_flops() < one_projection + of_heads + 10 * 2 * DIM * DIM


@pytest.mark.parametrize("tie_key", [True, False])
@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("fused", [True, False])
def test_padded_tokens_do_not_exist(name, tie_key, fused, x):
    layer = make(name, tie_key=tie_key)
    layer.core.fused = fused
    garbage = torch.where(REAL[..., None], x, float("nan"))
    out, dx, *grads = results(layer, garbage, PADDING)
    assert not out[~REAL].any()
    assert not dx[~REAL].any()
    assert all(g.isfinite().all() for g in grads)
    if layer.core.capabilities.any_length:
        assert_close(out[0, REAL[0]], layer(x[:1, REAL[0]])[0], **EXACT)
    assert_close(out[1], layer(x[1:2])[0], **EXACT)


@pytest.mark.parametrize("name", ["infsa_pure", "softmax"])
def test_pair_masks_of_every_shape(name, x):
    layer = make(name)
    pairs = torch.rand(3, HEADS, TOKENS, TOKENS) > 0.4
    shared = pairs[0, 0]
    expected = layer(x, shared.expand(3, HEADS, -1, -1))
    assert_close(layer(x, shared), expected, **EXACT)
    assert_close(layer(x, shared[None, None]), expected, **EXACT)
    assert_close(layer(x, shared.expand(3, 1, -1, -1)), expected, **EXACT)
    assert not torch.allclose(layer(x, pairs), expected)
    assert not torch.allclose(expected, layer(x))


def test_linear_refuses_pair_masks(x):
    with pytest.raises(ValueError, match="query-key pairs"):
        make()(x, torch.ones(TOKENS, TOKENS, dtype=torch.bool))


@pytest.mark.parametrize("name", list_mechanisms())
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(TOKENS, TOKENS), "boolean"),
        (torch.zeros(3, 1, 1, TOKENS), "boolean"),
        (torch.ones(3, TOKENS, dtype=torch.bool), r"\(3, 7\)"),
        (torch.ones(1, 1, 1, TOKENS, dtype=torch.bool), "for 3 x 7 tokens"),
        (torch.ones(3, 1, TOKENS, 1, dtype=torch.bool), "for 3 x 7 tokens"),
        (torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool), "for 3 x 7 tokens"),
        (torch.ones(3, 2, TOKENS, TOKENS, dtype=torch.bool), "for 3 x 7 tokens"),
        (torch.ones(TOKENS + 1, TOKENS + 1, dtype=torch.bool), "for 3 x 7 tokens"),
    ],
)
def test_masks_without_a_meaning_are_refused(name, mask, message, x):
    with pytest.raises(ValueError, match=message):
        make(name)(x, mask)


def test_padding_mask_marks_keys_and_queries(x):
    mask = read_mask(x, PADDING, True, HEADS)
    assert mask.keys.equal(REAL)
    assert mask.queries.equal(REAL)
    assert mask.causal
    assert mask.pairs is None


def test_proj_drop_is_independent_per_token(x):
    out = make(proj_drop=0.5).train()(x)
    dropped = out == 0
    assert 0.3 < dropped.double().mean() < 0.7
    assert not (dropped == dropped[:, :1]).all()


@pytest.mark.parametrize("name", list_mechanisms())
@pytest.mark.parametrize("proj_bias", [True, False])
def test_fold_projection_is_the_same_function(name, proj_bias, x):
    layer = make(name, double_proj=True, proj_bias=proj_bias)
    before, count = layer(x), sum(p.numel() for p in layer.parameters())
    layer.fold_projection()
    assert_close(layer(x), before, **EXACT)
    assert count - sum(p.numel() for p in layer.parameters()) == DIM * DIM + DIM * proj_bias
    folded = {k: v.clone() for k, v in layer.state_dict().items()}
    layer.fold_projection()  # nothing left to do
    assert all(torch.equal(v, folded[k]) for k, v in layer.state_dict().items())


@pytest.mark.parametrize("name", list_mechanisms())
@pytest.mark.parametrize("tie_key", [True, False])
def test_every_parameter_gets_a_gradient(name, tie_key, x):
    layer = make(name, tie_key=tie_key, double_proj=True, qk_norm=True, scale_norm=True, norm_layer=nn.LayerNorm)
    layer(x).square().sum().backward()
    for parameter_name, parameter in layer.named_parameters():
        if parameter_name != "k_norm.bias" or name not in NO_SHIFT:
            assert parameter.grad.abs().max() > 1e-9, parameter_name


@pytest.mark.parametrize("name", list_mechanisms())
def test_ties_key_as_the_mechanism_says_unless_told(name):
    default = make(name)
    assert default.tie_key == (name == "infsa_linear")
    for tie_key in (True, False):
        layer = make(name, tie_key=tie_key)
        assert layer.qkv.weight.shape == (DIM * (2 if tie_key else 3), DIM)
        q, k, _ = layer.project(torch.randn(1, 4, DIM).double())
        assert torch.equal(q[..., : layer.head_dim], k) == tie_key


def test_one_number_of_tokens_must_be_given():
    with pytest.raises(ConfigError, match="'linformer' is built for one number of tokens: give num_tokens"):
        AttentionLayer(DIM, HEADS, mechanism="linformer")


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", list_mechanisms())
def test_torchscript_copy_equals_eager(name, x):
    layer = make(name).eval()
    scripted = torch.jit.script(layer)
    for tokens in (TOKENS, 20, 1) if layer.core.capabilities.any_length else (TOKENS,):
        other = torch.randn(2, tokens, DIM).double()
        assert_close(scripted(other), layer(other), **EXACT)
    with pytest.raises(torch.jit.Error, match="masks are not available"):
        scripted(x, PADDING)
    with pytest.raises(torch.jit.Error, match="causal masks are not available"):
        scripted(x, None, True)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("norm", [False, True])
def test_softmax_layer_equals_timms_attention(x, fused, norm):
    kwargs = {"num_heads": HEADS, "qkv_bias": True, "qk_norm": norm, "scale_norm": norm, "norm_layer": nn.LayerNorm}
    theirs = timm.layers.Attention(DIM, **kwargs, dtype=torch.float64)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = AttentionLayer(DIM, **kwargs, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())  # strict: the same names
    theirs.fused_attn = ours.core.fused = fused
    pairs = torch.rand(3, 1, TOKENS, TOKENS) > 0.4
    pairs[..., 0] = True  # timm gives NaN where a query sees no key
    for a, b in zip(results(ours, x), results(theirs, x), strict=True):
        assert_close(a, b, **EXACT)
    assert_close(ours(x, is_causal=True), theirs(x, is_causal=True), **EXACT)
    assert_close(ours(x, pairs), theirs(x, pairs if fused else torch.where(pairs, 0.0, float("-inf"))), **EXACT)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"not divisible by num_heads=5; allowed: \[1, 2, 3, 4, 6, 12\]"):
        AttentionLayer(12, 5)
    with pytest.raises(ValueError, match="Did you mean 'infsa_linear'"):
        AttentionLayer(12, 3, mechanism="infsa_liner")
    with pytest.raises(ValueError, match=r"no 'gama'\. Did you mean 'gamma'"):
        AttentionLayer(12, 3, mechanism="infsa_pure", mechanism_args={"gama": 0.5})
    with pytest.raises(ValueError, match="need a norm_layer"):
        AttentionLayer(12, 3, qk_norm=True)


def test_matrix_and_token_map_of_a_layer(x):
    layer = make("infsa_pure", qkv_bias=True)
    q, k, v = layer.project(x)
    mixed = (layer.matrix(x, PADDING) @ v).transpose(1, 2).flatten(2)
    out = layer.proj(mixed)
    assert_close(torch.where(REAL[..., None], out, 0.0), layer(x, PADDING), **EXACT)
    assert_close(layer.token_map(x), layer.core.token_map(q, k), **EXACT)
    assert not layer.token_map(x, PADDING).mT[~REAL].any()
    assert layer.token_map(x, is_causal=True).shape == (3, HEADS, TOKENS)


def test_module_is_copied_and_saved_like_any_other(x, tmp_path):
    layer = make(mechanism_args={"gamma": 0.4})
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other = make(mechanism_args={"gamma": 0.9})
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    assert torch.equal(other(x), layer(x))
