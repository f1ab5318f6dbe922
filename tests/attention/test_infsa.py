"""Pure and Linear InfSA against the formulas of the paper and of the specification, beyond the common contract."""

import math

import pytest
import torch
from torch.testing import assert_close

from infvit.attention import LinearInfSA, Mask, PureInfSA, get_mechanism
from infvit.testing.cases import EXACT, gradients, inputs

EPS = 1e-6
BOTH = pytest.mark.parametrize("name", ["infsa_pure", "infsa_linear"])
ACTIVATIONS = {
    "relu": lambda x: x * (x > 0),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "abs": lambda x: x * x.sign(),
}


def make(name, heads=2, dim=4, dtype=torch.float64, **args):
    return get_mechanism(name)(heads, dim, dtype=dtype, **args).eval()


def pure_by_hand(q, k, v, phi, gamma):
    """Section 1 of the specification, entry by entry."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for b, h in torch.cartesian_prod(*map(torch.arange, q.shape[:2])):
        scores = torch.stack([torch.stack([phi(qi @ kj / len(kj)) for kj in k[b, h]]) for qi in q[b, h]])
        norm = sum(float(s) ** 2 for s in scores.flatten()) ** 0.5
        out[b, h] = gamma * torch.stack([sum(s * vj for s, vj in zip(row, v[b, h], strict=True)) for row in scores])
        out[b, h] /= norm + EPS
    return out


def linear_by_hand(q, k, v, phi, gamma):
    """Section 2 of the specification, entry by entry; every token gets the same."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    q, k = q / math.sqrt(q.shape[-1]), k / math.sqrt(k.shape[-1])
    for b, h in torch.cartesian_prod(*map(torch.arange, q.shape[:2])):
        lengths = [math.sqrt(float(qi @ qi)) for qi in q[b, h]]
        pooled = sum(n / (sum(lengths) + EPS) * qi for n, qi in zip(lengths, q[b, h], strict=True))
        scores = [phi(pooled @ kj) for kj in k[b, h]]
        total = sum(float(s) for s in scores)
        total += EPS if total >= 0 else -EPS
        out[b, h] = gamma * sum(s / total * vj for s, vj in zip(scores, v[b, h], strict=True))
    return out


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("name", "by_hand"), [("infsa_pure", pure_by_hand), ("infsa_linear", linear_by_hand)])
def test_activations_by_hand(name, by_hand, activation):
    q, k, v = inputs(4, 6)
    expected = by_hand(q, k, v, ACTIVATIONS[activation], 0.3)
    assert_close(make(name, gamma=0.3, activation=activation)(q, k, v), expected, **EXACT)


@BOTH
@pytest.mark.parametrize("gamma", [0.3, 0.5, 0.7, 0.9])
def test_gamma_is_the_value_asked_for(name, gamma):
    core = make(name, gamma=gamma)
    assert_close(core.decay().item(), gamma, **EXACT)
    assert_close(core(*inputs()) / gamma, make(name)(*inputs()) / 0.7, **EXACT)


@BOTH
def test_gamma_defaults_to_one_trainable_value_of_0_7(name):
    core = make(name)
    assert core.decay.logit.shape == (1,)
    assert core.decay.logit.requires_grad
    assert_close(core.decay().item(), 0.7, **EXACT)


@BOTH
def test_gamma_per_head(name):
    core = make(name, heads=3, gamma_per_head=True, gamma=0.4)
    assert core.decay.logit.shape == (3,)
    q, k, v = inputs(heads=3)
    base = core(q, k, v)
    with torch.no_grad():
        core.decay.logit[1] = 0.0
    out = core(q, k, v)
    assert_close(out[:, 1], base[:, 1] * 0.5 / 0.4, **EXACT)
    assert torch.equal(out[:, [0, 2]], base[:, [0, 2]])
    # the gradient by the formula of the specification: c / gamma, times the sigmoid's slope
    weight = torch.randn_like(out)
    *_, got = gradients(core, (q, k, v), Mask(), weight)
    assert_close(got, (weight * out).sum((0, 2, 3)) * (1 - core.decay()[:, 0, 0]), **EXACT)


@BOTH
@pytest.mark.parametrize("per_head", [False, True])
def test_optimiser_moves_gamma_and_only_a_trainable_one(name, per_head):
    q, k, v = inputs()
    for trainable in (True, False):
        core = make(name, gamma_trainable=trainable, gamma_per_head=per_head)
        before = core.decay.logit.detach().clone()
        bias = torch.nn.Parameter(torch.zeros_like(v))  # something to train beside a frozen gamma
        optimizer = torch.optim.AdamW([*core.parameters(), bias], lr=0.1, weight_decay=0.5)
        core(q, k, v + bias).square().sum().backward()
        optimizer.step()
        if trainable:
            assert (core.decay.logit < before - 0.05).all()  # a smaller gamma gives a smaller output
            assert (core.decay() < 0.7).all()
        else:
            assert torch.equal(core.decay.logit, before)
            assert core.decay.logit.grad is None


@BOTH
@pytest.mark.parametrize("gamma", [0, 1, -0.1, 1.5, math.nan])
def test_gamma_outside_its_range_is_refused(name, gamma):
    with pytest.raises(ValueError, match="between 0 and 1"):
        make(name, gamma=gamma)


@BOTH
def test_unknown_activation_is_refused(name):
    with pytest.raises(ValueError, match="allowed: relu, gelu, abs"):
        make(name, activation="silu")


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_no_positive_score_gives_exactly_zero(name, dtype):
    core = make(name, dtype=dtype)
    q, k, v = inputs(batch=3, dtype=dtype)
    q[0], k[0] = 1, -1
    q[1] = 0
    out, *grads = gradients(core, (q, k, v), Mask(), torch.ones_like(v))
    assert not out[:2].any()
    assert out[2].any()
    assert not any(g[:2].any() for g in grads[:3])


@BOTH
@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-6, 1e-8, 1e-12, 1e-30])
def test_gradients_are_bounded_by_gamma_over_eps(name, size):
    core = make(name, heads=1)
    q, k, v = inputs(5, batch=1, heads=1)
    q = q * size
    weight = torch.randn_like(v)
    _, dq, *rest = gradients(core, (q, k, v), Mask(), weight)
    # dphi is at most (gamma / d) |dout . v| from the product and as much again from the norm; 25 pairs, d >= eps.
    bound = 2 * 0.7 / EPS * 25 * weight.norm() * v.norm() * k.norm()
    assert dq.abs().max() < bound
    assert all(g.isfinite().all() for g in rest)
    if size == 1e-6:  # near the bound, so that the test says something
        assert dq.abs().max() > 1e-6 * bound


@pytest.mark.parametrize("total", [-3e-7, -1e-6, -1e-9, 1e-9])
def test_signed_denominator_of_linear_moves_away_from_zero(total):
    core = make("infsa_linear", heads=1, dim=1, activation="gelu")
    phi = ACTIVATIONS["gelu"]
    negative = torch.tensor(-0.5, dtype=torch.float64)
    low, high = torch.tensor([0.0, 1.0], dtype=torch.float64)
    pooled = 2 / (2 + EPS)  # of two queries of 1
    for _ in range(200):  # the key whose score makes the sum of the two equal to `total`
        middle = (low + high) / 2
        above = phi(pooled * middle) + phi(pooled * negative) > total
        low, high = (low, middle) if above else (middle, high)
    k = torch.stack([negative, high])[None, None, :, None]
    scores = phi(pooled * k)
    assert scores.sum().item() == pytest.approx(total, abs=1e-15)
    v = torch.tensor([1.0, 3.0], dtype=torch.float64)[None, None, :, None]
    denominator = total - EPS if total < 0 else total + EPS
    expected = 0.7 * (scores * v).sum(-2, keepdim=True) / denominator
    out = core(torch.ones_like(k), k, v)
    assert_close(out, expected.expand(-1, -1, 2, -1), rtol=1e-8, atol=0)
    assert out.abs().max() < 0.7 * 0.5 / EPS


def causal_problem():
    """Inputs whose first queries see no positive score, so that the first norms are 0."""
    q, k, v = inputs(6, heads=2)
    q[0, :, :2], k[0, :, :2] = 1, -1
    return q, k, v


def test_causal_pure_forward_and_backward_by_formula():
    """Section 1, Masks, with the sums written out."""
    q, k, v = causal_problem()
    core = make("infsa_pure", gamma_per_head=True)
    weight = torch.randn_like(v)
    with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either
        got = gradients(core, (q, k, v), Mask(causal=True), weight)
    expected = [torch.zeros_like(x) for x in (v, q, k, v)]
    out, dq, dk, dv = expected
    gamma, dim, tokens = 0.7, q.shape[-1], q.shape[2]
    for b, h in torch.cartesian_prod(torch.arange(2), torch.arange(2)):
        scores = q[b, h] @ k[b, h].mT / dim
        phi = scores.relu()
        n = [phi[: i + 1, : i + 1].tril().square().sum().sqrt() for i in range(tokens)]
        for i in range(tokens):
            out[b, h, i] = gamma * sum(phi[i, j] * v[b, h, j] for j in range(i + 1)) / (n[i] + EPS)
        c = (weight[b, h] * out[b, h]).sum(-1)
        for j in range(tokens):
            tail = sum(c[i] / ((n[i] + EPS) * n[i]) for i in range(j, tokens) if n[i] > 0)
            for el in range(j + 1):
                dphi = gamma / (n[j] + EPS) * weight[b, h, j] @ v[b, h, el] - phi[j, el] * tail
                ds = dphi * (scores[j, el] > 0)
                dq[b, h, j] += ds * k[b, h, el] / dim
                dk[b, h, el] += ds * q[b, h, j] / dim
                dv[b, h, el] += gamma / (n[j] + EPS) * phi[j, el] * weight[b, h, j]
    assert not out[0, :, :2].any()
    for a, b in zip(got[:4], expected, strict=True):
        assert_close(a, b, rtol=1e-10, atol=1e-11)
    assert_close(got[4], (weight * out).sum((0, 2, 3)) * (1 - gamma), **EXACT)


@BOTH
def test_nan_stays_visible_in_every_later_position(name):
    q, k, v = inputs()
    q[0, 0, 2, 0] = float("nan")
    out = make(name)(q, k, v, Mask(causal=True))
    assert out[0, 0, :2].isfinite().all()
    assert out[0, 0, 2:].isnan().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_causal_linear_is_the_plain_function_on_every_prefix(activation):
    q, k, v = causal_problem()
    core = make("infsa_linear", activation=activation)
    out = core(q, k, v, Mask(causal=True))
    for i in range(q.shape[2]):
        prefix = core(*(x[:, :, : i + 1] for x in (q, k, v)))
        assert_close(out[:, :, i], prefix[:, :, -1], **EXACT)


def test_causal_pure_is_not_the_plain_function_on_the_prefix():
    q, k, v = inputs()
    core = make("infsa_pure")
    assert not torch.allclose(core(q, k, v, Mask(causal=True))[:, :, -1], core(q, k, v)[:, :, -1])


def test_linear_gives_every_token_the_same():
    out = make("infsa_linear")(*inputs())
    assert torch.equal(out, out[:, :, :1].expand_as(out))


def test_token_maps_carry_no_gamma():
    q, k, v = inputs()
    weights = make("infsa_linear", gamma=0.2).token_map(q, k)
    assert_close(0.7 * weights[:, :, None] @ v, make("infsa_linear")(q, k, v)[:, :, :1], **EXACT)
    assert_close(weights.sum(-1), torch.ones(2, 2).double(), rtol=0, atol=1e-5)
    scores = (q @ k.mT / q.shape[-1]).relu()
    columns = (scores / (scores.norm(dim=(-2, -1), keepdim=True) + EPS)).sum(-2)
    assert_close(make("infsa_pure", gamma=0.2).token_map(q, k), columns, **EXACT)


def test_token_map_of_causal_linear_is_that_of_the_last_real_token():
    q, k, _ = inputs()
    core = make("infsa_linear")
    real = torch.tensor([[True] * 5 + [False] * 2, [True] * 7])
    relevance = core.token_map(q, k, Mask(keys=real, queries=real, causal=True))
    assert_close(relevance[0, :, :5], core.token_map(q[:1, :, :5], k[:1, :, :5])[0], **EXACT)
    assert_close(relevance[1], core.token_map(q, k)[1], **EXACT)


def test_pure_matrix_has_norm_gamma_and_may_exceed_row_sum_one():
    q, k, _ = inputs(50)
    matrix = make("infsa_pure", gamma=0.9).matrix(q, k)
    assert_close(matrix.norm(dim=(-2, -1)), torch.full((2, 2), 0.9).double(), rtol=1e-5, atol=0)
    assert matrix.sum(-1).max() > 1


@pytest.mark.parametrize("cls", [PureInfSA, LinearInfSA])
def test_reset_restores_gamma(cls):
    core = cls(2, 4, gamma=0.3)
    torch.nn.init.zeros_(core.decay.logit)
    core.decay.reset_parameters()
    assert_close(core.decay().item(), 0.3)
