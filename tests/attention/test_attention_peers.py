"""The mechanisms of other papers: what the contract suite does not ask of them."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from infvit.attention import Mask, get_mechanism, list_mechanisms
from infvit.attention.factored import FactoredAttention
from infvit.attention.linear_transformer import CHUNK, causal_sums, elu_plus_one
from infvit.attention.nystromformer import iterative_pinv, segment_means
from infvit.attention.performer import orthogonal_features
from infvit.errors import ConfigError
from infvit.testing.cases import (
    DIM,
    EXACT,
    HEADS,
    TOKENS,
    build,
    declared_masks,
    inputs,
    inputs_of,
    random,
    with_tokens,
)

FACTORED = [name for name in list_mechanisms() if issubclass(get_mechanism(name), FactoredAttention)]
NEUTRAL = {"atol": 1e-11, "rtol": 1e-11}


def test_the_peers_are_factored():
    peers = ["cosformer", "efficient", "linear_transformer", "linformer", "nystromformer", "performer"]
    assert ["agf", *peers, "singularformer"] == FACTORED


@pytest.mark.parametrize("name", FACTORED)
def test_attention_dropout_is_refused(name: str):
    with pytest.raises(ConfigError, match=f"{name} has no weights between pairs of tokens to drop"):
        build(name, {}, attn_drop=0.1)


@pytest.mark.parametrize("name", FACTORED)
def test_the_cost_is_linear_in_the_tokens(name: str):
    """As many products for the second thousand tokens as for the third, and causal sums as for all."""

    def flops(tokens: int, mask: Mask) -> int:
        cls = get_mechanism(name)
        core = cls(HEADS, DIM, device="meta", **with_tokens(cls, {}, tokens))
        k = torch.empty(1, HEADS, tokens, DIM, device="meta")
        q = torch.empty(1, HEADS, tokens, DIM + core.extra_dim, device="meta")
        with FlopCounterMode(display=False) as counter:
            core(q, k, k, mask)
        return counter.get_total_flops()

    kinds = [Mask(), Mask(causal=True)] if get_mechanism(name).capabilities.causal else [Mask()]
    for mask in kinds:
        one, two, three = (flops(1024 * n, mask) for n in (1, 2, 3))
        assert 0 < two - one == three - two


@pytest.mark.parametrize("name", FACTORED)
def test_token_maps_are_those_of_the_matrix(name: str):
    core = build(name, {}, tokens=TOKENS)
    q, k, _ = inputs_of(core)
    assert core.token_maps[0] == "class_token"
    for mask in declared_masks(core):
        matrix = core.matrix(q, k, mask)
        keys = 1.0 if mask.keys is None else mask.keys[:, None].double()
        assert_close(core.token_map(q, k, mask, "class_token"), matrix[:, :, 0] * keys, **EXACT)
        assert_close(core.token_map(q, k, mask, "in_degree"), matrix.sum(-2) * keys, **EXACT)


@pytest.mark.parametrize("name", ["efficient", "performer", "linear_transformer", "cosformer", "singularformer"])
def test_rows_of_the_matrix_sum_to_one(name: str):
    core = build(name, {})
    q, k, _ = (x.abs() for x in inputs_of(core))  # cosFormer: ReLU leaves something of every query
    for mask in declared_masks(core):
        sums = core.matrix(q, k, mask).sum(-1)
        real = torch.ones_like(sums) if mask.queries is None else mask.queries[:, None].expand_as(sums).double()
        assert_close(sums, real, rtol=0, atol=1e-5 if hasattr(core, "eps") else 1e-12)


# Linear Transformer


@pytest.mark.parametrize("tokens", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_causal_sums_are_those_of_the_lower_triangle(tokens: int):
    leaves = [x.requires_grad_() for x in inputs(tokens, value_dim=3)]
    weight = random(2, HEADS, tokens, 3)
    q, k, v = leaves
    got, expected = causal_sums(q, k, v), (q @ k.mT).tril() @ v
    assert_close(got, expected, **NEUTRAL)
    both = [torch.autograd.grad((x * weight).sum(), leaves) for x in (got, expected)]
    for a, b in zip(*both, strict=True):
        assert_close(a, b, **NEUTRAL)


def test_causal_linear_transformer_is_the_published_recurrence():
    """Equations 16 to 20: one state and one sum, a token at a time."""
    q, k, v = inputs(CHUNK + 9)
    out = build("linear_transformer", {})(q, k, v, Mask(causal=True))
    state, total = torch.zeros(2, HEADS, DIM, DIM).double(), torch.zeros(2, HEADS, DIM).double()
    for i in range(CHUNK + 9):
        query, key = (nn.functional.elu(x[:, :, i]) + 1 for x in (q, k))
        state = state + key[..., None] * v[:, :, i, None]
        total = total + key
        row = (query[..., None, :] @ state)[..., 0, :] / ((query * total).sum(-1, keepdim=True) + 1e-6)
        assert_close(out[:, :, i], row, **NEUTRAL)


def test_the_feature_map_keeps_small_values():
    x = torch.tensor([-40.0, -20.0, 0.0, 3.0])
    expected = torch.tensor([-40.0, -20.0, 0.0, 3.0]).double()
    assert_close(elu_plus_one(x).double(), torch.where(expected > 0, expected + 1, expected.exp()), rtol=1e-6, atol=0)


# Performer


def test_features_are_orthogonal_gaussian_and_uniform():
    torch.manual_seed(0)
    dim, draws = 4, 1500
    features = torch.stack([orthogonal_features(2 * dim + 1, dim) for _ in range(draws)])
    assert features.shape == (draws, 2 * dim + 1, dim)
    products = features @ features.mT
    for block in (slice(0, dim), slice(dim, 2 * dim)):
        inside = products[:, block, block]
        assert_close(inside, torch.diag_embed(inside.diagonal(dim1=1, dim2=2)), **EXACT)
    assert products[:, 0, dim].abs().min() > 1e-6  # blocks are independent
    # Each entry is N(0, 1): mean, variance and, which tells Gaussian lengths from fixed ones, fourth moment.
    error = draws**-0.5
    assert features.mean(0).abs().max() < 5 * error
    assert (features.square().mean(0) - 1).abs().max() < 5 * error * 2**0.5
    assert (features.pow(4).mean() - 3).abs() < 5 * error * (96 / features[0].numel()) ** 0.5 * dim


def test_random_features_estimate_the_softmax_kernel_without_bias():
    torch.manual_seed(0)
    core = build("performer", {"num_features": 4 * DIM})
    q, k, _ = inputs(5, batch=1)
    estimates = []
    for _ in range(1500):
        core.reset_parameters()
        w = core.directions * DIM**-0.25
        phi_q, phi_k = ((x @ w.mT - x.square().sum(-1, keepdim=True) / (2 * DIM**0.5)).exp() for x in (q, k))
        estimates.append(phi_q @ phi_k.mT / core.num_features)
    kernel = (q @ k.mT / DIM**0.5).exp()
    error = torch.stack(estimates).std(0) / len(estimates) ** 0.5
    assert (error / kernel).median() < 0.03, "too few draws to tell"
    assert ((torch.stack(estimates).mean(0) - kernel).abs() < 5 * error).all()


def test_many_features_give_softmax_attention():
    q, k, v = (0.7 * x for x in inputs(33))
    exact = build("softmax", {})(q, k, v)
    few, many = ((build("performer", {"num_features": m})(q, k, v) - exact).square().mean() for m in (8, 8192))
    assert many < few / 200  # the squared error falls like 1 / m, by 1024
    assert many < 0.01 * exact.square().mean()


def test_features_that_underflow_one_by_one_are_still_exact():
    """In float32 phi is 0 in every feature of every key; the quotient is not 0/0."""
    q, k, v = inputs()
    q, k = (30 * x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    core = build("performer", {})
    x = k.float() / DIM**0.25
    assert not (x @ core.directions.float().mT - x.square().sum(-1, keepdim=True) / 2).exp().any()
    expected = core.reference(q, k, v)
    assert expected.isfinite().all()
    assert_close(core.float()(q.float(), k.float(), v.float()).double(), expected, rtol=1e-3, atol=1e-3)


def test_features_are_state_of_the_layer():
    torch.manual_seed(0)
    first, second = (get_mechanism("performer")(2, 16) for _ in range(2))
    assert list(first.state_dict()) == ["directions"]
    assert first.directions.shape == (44, 16)  # 16 ln 16 = 44.4
    assert not list(first.parameters())
    assert not torch.equal(first.directions, second.directions)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.directions, second.directions)
    second.reset_parameters()
    assert not torch.equal(first.directions, second.directions)
    assert [get_mechanism("performer")(2, dim).num_features for dim in (1, 2, 4, 64)] == [1, 2, 5, 266]
    assert get_mechanism("performer")(2, 16, device="meta").directions.is_meta


# Linformer


def test_sharing_of_the_projections():
    shapes = {"heads": [(1, 3, 7), (1, 3, 7)], "keys_values": [(1, 3, 7)], "none": [(2, 3, 7), (2, 3, 7)]}
    for sharing, expected in shapes.items():
        core = build("linformer", {"sharing": sharing, "projected_tokens": 3})
        assert [tuple(p.shape) for p in core.parameters()] == expected
        assert (core.key_proj is core.value_proj) == (sharing == "keys_values")


def test_projected_tokens_start_no_larger_than_tokens():
    torch.manual_seed(0)
    core = get_mechanism("linformer")(2, 4, num_tokens=400, projected_tokens=100)
    for projection in core.parameters():
        assert projection.var().item() == pytest.approx(1 / 500, rel=0.02)
        assert projection.abs().max().item() == pytest.approx((3 / 500) ** 0.5, rel=0.01)  # uniform


# Nystromformer


@pytest.mark.parametrize(("tokens", "lengths"), [(12, [4, 4, 4]), (13, [4, 4, 5]), (14, [4, 5, 5]), (3, [1, 1, 1])])
def test_segments_differ_by_at_most_one_token(tokens: int, lengths: list[int]):
    x = random(2, HEADS, tokens, DIM)
    expected = torch.stack([part.mean(-2) for part in x.split(lengths, -2)], -2)
    assert_close(segment_means(x, 3), expected, **EXACT)
    fewer = segment_means(x[:, :, :2], 3)
    assert_close(fewer, torch.cat([x[:, :, :2], torch.zeros(2, HEADS, 1, DIM).double()], -2), **EXACT)


def test_iterations_converge_to_the_inverse_of_each_matrix():
    matrices = random(3, 2, 6, 6).softmax(-1) + torch.eye(6) * torch.tensor([0.3, 1.0, 30.0])[:, None, None, None]
    assert_close(iterative_pinv(matrices, 16), torch.linalg.pinv(matrices), rtol=1e-8, atol=1e-8)
    for i in range(3):
        assert_close(iterative_pinv(matrices[i], 2), iterative_pinv(matrices, 2)[i], **EXACT)
    six, exact = iterative_pinv(matrices[:2], 6), torch.linalg.pinv(matrices[:2])
    assert (six - exact).abs().max() < 0.05 * exact.abs().max()


def test_a_landmark_for_each_token_gives_softmax_attention():
    q, k, v = inputs(TOKENS)
    core = build("nystromformer", {"num_landmarks": TOKENS, "pinv_iterations": 40, "conv_kernel": 0})
    assert_close(core(q, k, v), build("softmax", {})(q, k, v), rtol=1e-6, atol=1e-6)


def test_convolution_is_part_of_the_matrix_beyond_its_kernel():
    q, k, v = inputs(41)
    core = build("nystromformer", {"conv_kernel": 5, "num_landmarks": 4})
    assert_close(core.matrix(q, k) @ v, core(q, k, v), **NEUTRAL)
    conv = nn.Conv1d(HEADS, HEADS, 5, padding=2, groups=HEADS, bias=False).double()
    conv.weight.data = core.kernel.detach()[:, None]
    expected = torch.stack([conv(v[..., channel]) for channel in range(DIM)], -1)
    without = build("nystromformer", {"conv_kernel": 0, "num_landmarks": 4})
    assert_close(core(q, k, v) - without(q, k, v), expected, **NEUTRAL)


# cosFormer


def test_weights_fall_with_the_cosine_of_the_distance():
    tokens = 9
    ones = torch.ones(1, 1, tokens, 1).double()
    matrix = get_mechanism("cosformer")(1, 1).matrix(ones, ones)[0, 0]
    cosines = [[math.cos(math.pi / 2 * (i - j) / tokens) for j in range(tokens)] for i in range(tokens)]
    expected = torch.tensor(cosines, dtype=torch.float64)
    assert_close(matrix, expected / expected.sum(-1, keepdim=True), **EXACT)
    assert not torch.allclose(matrix[0], matrix[1])


WRONG = [
    ("linear_transformer", {"eps": 0.0}, "eps=0.0 of linear_transformer must be positive"),
    ("cosformer", {"eps": float("nan")}, "eps=nan of cosformer must be positive"),
    ("performer", {"num_features": 0}, "num_features=0 of performer must be at least 1"),
    ("linformer", {"sharing": "layers"}, "sharing='layers' of linformer; allowed: heads, keys_values, none"),
    ("linformer", {"projected_tokens": 0}, "projected_tokens=0 must be at least 1"),
    ("nystromformer", {"conv_kernel": 4}, "conv_kernel=4 of nystromformer must be odd"),
    ("nystromformer", {"num_landmarks": 0}, "num_landmarks=0, pinv_iterations=6 must be at least 1"),
]


@pytest.mark.parametrize(("name", "args", "message"), WRONG)
def test_wrong_hyperparameters_are_named(name: str, args: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        build(name, args)


def test_unfused_softmax_does_not_follow_timms_switch():
    core = build("softmax_unfused", {})
    assert not core.fused
    assert core.upcasts
