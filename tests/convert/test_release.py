"""InfSAAttention, InfSA as functions, and the names of the authors' release."""

import re

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import infvit
from infvit.attention import LinearInfSA, PureInfSA
from infvit.errors import ConfigError
from infvit.testing.conversion import Formula

CLASSES = {"pure_infsa": PureInfSA, "linear_infsa": LinearInfSA}
Q, K, V = (torch.randn(2, 4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3))


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"kdim": 3, "vdim": 5}, {"add_bias_kv": True}, {"add_zero_attn": True}],
    ids=str,
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_module_stands_in_for_torchs(options, batch_first):
    ours = infvit.InfSAAttention(8, 2, batch_first=batch_first, dtype=torch.float64, gamma=0.4, **options)
    theirs = nn.MultiheadAttention(8, 2, batch_first=batch_first, dtype=torch.float64, **options)
    assert set(ours.state_dict()) - set(theirs.state_dict()) == {"infsa.decay.logit"}
    theirs.load_state_dict({name: x for name, x in ours.state_dict().items() if "infsa" not in name})
    q, k, v = Q[:, 0], K[:, 0, :, : options.get("kdim", 8)], V[:, 0, :, : options.get("vdim", 8)]
    with Formula("infsa_pure", head_dim=4, gamma=0.4):
        expected = theirs(q, k, v)
    assert_close(ours(q, k, v), expected)


def test_the_module_takes_torchs_positions_and_initialisation():
    torch.manual_seed(0)
    ours = infvit.InfSAAttention(8, 2, 0.1, False, False, False, None, None, True)
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, 0.1, False, False, False, None, None, True)
    assert ours.batch_first
    assert ours.infsa.attn_drop.p == 0.1
    assert_close(ours.in_proj_weight, theirs.in_proj_weight, rtol=0, atol=0)
    x = torch.randn(2, 5, 8)
    assert not torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])
    assert_close(ours.eval()(x, x, x)[0], ours(x, x, x)[0])


def test_the_module_under_the_names_of_the_release():
    module = infvit.InfSAAttention(embed_dim=8, num_heads=2, variant="linear_infsa", rho_init=0.9, rho_trainable=False)
    assert isinstance(module.infsa, LinearInfSA)
    assert module.batch_first
    assert module.rho == pytest.approx(0.9)
    assert not module.infsa.decay.logit.requires_grad
    assert isinstance(infvit.InfSAAttention(8, 2, "linear_infsa").infsa, LinearInfSA)
    assert not infvit.InfSAAttention(8, 2).batch_first
    for wrong in ({"variant": "invalid"}, {"rho_init": 1.5}, {"slope": 1}, {"rho_init": 0.5, "gamma": 0.5}):
        with pytest.raises(ValueError, match=r"invalid|strictly|has no 'slope'|another name"):
            infvit.InfSAAttention(8, 2, **wrong)


def test_the_module_in_a_model_is_left_alone():
    block = nn.ModuleDict({"own": infvit.InfSAAttention(8, 2), "other": nn.MultiheadAttention(8, 2)})
    report = infvit.convert(block, "infsa_linear", inplace=True).conversion_report
    assert [entry.name for entry in report.converted] == ["other"]
    assert [entry.name for entry in report.refused] == ["own"]
    assert isinstance(block["own"].infsa, PureInfSA)
    infvit.revert(block)
    assert type(block["own"]) is infvit.InfSAAttention
    assert type(block["other"]) is nn.MultiheadAttention


@pytest.mark.parametrize("variant", CLASSES)
@pytest.mark.parametrize("activation", ["relu", "gelu", "abs"])
def test_functions_are_the_formula(variant, activation):
    expected = CLASSES[variant].reference(Q, K, V, gamma=0.9, activation=activation)
    call = {"activation": activation}
    assert_close(infvit.infsa_attention(Q, K, V, variant=variant, rho=0.9, **call), expected)
    assert_close(infvit.infsa_attention(Q, K, V, CLASSES[variant].name, 0.9, **call), expected)
    flat = infvit.infsa_attention(Q[:, 0], K[:, 0], V[:, 0], variant, 0.9, **call)
    assert_close(flat, expected[:, 0])
    if variant == "pure_infsa":
        assert_close(infvit.pure_infsa_scores(Q, K, rho=0.9, **call) @ V, expected)
        assert_close(infvit.pure_infsa_scores(Q[0], K[0], 0.9, **call) @ V[0], expected[0])
    else:
        assert infvit.linear_infsa_scores(Q, K).shape == (2, 4, 5, 1)
        assert_close((infvit.linear_infsa_scores(Q, K, 0.9, **call) * V).sum(-2), expected[..., 0, :])


@pytest.mark.parametrize("variant", CLASSES)
def test_functions_take_masks_a_scale_grouped_keys_and_a_learned_gamma(variant):
    name = CLASSES[variant].name
    gamma = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    calls = [{"is_causal": True}, {"scale": 0.1}]
    if variant == "pure_infsa":
        calls += [{"attn_mask": torch.rand(5, 5) > 0.3}, {"attn_mask": Q[0, 0, :, :5]}]
    for call in calls:
        with Formula(name, gamma=0.3):
            expected = torch.nn.functional.scaled_dot_product_attention(Q, K, V, **call)
        out = infvit.infsa_attention(Q, K, V, variant, gamma, **call)
        assert_close(out, expected)
        assert torch.autograd.grad(out.sum(), gamma)[0] != 0
    with Formula(name):
        expected = torch.nn.functional.scaled_dot_product_attention(Q, K[:, :2], V[:, :2], enable_gqa=True)
    assert_close(infvit.infsa_attention(Q, K[:, :2], V[:, :2], variant), expected)
    dropped = infvit.infsa_attention(Q, K, V, variant, dropout_p=0.5, training=True)
    assert not torch.equal(dropped, infvit.infsa_attention(Q, K, V, variant))
    assert_close(infvit.infsa_attention(Q, K, V, variant, dropout_p=0.5), infvit.infsa_attention(Q, K, V, variant))
    for wrong in ({"variant": "x"}, {"eps": 1e-3}, {"slope": 1}):
        with pytest.raises(ConfigError):
            infvit.infsa_attention(Q, K, V, **wrong)


def test_convert_under_the_names_of_the_release(capsys):
    model = infvit.convert(
        encoder(),
        variant="linear_infsa",
        rho_init=0.95,
        rho_trainable=False,
        copy_weights=True,
        include_patterns=[r"layers\.[01]\."],
        exclude_patterns=[r"\.1\."],
        target_types=[nn.MultiheadAttention],
        verbose=True,
    )
    assert "1 converted, 2 kept" in capsys.readouterr().out
    core = model.layers[0].self_attn.infsa
    assert isinstance(core, LinearInfSA)
    assert core.decay().item() == pytest.approx(0.95)
    assert not core.decay.logit.requires_grad
    assert isinstance(infvit.convert(encoder(), "pure_infsa").layers[0].self_attn.infsa, PureInfSA)
    with pytest.raises(ConfigError, match="copy_weights"):
        infvit.convert(encoder(), copy_weights=False)
    with pytest.raises(ConfigError, match="another name"):
        infvit.convert(encoder(), gamma=0.5, rho_init=0.5)


@pytest.mark.parametrize(
    ("include", "converted"),
    [("layers.1", [1]), ("*.2.*", [2]), (re.compile(r"[02]"), [0, 2]), (["layers.0", "*2*"], [0, 2])],
    ids=str,
)
def test_names_are_parts_patterns_or_regular_expressions(include, converted):
    report = infvit.convert(encoder(), include=include).conversion_report
    assert [entry.name for entry in report.converted] == [f"layers.{i}.self_attn" for i in converted]


@pytest.mark.parametrize("variant", CLASSES)
def test_functions_take_any_leading_dimensions_each_sample_by_itself(variant):
    scores = {"pure_infsa": infvit.pure_infsa_scores, "linear_infsa": infvit.linear_infsa_scores}[variant]
    whole, out = scores(Q, K), infvit.infsa_attention(Q, K, V, variant)
    for b in range(2):
        assert_close(scores(Q[b], K[b]), whole[b])
        for h in range(4):
            assert_close(scores(Q[b, h], K[b, h]), whole[b, h])
            assert_close(infvit.infsa_attention(Q[b, h], K[b, h], V[b, h], variant), out[b, h])
    assert_close(scores(Q[None], K[None, :, :, :3]), scores(Q, K[:, :, :3])[None])
    for q, k in ((Q[0, 0, 0], K[0, 0]), (Q, K[:1]), (Q, K[..., :4])):
        with pytest.raises(ConfigError, match="are needed"):
            scores(q, k)


def test_masks_of_the_functions_belong_to_their_samples():
    q, k, v = Q[:, 0], K[:, 0], V[:, 0, :, :3]
    for mask in (torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(0)) > 0.4, Q[:, 1, :, :5]):
        out = infvit.infsa_attention(q, k, v, attn_mask=mask)
        for b in range(2):
            alone = infvit.infsa_attention(q[b], k[b], v[b], attn_mask=mask[b])
            assert_close(out[b], alone)
            assert_close(alone, infvit.infsa_attention(q[b, None, None], k[b, None, None], v[b, None, None],
                                                       attn_mask=mask[b])[0, 0])  # fmt: skip
        for wrong in (q[:, None], q[:1], q[0]):
            keys, values = (x[:, None] if wrong.ndim == 4 else x[0] if wrong.ndim == 2 else x[:1] for x in (k, v))
            with pytest.raises(ConfigError, match="not broadcastable"):
                infvit.infsa_attention(wrong, keys, values, attn_mask=mask)
    for bad in (
        (q, k[:1], v),
        (q, k, v[:, :3]),
        (q[0, 0], k, v),
        (Q, K[:, :3], V[:, :3]),
        (Q[None],) * 3,
        (q, k[0], v),
    ):
        with pytest.raises(ConfigError, match="are needed"):
            infvit.infsa_attention(*bad)
    with pytest.raises(ConfigError, match="int64"):
        infvit.infsa_attention(q, k, v, attn_mask=torch.ones(5, 5, dtype=torch.long))


@pytest.mark.parametrize("gamma", [0.0, 1.0, 1.5, -0.3, float("nan")])
def test_functions_refuse_a_gamma_out_of_range(gamma):
    for call in (
        lambda: infvit.infsa_attention(Q, K, V, gamma=gamma),
        lambda: infvit.pure_infsa_scores(Q, K, gamma),
        lambda: infvit.linear_infsa_scores(Q, K, rho=gamma),
    ):
        with pytest.raises(ConfigError, match="gamma"):
            call()


def test_the_rest_of_the_releases_names():
    assert infvit.replace_attention(nn.MultiheadAttention(8, 2), eps=1e-6).infsa.name == "infsa_pure"
    assert infvit.InfSAAttention(8, 2, variant="linear_infsa", eps=1e-6).infsa.name == "infsa_linear"
    assert infvit.convert(nn.MultiheadAttention(8, 2), "cosformer", eps=1e-3).infsa.eps == 1e-3  # its own
    for call in (lambda: infvit.convert(encoder(), eps=1e-5), lambda: infvit.InfSAAttention(8, 2, eps=1e-5)):
        with pytest.raises(ConfigError, match="1e-06, as published"):
            call()
