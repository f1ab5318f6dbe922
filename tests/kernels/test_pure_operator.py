"""Pure InfSA without the score matrix: which path is taken, and the operator in the rest of torch."""

import subprocess
import sys
from itertools import product

import pytest
import torch
import torch._dynamo.testing
from pure_reference import PHI, compare, problem, reference, tiled, with_gradients
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from infvit.attention import AttentionLayer, Mask, PureInfSA
from infvit.attention import pure as pure_module
from infvit.attention.kernels.pure_op import pure_infsa_backward_op, pure_infsa_op
from infvit.attention.pure import PATHS, choose_path, pure_infsa
from infvit.errors import ConfigError

CAUSAL = pytest.mark.parametrize("causal", [False, True])
ACTIVATIONS = pytest.mark.parametrize("activation", PHI)


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
