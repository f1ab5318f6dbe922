"""Pure InfSA without the score matrix: the tiled form against the formula, and the operator around all forms."""

import subprocess
import sys
from itertools import product

import pytest
import torch
import torch._dynamo.testing
from pure_reference import PHI, compare, problem, reference, with_gradients
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from infvit import testing
from infvit.attention import AttentionLayer, Mask, PureInfSA
from infvit.attention import pure as pure_module
from infvit.attention.kernels import pure_tiled
from infvit.attention.kernels.pure_op import pure_infsa_backward_op, pure_infsa_op
from infvit.attention.pure import PATHS, choose_path, pure_infsa
from infvit.errors import ConfigError

SHAPES = [(1, 1), (2, 2), (17, 17), (65, 65), (129, 129), (33, 70), (70, 33)]
CAUSAL = pytest.mark.parametrize("causal", [False, True])
ACTIVATIONS = pytest.mark.parametrize("activation", PHI)


@pytest.fixture(params=[(1024, 512), (16, 8), (7, 16)], ids=lambda tile: f"tile{tile[0]}x{tile[1]}")
def tile(request, monkeypatch):
    """Tiles of the real size, in which these problems fit whole, and small ones, one and a half heads at a time."""
    monkeypatch.setattr(pure_tiled, "TILE", request.param)
    if request.param[0] < 1024:
        monkeypatch.setattr(pure_tiled, "SCORES", 3 * request.param[0] * request.param[1] // 2)
    return request.param


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(pure_tiled, "TILE", (4, 3))
    monkeypatch.setattr(pure_tiled, "SCORES", 24)


def tiled(q, k, v, mask=Mask(), **options):  # noqa: B008
    return pure_infsa(q, k, v, mask, path="tiled", **options)


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
    assert group == 1 or group * rows * columns <= 1.5 * pure_tiled.SCORES_OFF_CPU


# Which path


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_on_a_cpu_the_tiled_form_is_taken(dtype):
    q = torch.empty(1, 1, 3, 16, dtype=dtype)
    real = torch.ones(1, 3, dtype=torch.bool)
    for mask in (Mask(), Mask(causal=True), Mask(keys=real, queries=real)):
        assert choose_path(q, q, mask, 0.0) == "tiled"
    assert choose_path(q, q, Mask(), 0.1) == "plain"
    assert choose_path(q, q, Mask(pairs=torch.ones(3, 3, dtype=torch.bool)), 0.0) == "plain"


@pytest.mark.parametrize(
    ("dtype", "dim", "value_dim", "path"),
    [
        (torch.float32, 64, 64, "triton"),
        (torch.float16, 16, 128, "triton"),
        (torch.bfloat16, 128, 16, "triton"),
        (torch.float64, 64, 64, "tiled"),
        (torch.float32, 129, 64, "tiled"),
        (torch.float32, 64, 129, "tiled"),
    ],
)
def test_where_triton_runs_it_takes_what_fits(dtype, dim, value_dim, path, monkeypatch):
    q, v = (torch.empty(1, 1, 3, d, dtype=dtype) for d in (dim, value_dim))
    monkeypatch.setattr(pure_module, "_runs_triton", lambda device: True)
    assert choose_path(q, v, Mask(), 0.0) == path
    assert choose_path(q, v, Mask(causal=True), 0.0) == path
    assert choose_path(q, v, Mask(), 0.1) == "plain"
    assert PureInfSA(1, dim).upcasts is False


def test_triton_needs_a_gpu_of_compute_capability_8(monkeypatch):
    device = torch.device("cuda")
    for capability, runs in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        assert pure_module._runs_triton(device) is (runs and pure_module.TRITON)
    assert not pure_module._runs_triton(torch.device("cpu"))
    monkeypatch.setattr(pure_module, "TRITON", False)
    assert not pure_module._runs_triton(device)


def test_a_path_that_cannot_is_refused():
    q, k, v, _ = (x.float() for x in problem(3, 3, 16, 16))
    with pytest.raises(ConfigError, match="unknown path 'fast'; allowed: plain, tiled, triton"):
        pure_infsa(q, k, v, path="fast")
    pairs = Mask(pairs=torch.ones(3, 3, dtype=torch.bool))
    for path in PATHS[1:]:
        for mask, dropout in ((pairs, 0.0), (Mask(), 0.5)):
            with pytest.raises(ConfigError, match=f"path='{path}' supports neither dropout nor masks"):
                pure_infsa(q, k, v, mask, dropout=dropout, path=path)
    with pytest.raises(ConfigError, match="activation"):
        pure_infsa(q, k, v, activation="silu")
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        pure_infsa(q, k, v, path="triton")


def test_module_takes_the_path_it_is_told(monkeypatch):
    seen = []
    monkeypatch.setattr(pure_module, "pure_infsa_op", lambda *args: seen.append(args[-1]) or pure_infsa_op(*args))
    core = PureInfSA(2, 4)
    q, k, v, _ = (x.float() for x in problem(5, 5, 4, 4))
    core(q, k, v)
    core.path = "plain"
    core(q, k, v)
    assert seen == ["tiled"]


def test_works_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from infvit.attention import PureInfSA\n"
        "q = torch.randn(1, 2, 5, 4, requires_grad=True)\n"
        "PureInfSA(2, 4)(q, q, q).sum().backward(); print(q.grad.any())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "tensor(True)\n", done.stderr


# In the rest of torch


@CAUSAL
@ACTIVATIONS
def test_opcheck(causal, activation, small_tiles):
    q, k, v, grad = (x.requires_grad_() for x in problem(5, 5, 4, 3))
    torch.library.opcheck(pure_infsa_op, (q, k, v, activation, causal, "tiled"))
    q, k, v, grad = (x.detach() for x in (q, k, v, grad))
    out, norm = pure_infsa_op(q, k, v, activation, causal, "tiled")
    torch.library.opcheck(pure_infsa_backward_op, (grad, q, k, v, out, norm, activation, causal, "tiled"))


@CAUSAL
def test_compile_is_one_graph_at_every_length(causal):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    mask = Mask(causal=causal)
    compiled = torch.compile(lambda *x: pure_infsa(*x, mask), backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for tokens in (5, 9, 16):
        inputs = problem(tokens, tokens, 4, 4)
        expected = with_gradients(lambda *x: reference(*x, "relu", causal), *inputs)
        compare(with_gradients(compiled, *inputs), expected, 1e-12)
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1, f"compiled again at another length: {graphs}"
    torch._dynamo.reset()


class Free(nn.Module):
    def forward(self, q, k, v):
        return pure_infsa(q, k, v)


def test_export_keeps_the_operator_and_a_free_length():
    q, k, v, _ = problem(5, 5, 4, 4)
    tokens = torch.export.Dim("tokens")
    program = torch.export.export(Free(), (q, k, v), dynamic_shapes=({2: tokens},) * 3)
    assert "infvit.pure_infsa" in str(program.graph)
    inputs = problem(17, 17, 4, 4)
    assert_close(program.module()(*inputs[:3]), reference(*inputs[:3], "relu", False), rtol=1e-12, atol=1e-12)


def test_torchscript_gets_the_plain_form():
    q, k, v, _ = problem(5, 5, 4, 4)
    traced = torch.jit.trace(Free(), (q, k, v))
    assert "infvit::" not in str(traced.inlined_graph)
    assert_close(traced(q, k, v), tiled(q, k, v), rtol=1e-12, atol=1e-12)


def test_activation_checkpointing():
    inputs = problem(9, 9, 4, 4)
    got = with_gradients(lambda *x: checkpoint(tiled, *x, use_reentrant=False), *inputs)
    for a, b in zip(got, with_gradients(tiled, *inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_data_parallel_wrappers(wrap, tmp_path):
    """One process: the hooks that the wrappers put around modules and parameters meet the operator."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(str(tmp_path / "s"), 1), rank=0,
                                         world_size=1)  # fmt: skip
    try:
        layer = AttentionLayer(8, 2, mechanism="infsa_pure")
        x = torch.randn(2, 5, 8)
        layer(x).square().sum().backward()
        expected = [p.grad.clone() for p in layer.parameters()]
        layer.zero_grad()
        if wrap == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(layer)
        else:
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
            wrapped = fully_shard(layer, mesh=mesh)
        wrapped(x).square().sum().backward()
        for p, grad in zip(layer.parameters(), expected, strict=True):
            assert_close(p.grad.full_tensor() if wrap == "fsdp" else p.grad, grad)
    finally:
        torch.distributed.destroy_process_group()


def test_a_second_derivative_is_refused_and_the_plain_form_has_it():
    q, k, v, _ = problem(5, 5, 4, 4)
    q.requires_grad_()
    (first,) = torch.autograd.grad(tiled(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"no second derivative. Use the plain form: path='plain'"):
        first.sum().backward()
    assert torch.autograd.gradgradcheck(lambda q: pure_infsa(q, k, v, path="plain"), q)


def test_flops_are_those_of_the_plain_form():
    q, k, v, _ = (x.requires_grad_() for x in problem(5, 9, 4, 3))
    counts = {}
    for path, backward in product(("plain", "tiled"), (False, True)):
        with FlopCounterMode(display=False) as counter:
            out = pure_infsa(q, k, v, path=path)
            if backward:
                out.sum().backward()
        counts[path, backward] = counter.get_total_flops()
    assert counts["tiled", False] == counts["plain", False] == 2 * 4 * 5 * 9 * (4 + 3)
    scores_again = 2 * 4 * 5 * 9 * 4
    assert counts["tiled", True] == counts["plain", True] + scores_again
