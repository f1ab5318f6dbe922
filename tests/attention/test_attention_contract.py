"""The contract suite over every registered mechanism, and proof that it finds a mechanism which breaks the contract."""

import pytest
import torch

from infvit import testing
from infvit.attention import (
    Capabilities,
    LinearInfSA,
    Mask,
    PureInfSA,
    SoftmaxAttention,
    list_mechanisms,
    register_mechanism,
)
from infvit.attention.linear import linear_infsa_weights
from infvit.models.infvit import PEERS
from infvit.testing import __main__ as command

SLOW = {testing.check_compile}
COSTLY = {*SLOW, testing.check_export, testing.check_half_precision}  # once per mechanism is enough
CHECKS = [pytest.param(c, id=c.__name__, marks=[pytest.mark.slow] * (c in SLOW)) for c in testing.CHECKS]
VARIANTS = [
    (name, {"activation": activation, "gamma": 0.4, "gamma_per_head": True})
    for name in ("infsa_pure", "infsa_linear")
    for activation in ("gelu", "abs")
] + [
    ("linformer", {"sharing": "keys_values"}),
    ("linformer", {"sharing": "none", "projected_tokens": 3}),
    ("nystromformer", {"conv_kernel": 0}),
    ("nystromformer", {"conv_kernel": 3, "num_landmarks": 3}),
    ("performer", {"num_features": 3}),
    ("agf", {"form": "svd"}),
    ("agf", {"form": "uv", "orthogonality": 0.0}),
    ("agf", {"basis": "monomial", "order": 3, "theta0_trainable": True}),
    ("agf", {"a": 2.0, "b": -2.0, "order": 10}),
    ("singularformer", {"rank": 3}),
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", list_mechanisms())
def test_contract(name, check):
    if check is testing.check_compile and name in (*PEERS, "agf"):
        # One graph, forward and backward, without Inductor's C++, which takes minutes for these;
        # `python -m infvit.testing NAME` has it.
        check(name, backend="aot_eager")
    else:
        check(name)


@pytest.mark.parametrize("check", [c for c in testing.CHECKS if c not in COSTLY])
@pytest.mark.parametrize(
    ("name", "args"), VARIANTS, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values()))
)
def test_contract_of_variants(name, args, check):
    check(name, **args)


# Mechanisms that break one promise each, with the check that has to notice.


class WrongValue(PureInfSA):
    def mix(self, q, k, v, mask):
        return 1.0001 * super().mix(q, k, v, mask)


class DetachedDecay(PureInfSA):
    def mix(self, q, k, v, mask):
        gamma = self.decay()
        return super().mix(q, k, v, mask) / gamma * gamma.detach()


class HalfDtype(SoftmaxAttention):
    def forward(self, q, k, v, mask=Mask()):  # noqa: B008
        return super().forward(q, k, v, mask).float()


class HalfSums(LinearInfSA):
    upcasts = False

    def mix(self, q, k, v, mask):
        weights = linear_infsa_weights(q * self.scale, k * self.scale, self.phi, mask)
        return (self.decay().to(v.dtype) * (weights @ v)).expand(-1, -1, q.shape[-2], -1)


class HidesNaN(LinearInfSA):
    def mix(self, q, k, v, mask):
        return super().mix(q, k, v, mask).nan_to_num()


class SharesSamples(PureInfSA):
    def mix(self, q, k, v, mask):
        return super().mix(q, k, v, mask) * (1 + 1e-3 * q.mean())


class InfiniteGradient(PureInfSA):
    def mix(self, q, k, v, mask):
        return super().mix(q, k, v, mask) + 0 * q.square().sum((-2, -1), keepdim=True).sqrt()


class IgnoresDropout(SoftmaxAttention):
    def __init__(self, num_heads, head_dim, attn_drop=0.0, device=None, dtype=None):
        super().__init__(num_heads, head_dim, 0.0, device, dtype)


class IgnoresPadding(SoftmaxAttention):
    def mix(self, q, k, v, mask):  # zeroed keys still take part in the softmax
        return super().mix(q, k, v, Mask(causal=mask.causal))


class FillsPadding(PureInfSA):
    def forward(self, q, k, v, mask=Mask()):  # noqa: B008
        out = super().forward(q, k, v, mask)
        return out if mask.queries is None else torch.where(mask.queries[:, None, :, None], out, 1.0)


class LeaksThroughNorm(PureInfSA):
    def mix(self, q, k, v, mask):
        whole = super().mix(q, k, v, Mask(mask.keys, mask.queries, mask.pairs))
        causal = super().mix(q, k, v, mask)
        return causal * (1 + 0.01 * whole.norm(dim=(-2, -1), keepdim=True)) if mask.causal else causal


class IgnoresPairs(SoftmaxAttention):
    def mix(self, q, k, v, mask):
        return super().mix(q, k, v, Mask(mask.keys, mask.queries, None, mask.causal))


class QueriesCountWhenPadded(PureInfSA):
    def mix(self, q, k, v, mask):
        return super().mix(q, k, v, mask) / (1 if mask.queries is None else mask.queries.shape[1])


class KnowsPosition(SoftmaxAttention):
    def mix(self, q, k, v, mask):
        return super().mix(q, k, v, mask) * torch.arange(1, q.shape[-2] + 1)[:, None].to(q)


class MatrixWithoutDecay(PureInfSA):
    def _matrix(self, q, k, mask):
        return super()._matrix(q, k, mask) / self.decay()


class MapOfPadding(PureInfSA):
    def _token_map(self, q, k, mask, kind):
        return super()._token_map(q, k, mask, kind) / k.shape[-2]


class AbsorbsWrongly(LinearInfSA):
    def absorbed(self, x, weights, mask):
        return super().absorbed(x, weights, mask) * 1.0001


class AbsorbsEverything(LinearInfSA):
    def absorbs(self, mask):
        return True


class AnyLengthIsUntrue(SoftmaxAttention):
    def mix(self, q, k, v, mask):
        return super().mix(q, k, v, mask) * (1 if q.shape[-2] < 100 else 1.01)


class MetaUnset(PureInfSA):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bias = torch.nn.Parameter(torch.zeros(1))


class BreaksGraph(LinearInfSA):
    def mix(self, q, k, v, mask):
        return super().mix(q, k, v, mask) if float(q.sum()) < 1e9 else v


NOT_CLOSE = "not close"
BROKEN = [
    (WrongValue, testing.check_values, NOT_CLOSE),
    (DetachedDecay, testing.check_gradients, "Jacobian mismatch"),
    (HalfDtype, testing.check_dtypes, "in, torch.float32 out"),
    (HalfSums, testing.check_half_precision, NOT_CLOSE),
    (HidesNaN, testing.check_nan, "NaN in q is hidden"),
    (SharesSamples, testing.check_degenerate, NOT_CLOSE),
    (InfiniteGradient, testing.check_degenerate, "nan values"),
    (IgnoresDropout, testing.check_dropout, "no effect"),
    (IgnoresPadding, testing.check_padding, NOT_CLOSE),
    (FillsPadding, testing.check_padding, "at padded positions"),
    (LeaksThroughNorm, testing.check_causal, "gradient to later"),
    (IgnoresPairs, testing.check_pairwise, "sees no key"),
    (QueriesCountWhenPadded, testing.check_cross, NOT_CLOSE),
    (KnowsPosition, testing.check_permutation_equivariant, NOT_CLOSE),
    (MatrixWithoutDecay, testing.check_matrix, NOT_CLOSE),
    (MapOfPadding, testing.check_token_map, NOT_CLOSE),
    (AbsorbsWrongly, testing.check_layer, NOT_CLOSE),
    (AbsorbsEverything, testing.check_layer, "pairwise in a layer"),
    (AnyLengthIsUntrue, testing.check_values, NOT_CLOSE),
    (MetaUnset, testing.check_meta_device, "bias is not set"),
    (BreaksGraph, testing.check_export, "data-dependent"),
    pytest.param(BreaksGraph, testing.check_compile, "data-dependent", marks=pytest.mark.slow),
]


@pytest.mark.filterwarnings("ignore:.*Error detected in:UserWarning")  # anomaly mode says where
@pytest.mark.parametrize(("cls", "check", "message"), BROKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_contract_notices(cls, check, message, registry):
    cls.name = cls.__name__
    register_mechanism(cls)
    with pytest.raises(Exception, match=message):
        check(cls.name)


UNDECLARED = {
    "padding": testing.check_padding,
    "causal": testing.check_causal,
    "pairwise": testing.check_pairwise,
    "cross": testing.check_cross,
    "matrix": testing.check_matrix,
    "token_map": testing.check_token_map,
}


@pytest.mark.parametrize("capability", UNDECLARED)
def test_undeclared_is_refused_and_its_check_notices_when_not(capability, registry, monkeypatch):
    class Modest(PureInfSA):
        name = "modest"
        capabilities = Capabilities(any_length=True)

    register_mechanism(Modest)
    UNDECLARED[capability]("modest")
    monkeypatch.setattr(Modest, "_require", lambda *_: None)
    with pytest.raises(AssertionError, match="no ConfigError"):
        UNDECLARED[capability]("modest")


class FixedLength(SoftmaxAttention):
    """Softmax attention with a learned scale per token, so that it works at one number of tokens only."""

    name = "fixed_length"
    capabilities = Capabilities(padding=True)

    def __init__(self, num_heads, head_dim, attn_drop=0.0, device=None, dtype=None, *, num_tokens):
        super().__init__(num_heads, head_dim, attn_drop, device, dtype)
        self.num_tokens = num_tokens
        self.token_scale = torch.nn.Parameter(torch.ones(num_tokens, 1, device=device, dtype=dtype))

    def reset_parameters(self):
        torch.nn.init.ones_(self.token_scale)

    def mix(self, q, k, v, mask):
        return super().mix(q, k, v, mask) * self.token_scale.to(v.dtype)

    def reference(self, q, k, v, **_):
        return SoftmaxAttention.reference(q, k, v) * self.token_scale


@pytest.mark.parametrize("check", [c for c in testing.CHECKS if c not in COSTLY])
def test_contract_of_a_mechanism_for_one_number_of_tokens(check, registry):
    register_mechanism(FixedLength)
    check("fixed_length")


def test_command_line_reports_each_check(registry, monkeypatch, capsys):
    monkeypatch.setattr(command, "CHECKS", (testing.check_values, testing.check_nan))
    assert command.main(["infsa_pure"]) == 0
    assert capsys.readouterr().out.splitlines() == ["infsa_pure check_values: ok", "infsa_pure check_nan: ok"]
    WrongValue.name = "wrong"
    register_mechanism(WrongValue)
    assert command.main(["wrong"]) == 1
    assert "wrong check_values: FAILED" in capsys.readouterr().out


def test_command_says_that_a_name_is_unknown(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["infsa_pur"])
    assert ended.value.code == 2
    assert "unknown attention mechanism 'infsa_pur'. Did you mean 'infsa_pure'" in capsys.readouterr().err
