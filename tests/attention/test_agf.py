"""AGF and Singularformer: what the contract suite does not ask of them."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Literal, Optional

import numpy as np
import pytest
import torch
from scipy.special import eval_jacobi
from torch import nn
from torch.testing import assert_close

from infvit.attention import AGF, AttentionLayer, Mask, collect_losses
from infvit.attention import agf as module
from infvit.attention.agf import Orthogonality, jacobi_recurrence, polynomial_sum
from infvit.attention.mechanism import check_hyperparameters
from infvit.attention.singularformer import Singularformer
from infvit.errors import ConfigError
from infvit.testing.cases import DIM, EXACT, HEADS, TOKENS, build, inputs_of, random

GRID = list(itertools.product((-0.9, -0.5, 0.0, 1.0, 1.5, 2.0), (-2.0, -1.3, -1.0, -0.5, 0.0, 0.7, 1.0, 2.0)))


def refused_sums(order: int) -> set[int]:
    """The a + b of the specification for which a denominator is 0."""
    return {*range(-order, -1), *range(2 - 2 * order, -1, 2)} if order >= 2 else set()


@pytest.mark.parametrize("order", [1, 2, 3, 10])
def test_the_basis_is_scipys(order: int):
    x = torch.linspace(0, 1, 21, dtype=torch.float64)
    tried = 0
    for a, b in GRID:
        if round(a + b, 6) in refused_sums(order):
            continue
        one_hot = torch.zeros(order, dtype=torch.float64)
        one_hot[-1] = 1
        got = polynomial_sum(x, 0.0, one_hot, jacobi_recurrence(order, a, b))
        expected = eval_jacobi(order, a, b, x.numpy())
        assert_close(got, torch.from_numpy(expected), rtol=0, atol=1e-11 * max(1.0, np.abs(expected).max()))
        tried += 1
    assert tried > 40


@pytest.mark.parametrize("order", range(1, 8))
def test_a_and_b_are_refused_where_a_denominator_is_zero_and_nowhere_else(order: int):
    for total in np.arange(-16, 4, 0.5):
        for a in (-0.3, 1.5):
            if total in refused_sums(order):
                with pytest.raises(ConfigError, match=rf"a={a}, b=.* the denominator .* is 0 at\s+k="):
                    jacobi_recurrence(order, a, total - a)
            else:
                jacobi_recurrence(order, a, total - a)


def test_a_sum_that_is_zero_but_for_rounding_is_refused():
    a, b = 1.1 + 2.2, -5.3
    assert 0 not in (2 + a + b, 2 * 2 + a + b - 2)
    with pytest.raises(ConfigError, match="k=2"):
        jacobi_recurrence(2, a, b)
    AGF(HEADS, DIM, order=3, a=0.5, b=-1.5)  # a + b = -1: as the paper has it, b from -2 to 2
    for value in (math.nan, math.inf):
        with pytest.raises(ConfigError, match="must be finite"):
            AGF(HEADS, DIM, a=value)


def test_named_bases_are_jacobi_polynomials():
    q, k, v = inputs_of(build("agf", {}))
    for basis, (a, b) in {"legendre": (0, 0), "chebyshev": (-0.5, -0.5)}.items():
        assert_close(build("agf", {"basis": basis})(q, k, v), build("agf", {"a": a, "b": b})(q, k, v), **EXACT)
    assert not torch.allclose(build("agf", {"basis": "monomial"})(q, k, v), build("agf", {})(q, k, v))


def test_the_filter_is_a_sum_over_orders_with_tanh_of_theta():
    """Against scipy, with the published default: theta_0 exactly 1, K 4, a 1.5, b 1."""
    core = AGF(HEADS, DIM, dtype=torch.float64)
    assert (core.order, core.a, core.b, core.basis) == (4, 1.5, 1.0, "jacobi")
    assert dict(core.named_parameters()).keys() == {"theta"}
    assert core.theta.shape == (4,)
    with torch.no_grad():
        core.theta.copy_(torch.tensor([0.3, -50.0, 0.0, 1.0], dtype=torch.float64))
    q, _, _ = inputs_of(core)
    s = 1 / (1 + np.exp(-q[..., DIM:].numpy()))
    expected = 1 + sum(t * eval_jacobi(n, 1.5, 1.0, s) for n, t in enumerate(np.tanh([0.3, -50, 0, 1]), start=1))
    assert_close(core.values(q).detach(), torch.from_numpy(expected), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("args", [{}, {"theta0_trainable": True}, {"form": "svd"}, {"form": "uv"}], ids=str)
def test_at_the_start_the_matrix_is_u_times_v(args: dict):
    core = AGF(HEADS, DIM, dtype=torch.float64, **args)
    q, k, _ = inputs_of(core)
    u, columns = q[..., :DIM].softmax(-1), k.softmax(-2)
    matrix = core.matrix(q, k).detach()
    assert_close(matrix, u @ columns.mT, **EXACT)
    assert_close(matrix.sum(-1), torch.ones(2, HEADS, TOKENS).double(), **EXACT)
    numbers = {"theta": 4, "theta0": 1} if args.get("theta0_trainable") else {"theta": 4}
    numbers = {"svd": {"singular_values": HEADS * DIM}, "uv": {}}.get(args.get("form", ""), numbers)
    assert {name: p.numel() for name, p in core.named_parameters()} == numbers
    assert all(p.ndim == 1 for p in core.parameters()), "weight decay leaves those alone, and FSDP2 refuses 0-d"


def test_theta0_is_learned_without_tanh():
    core = AGF(HEADS, DIM, dtype=torch.float64, theta0_trainable=True)
    q, k, _ = inputs_of(core)
    before = core.matrix(q, k)
    with torch.no_grad():
        core.theta0.fill_(3.0)
    assert_close(core.matrix(q, k), 3 * before, **EXACT)


def test_svd_has_a_singular_value_for_each_head_and_channel():
    core = build("agf", {"form": "svd"})
    with torch.no_grad():
        core.singular_values.copy_(torch.arange(HEADS * DIM))
    q, k, v = inputs_of(core)
    u, columns = q.softmax(-1), k.softmax(-2)
    for head in range(HEADS):
        diagonal = torch.diag(torch.arange(head * DIM, (head + 1) * DIM).double())
        expected = u[:, head] @ diagonal @ columns[:, head].mT @ v[:, head]
        assert_close(core(q, k, v)[:, head].detach(), expected, **EXACT)


def test_the_filter_computes_in_float32(monkeypatch: pytest.MonkeyPatch):
    seen: set[torch.dtype] = set()

    def spy(x: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.add(x.dtype)
        return polynomial_sum(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "polynomial_sum", spy)
    layer = AttentionLayer(HEADS * DIM, HEADS, mechanism="agf")
    with torch.autocast("cpu", torch.bfloat16):
        layer(random(2, TOKENS, HEADS * DIM).float())
    build("agf", {}, dtype=torch.float16)(*inputs_of(build("agf", {}), dtype=torch.float16))
    assert seen == {torch.float32}


def gram_loss(u: np.ndarray, v: np.ndarray) -> float:
    """Mean over heads and entries, with loops."""
    heads, _, r = u.shape
    total = 0.0
    for x in (u, v):
        for head in range(heads):
            for i, j in itertools.product(range(r), repeat=2):
                total += abs(x[head, :, i] @ x[head, :, j] - (i == j)) / (heads * r * r)
    return total


@pytest.mark.parametrize("form", ["filter", "svd", "uv"])
def test_orthogonality_is_that_of_the_real_tokens(form: str):
    core = AGF(HEADS, DIM, dtype=torch.float64, form=form, orthogonality=0.25)
    q, k, v = inputs_of(core)
    real = torch.ones(2, TOKENS, dtype=torch.bool)
    real[1, [0, 4]] = False
    for mask in (Mask(), Mask(keys=real, queries=real)):
        with collect_losses(core.train()) as take:
            core(q, k, v, mask)
            total = take()
        expected = 0.0
        for i in range(2):
            kept = real[i] if mask.keys is not None else slice(None)
            u, columns = q[i][:, kept, :DIM].softmax(-1), k[i][:, kept].softmax(-2)
            expected += 0.25 * gram_loss(u.numpy(), columns.numpy())
        assert float(total) == pytest.approx(expected, rel=1e-12)  # type: ignore[arg-type]


def test_decomposition_of_singularformer():
    """The loss against loops: off-diagonal entries only, squares for the factors, the attention as it is."""
    core = Singularformer(HEADS, DIM, dtype=torch.float64, rank=3, decomposition=2.0)
    q, k, v = inputs_of(core, batch=1)
    with collect_losses(core.train()) as take:
        core(q, k, v)
        total = take()
    expected = 0.0
    for head in range(HEADS):
        own, p = q[0, head, :, :DIM], q[0, head, :, DIM:]
        u, w = p.softmax(-1), p.softmax(-2)
        attention = ((w.mT @ own) @ (w.mT @ k[0, head]).mT / DIM**0.5).softmax(-1)
        for i, j in itertools.permutations(range(3), 2):
            expected += float((u[:, i] @ u[:, j]) ** 2 + (w[:, i] @ w[:, j]) ** 2 + attention[i, j]) / (HEADS * 9)
    assert float(total) == pytest.approx(2 * expected, rel=1e-12)  # type: ignore[arg-type]


def test_singularformer_mixes_tokens_before_or_after_their_projection():
    """As published: pseudo-tokens from the tokens, then the projections with their biases. Here the reverse."""
    torch.manual_seed(0)
    layer = AttentionLayer(HEADS * DIM, HEADS, qkv_bias=True, mechanism="singularformer", dtype=torch.float64)
    nn.init.normal_(layer.qkv.bias)
    nn.init.eye_(layer.proj.weight)
    nn.init.zeros_(layer.proj.bias)
    x = random(1, TOKENS, HEADS * DIM)[0]
    weights, biases = layer.qkv.weight.split(HEADS * DIM), layer.qkv.bias.split(HEADS * DIM)
    heads = []
    for head in range(HEADS):
        rows = slice(head * DIM, (head + 1) * DIM)
        p = x @ layer.extra.weight[rows].mT + layer.extra.bias[rows]  # type: ignore[union-attr]
        pseudo = p.softmax(0).mT @ x
        q, k, v = (pseudo @ w[rows].mT + b[rows] for w, b in zip(weights, biases, strict=True))
        heads.append(p.softmax(1) @ (q @ k.mT / DIM**0.5).softmax(1) @ v)
    assert_close(layer(x[None])[0], torch.cat(heads, 1), **EXACT)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"form": "uvt"}, "form='uvt' of agf. Did you mean 'uv'"),
        ({"basis": "legendr"}, "Did you mean 'legendre'"),
        ({"order": 0}, "order=0 of agf must be at least 1"),
        ({"basis": "legendre", "a": 1.0}, "a=1.0 has no effect with basis='legendre'"),
        ({"basis": "monomial", "b": 1.0}, "b=1.0 has no effect with basis='monomial'"),
        ({"form": "uv", "order": 3}, "order=3 has no effect with form='uv'"),
        ({"form": "svd", "theta0_trainable": True}, "theta0_trainable=True has no effect with form='svd'"),
        ({"orthogonality": -1.0}, "Orthogonality: the weight -1.0"),
        ({"orthogonality": math.nan}, "Orthogonality: the weight nan"),
        ({"attn_drop": 0.1}, "agf has no weights between pairs of tokens to drop"),
    ],
)
def test_refused(args: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        AGF(HEADS, DIM, **args)


def test_queries_without_their_second_part_are_refused():
    core = build("agf", {})
    _, k, v = inputs_of(core)
    with pytest.raises(ConfigError, match=r"takes queries of 4 \+ 4 channels .* got 4"):
        core(k, k, v)


@pytest.mark.parametrize(("form", "extra"), [("filter", HEADS * DIM), ("svd", 0), ("uv", 0)])
def test_the_layer_has_one_projection_more_for_the_singular_values(form: str, extra: int):
    args = {"mechanism": "agf", "mechanism_args": {"form": form}, "qkv_bias": True}
    layer, plain = AttentionLayer(HEADS * DIM, HEADS, **args), AttentionLayer(HEADS * DIM, HEADS, qkv_bias=True)
    own, theirs = layer.state_dict(), plain.state_dict()
    assert {name: own[name].shape for name in theirs} == {name: value.shape for name, value in theirs.items()}
    names = {name: tuple(own[name].shape) for name in own.keys() - theirs.keys() if "core" not in name}
    assert names == ({"extra.weight": (extra, HEADS * DIM), "extra.bias": (extra,)} if extra else {})


def test_the_layer_feeds_each_projection_to_its_place():
    layer = AttentionLayer(HEADS * DIM, HEADS, mechanism="agf", qk_norm=True, norm_layer=nn.LayerNorm).double()
    x = random(2, TOKENS, HEADS * DIM)
    q, k, v = layer.project(x)
    parts = [(x @ w.mT).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for w in layer.qkv.weight.split(HEADS * DIM)]
    extra = (x @ layer.extra.weight.mT).unflatten(-1, (HEADS, DIM)).transpose(1, 2)  # type: ignore[union-attr]
    pairs = ((q[..., :DIM], layer.q_norm(parts[0])), (q[..., DIM:], extra), (k, layer.k_norm(parts[1])), (v, parts[2]))
    for got, expected in pairs:
        assert_close(got, expected, **EXACT)


def test_the_loss_of_several_kinds_is_the_sum_of_their_means():
    """AGF twice, and a module that is called twice in one forward pass."""

    class Size(Orthogonality):
        def term(self, *inputs: torch.Tensor) -> torch.Tensor:
            return inputs[0].square().sum((1, 2))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                AttentionLayer(HEADS * DIM, HEADS, mechanism="agf", mechanism_args={"orthogonality": w}) for w in (1, 3)
            )
            self.size = Size(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                self.size(x)
            return x

    model = Model().double()
    x = random(2, TOKENS, HEADS * DIM)
    with collect_losses(model) as take:
        out = model(x)
        total = take()
    out, between = out.detach(), model.layers[0](x).detach()
    expected = 0.5 * (between.square().sum() + out.square().sum()) / 2
    for layer, tokens in zip(model.layers, (x, between), strict=True):
        q, k, _ = (part.detach() for part in layer.project(tokens))
        for i in range(2):
            u, columns = q[i, ..., :DIM].softmax(-1).numpy(), k[i].softmax(-2).numpy()
            expected = expected + layer.core.orthogonality.weight * gram_loss(u, columns) / 2
    assert float(total) == pytest.approx(float(expected), rel=1e-10)


@pytest.mark.parametrize("args", [
    {"theta0_trainable": "no"}, {"theta0_trainable": 1}, {"order": True}, {"order": 2.5}, {"order": "4"}, {"a": "x"},
    {"a": [1]}, {"form": None}, {"orthogonality": True}, {"basis": 3},
], ids=str)  # fmt: skip
def test_a_value_of_another_type_is_refused_by_name(args):
    ((name, value),) = args.items()
    with pytest.raises(ConfigError, match=rf"^{name}={re.escape(repr(value))} of attention mechanism 'agf' must be"):
        AttentionLayer(DIM * HEADS, HEADS, mechanism="agf", mechanism_args=args)


def test_types_that_are_as_good_are_taken():
    args = {"order": np.int64(3), "a": np.float32(1.5), "b": 1, "orthogonality": 0, "basis": None}
    layer = AttentionLayer(DIM * HEADS, HEADS, mechanism="agf", mechanism_args=args)
    assert (layer.core.order, layer.core.a, layer.core.b, layer.core.basis) == (3, 1.5, 1, "jacobi")


@pytest.mark.parametrize("hint", [list[int], Callable[[int], int], Literal["x"], None], ids=str)
def test_types_that_are_not_plain_are_left_to_the_mechanism(hint):
    class Own(AGF):
        def __init__(self, *args, size=None):
            super().__init__(*args)

    if hint is not None:
        Own.__init__.__annotations__["size"] = hint
    for value in ([1], max, "x"):
        check_hyperparameters(Own, {"size": value})
    Own.__init__.__annotations__["size"] = "NotKnownHere"
    check_hyperparameters(Own, {"size": 1})
    Own.__init__.__annotations__["size"] = Optional[int]  # noqa: UP045  (as users still write it)
    check_hyperparameters(Own, {"size": None})
    with pytest.raises(ConfigError, match="size=True of attention mechanism 'agf' must be an integer"):
        check_hyperparameters(Own, {"size": True})


def test_coefficients_beyond_all_numbers_are_refused():
    with pytest.raises(ConfigError, match="exceed all numbers"):
        jacobi_recurrence(4, 1e200, 1.0)
