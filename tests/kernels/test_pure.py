"""Pure InfSA without the score matrix: what it computes, against the formula, and in how much memory."""

from itertools import product

import pytest
import torch
import torch._dynamo.testing
from pure_reference import PHI, compare, problem, reference, tiled, with_gradients
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from infvit import testing
from infvit.attention import Mask, PureInfSA
from infvit.attention.kernels import pure_tiled
from infvit.attention.pure import pure_infsa

SHAPES = [(1, 1), (2, 2), (17, 17), (65, 65), (129, 129), (33, 70), (70, 33)]
CAUSAL = pytest.mark.parametrize("causal", [False, True])
ACTIVATIONS = pytest.mark.parametrize("activation", PHI)


@pytest.fixture(params=[(1024, 512), (16, 8), (7, 16)], ids=lambda tile: f"tile{tile[0]}x{tile[1]}")
def tile(request, monkeypatch):
    """Tiles of the real size, in which these problems fit whole, and small ones, mostly two heads at a time."""
    monkeypatch.setattr(pure_tiled, "TILE", request.param)
    if request.param[0] < 1024:
        monkeypatch.setattr(pure_tiled, "WIDTH", 1)
        threads = torch.get_num_threads()
        monkeypatch.setattr(pure_tiled, "SCORES", 5 * request.param[0] * request.param[1] // (2 * threads))
    return request.param


# What it computes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, dtype, tile):
    for activation, causal, (dim, value_dim) in product(PHI, (False, True), ((16, 16), (64, 24))):
        if causal and shape[0] != shape[1]:
            continue
        inputs = [x.to(dtype) for x in problem(*shape, dim, value_dim, batch=1, heads=3)]
        expected = with_gradients(lambda *x: reference(*x, activation, causal), *(x.double() for x in inputs))  # noqa: B023
        got = with_gradients(lambda *x: tiled(*x, Mask(causal=causal), activation=activation), *inputs)  # noqa: B023
        assert all(x.dtype == dtype for x in got)
        compare(got, expected, 1e-12 if dtype == torch.float64 else 3e-5)


def test_a_tile_larger_than_planned_still_holds_a_head(monkeypatch):
    """Equal parts may be half as long again as a tile; 1500 x 767 scores are more than what one thread plans for."""
    monkeypatch.setattr(pure_tiled, "TILE", (10, 5))
    monkeypatch.setattr(pure_tiled, "WIDTH", 1)
    monkeypatch.setattr(pure_tiled, "SCORES", 25)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    inputs = problem(14, 7, 4, 4)
    assert [len(x) for x in pure_tiled.tiles(*(x.flatten(0, 1) for x in inputs[:2]))] == [4, 1, 1]
    compare(with_gradients(tiled, *inputs), with_gradients(lambda *x: reference(*x, "relu", False), *inputs), 1e-12)


@pytest.mark.parametrize("tokens", [96, 128])
def test_128_channels(tokens, tile):
    inputs = problem(tokens, tokens, 128, 128)
    compare(with_gradients(tiled, *inputs), with_gradients(lambda *x: reference(*x, "relu", False), *inputs), 1e-12)


@CAUSAL
@ACTIVATIONS
def test_finite_differences(causal, activation, small_tiles):
    q, k, v, _ = problem(7, 7, 3, 2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = Mask(causal=causal)
    assert torch.autograd.gradcheck(lambda *x: tiled(*x, mask, activation=activation), leaves)


@CAUSAL
@pytest.mark.parametrize("path", ["plain", "tiled"])
def test_padding(path, causal, small_tiles):
    real = torch.ones(2, 9, dtype=torch.bool)
    real[0, [0, 4, 8]] = False
    q, k, v, grad = problem(9, 9, 4, 4)
    expected = with_gradients(lambda *x: reference(*x, "gelu", causal, real), q, k, v, grad)
    padded = ~real[:, None].expand(-1, 2, -1)
    for x in (q, k, v):
        x[padded] = float("nan")
    mask = Mask(real, real, causal=causal)
    got = with_gradients(lambda *x: pure_infsa(*x, mask, activation="gelu", path=path), q, k, v, grad)
    compare(got, expected, 1e-12)
    assert not any(x[padded].any() for x in got)


@CAUSAL
@pytest.mark.parametrize("path", ["plain", "tiled"])
def test_scores_that_are_all_negative_give_zero_and_touch_no_other_head(path, causal, small_tiles):
    q, k, v, grad = problem(9, 9, 4, 4)
    q[0, 0], k[0, 0] = 1, -1
    q[0, 1, :4], k[0, 1, :4] = 1, -1  # the first causal norms are 0, the later ones are not
    expected = with_gradients(lambda *x: reference(*x, "relu", causal), q, k, v, grad)
    mask = Mask(causal=causal)
    out, *grads = got = with_gradients(lambda *x: pure_infsa(*x, mask, path=path), q, k, v, grad)
    compare(got, expected, 1e-11)
    assert not any(x[0, 0].any() for x in (out, *grads))


@CAUSAL
@ACTIVATIONS
def test_scores_of_0_have_finite_gradients(causal, activation, small_tiles):
    """The norm has no slope there; GELU's own is 1/2, so that something comes through."""
    _, k, v, grad = problem(9, 9, 4, 4)
    out, *grads = with_gradients(lambda *x: tiled(*x, Mask(causal=causal), activation=activation), k * 0, k, v, grad)
    assert not out.any()
    assert all(x.isfinite().all() for x in grads)
    assert grads[0].any() == (activation == "gelu")


def test_a_causal_position_is_the_end_of_its_prefix(small_tiles):
    q, k, v, _ = problem(11, 11, 4, 4)
    out = tiled(q, k, v, Mask(causal=True))
    for i in range(11):
        prefix = tiled(*(x[:, :, : i + 1] for x in (q, k, v)), Mask(causal=True))
        assert_close(out[:, :, i], prefix[:, :, -1], rtol=1e-12, atol=1e-12)


@ACTIVATIONS
@pytest.mark.parametrize("position", range(3))
def test_nan_is_seen_in_its_head_and_nowhere_else(position, activation, small_tiles):
    inputs = problem(9, 9, 4, 4)
    inputs[position][0, 0, 3, 0] = float("nan")
    got = with_gradients(lambda *x: tiled(*x, activation=activation), *inputs)
    assert got[0][0, 0].isnan().any()
    for x in got:
        assert x[0, 1].isfinite().all()
        assert x[1].isfinite().all()


@pytest.mark.parametrize("path", ["plain", "tiled"])
def test_causal_nan_is_seen_in_every_later_position_and_in_no_earlier(path, small_tiles):
    q, k, v, _ = problem(9, 9, 4, 4)
    q[0, 0, 5, 0] = float("nan")
    out = pure_infsa(q, k, v, Mask(causal=True), path=path)
    assert out[0, 0, :5].isfinite().all()
    assert out[0, 0, 5:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_float32(dtype):
    inputs = [x.to(dtype) for x in problem(65, 65, 16, 16)]
    got = with_gradients(tiled, *inputs)
    assert all(x.dtype == dtype for x in got)
    exact = with_gradients(tiled, *(x.float() for x in inputs))
    for a, b in zip(got, exact, strict=True):
        assert torch.equal(a, b.to(dtype))


@CAUSAL
def test_inputs_in_any_layout(causal, small_tiles):
    q, k, v, grad = problem(9, 9, 4, 4)
    expected = with_gradients(lambda *x: tiled(*x, Mask(causal=causal)), q, k, v, grad)
    fused = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)  # (B, N, 3, H, D), as a layer has it
    transposed = [x.mT.contiguous().mT for x in (q, k, v, grad)]
    every_second = [x.repeat_interleave(2, -1)[..., ::2] for x in (q, k, v, grad)]
    for inputs in ([*fused.permute(2, 0, 3, 1, 4).unbind(0), grad], transposed, every_second):
        compare(with_gradients(lambda *x: tiled(*x, Mask(causal=causal)), *inputs), expected, 1e-12)
    expanded = grad[:, :, :1, :1].expand_as(grad)
    a, b = (with_gradients(tiled, q, k, v, g) for g in (expanded, expanded.clone()))
    compare(a, b, 1e-12)


@CAUSAL
def test_nothing_to_do(causal):
    q, k, v, grad = problem(5, 5, 4, 3)
    mask = Mask(causal=causal)
    for empty in ([x[:0] for x in (q, k, v, grad)], [x[:, :, :0] for x in (q, k, v, grad)]):
        for got, given in zip(with_gradients(lambda *x: tiled(*x, mask), *empty), (empty[2], *empty[:3]), strict=True):
            assert got.shape == given.shape
    out, *grads = with_gradients(tiled, q, k[:, :, :0], v[:, :, :0], grad)
    assert out.shape == grad.shape
    assert not out.any()
    assert not grads[0].any()


@pytest.mark.parametrize("wanted", [s for s in product((False, True), repeat=3) if any(s)], ids=str)
def test_gradients_of_some_inputs_only(wanted):
    q, k, v, grad = problem(5, 5, 4, 3)
    expected = with_gradients(tiled, q, k, v, grad)[1:]
    leaves = [x.requires_grad_(w) for x, w in zip((q, k, v), wanted, strict=True)]
    tiled(*leaves).backward(grad)
    for leaf, want, gradient in zip(leaves, wanted, expected, strict=True):
        assert torch.equal(leaf.grad, gradient) if want else leaf.grad is None


def test_autocast_changes_nothing_even_in_the_backward_pass():
    inputs = [x.float() for x in problem(33, 33, 16, 16)]
    expected = with_gradients(tiled, *inputs)
    with torch.autocast("cpu", torch.bfloat16):
        got = with_gradients(tiled, *inputs)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


COSTLY = (testing.check_compile, testing.check_export, testing.check_half_precision)


@pytest.mark.parametrize("check", [c for c in testing.CHECKS if c not in COSTLY], ids=lambda c: c.__name__)
def test_contract_of_the_plain_form(check, monkeypatch):
    """The contract suite of tests/attention sees the form that is chosen by itself."""
    monkeypatch.setattr(PureInfSA, "path", "plain")
    check("infsa_pure")


# Memory


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_no_tensor_grows_with_the_square_of_the_tokens(activation):
    heads, tokens, dim = 2, 2048, 16
    q, k, v, grad = (x.flatten(0, 1).float() for x in problem(tokens, tokens, dim, dim, batch=1, heads=heads))
    tile = round(pure_tiled.SCORES * torch.get_num_threads() * 1.5)
    assert tile < heads * tokens**2 / 8
    with Largest() as forward:
        pure_tiled.forward(q, k, v, activation, False)
    with Largest() as backward:
        pure_tiled.backward(grad, q[..., 0], q, k, v, activation, False)
    for seen in (forward, backward):
        assert heads * tokens * dim <= seen.numel <= tile
    with Largest() as plain:
        pure_infsa(*(x[None] for x in (q, k, v)), activation=activation, path="plain")
    assert plain.numel == heads * tokens**2


def test_saved_for_backward_is_what_came_in_and_out():
    sizes = []
    q, k, v, _ = (x.requires_grad_() for x in problem(50, 60, 8, 8))

    def pack(x):
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        tiled(q, k, v)
    assert sorted(sizes) == sorted([q.numel(), k.numel(), v.numel(), q.numel(), 4])


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (197, 197), (1025, 1025), (4096, 4096), (1535, 767), (3, 70000)])
@pytest.mark.parametrize("heads", [1, 16, 1000])
def test_tiles_cover_everything_once_and_stay_small(heads, queries, keys):
    q, k = torch.empty(heads, queries, 4, device="meta"), torch.empty(heads, keys, 4, device="meta")
    parts = pure_tiled.tiles(q, k)
    for total, slices in zip((heads, queries, keys), parts, strict=True):
        assert [i for s in slices for i in range(s.start, s.stop)] == list(range(total))
    group, rows, columns = (max(s.stop - s.start for s in slices) for slices in parts)
    assert rows * columns <= 1536 * 768
    assert len(parts[2]) == 1 or {(s.stop - s.start) % 16 for s in parts[2][:-1]} == {0}
    assert group == 1 or group * rows * columns <= 1.5 * pure_tiled.SCORES_OFF_CPU
