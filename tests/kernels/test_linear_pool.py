"""The operator of Linear InfSA: values, gradients, and everything that must work with an operator of one's own."""

import subprocess
import sys
from itertools import product

import pytest
import torch
from linear_cases import PHI, SHAPES, compare, degenerate, differentiate, problem
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from infvit.attention import AttentionLayer
from infvit.attention.kernels import linear_pool as kernels


@pytest.fixture(params=[2**19, 40], ids=["one slice", "many slices"])
def slices(request, monkeypatch):
    monkeypatch.setattr(kernels, "SLICE", request.param)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, slices):
    for dtype, activation, padded in product((torch.float64, torch.float32), PHI, (True, False)):
        compare(shape, dtype, activation, padded)
    for dtype in (torch.float16, torch.bfloat16):
        compare(shape, dtype, "gelu", True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_degenerate_scores_and_nan(dtype, slices):
    degenerate(dtype)


@pytest.mark.parametrize("activation", PHI)
def test_gradient_of_either_result_alone(activation):
    """Finite differences; the other result has no gradient at all then."""
    leaves, real, _ = problem((2, 5, 2, 3), torch.float64)
    for result in (0, 1):
        assert torch.autograd.gradcheck(
            lambda *args, result=result: kernels.linear_pool(*args, real, 2, activation)[result], leaves
        )


def test_only_the_gradients_asked_for():
    leaves, _, weights = problem((2, 7, 3, 4), torch.float64)
    everything = differentiate(kernels.linear_pool, leaves, weights, None, 3, "relu")[2:]
    for position in range(3):
        frozen = [leaf.detach().requires_grad_(i == position) for i, leaf in enumerate(leaves)]
        pooled, total = kernels.linear_pool(*frozen, None, 3, "relu")
        ((pooled * weights[0]).sum() + (total * weights[1]).sum()).backward()
        assert [leaf.grad is not None for leaf in frozen] == [i == position for i in range(3)]
        assert_close(frozen[position].grad, everything[position])


@pytest.mark.parametrize("padded", [True, False])
def test_registration_is_complete(padded):
    """torch's own checks: schema, fake tensors, autograd, tracing with dynamic shapes."""
    (x, weight, bias), real, _ = problem((2, 7, 3, 4), torch.float32)
    arguments = (x, weight, bias if padded else None, real if padded else None, 3, "gelu")
    torch.library.opcheck(torch.ops.infvit.linear_pool.default, arguments)
    small = (torch.randn(2, 7, 12), torch.rand(2, 7, 3), torch.randn(2, 3, 4), torch.randn(2, 7, 3))
    torch.library.opcheck(torch.ops.infvit.linear_pool_query_gradient.default, small)


def test_a_training_step_keeps_x_and_q_and_nothing_else_of_that_size():
    (x, weight, bias), _, _ = problem((1, 300, 2, 32), torch.float32)
    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kernels.linear_pool(x, weight, bias, None, 2, "relu")
    *small, second, first = sorted(kept.values())
    assert first == second == x.numel()
    assert sum(small) < x.numel() / 2


def layer_and_tokens(**kwargs):
    torch.manual_seed(0)
    layer = AttentionLayer(24, 3, qkv_bias=True, mechanism="infsa_linear", double_proj=True, **kwargs)
    return layer, torch.randn(4, 9, 24)


def gradients(module, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])


def test_the_layer_uses_the_operator_and_the_switch_turns_it_off(monkeypatch):
    calls = []
    pool = kernels.linear_pool
    monkeypatch.setattr("infvit.attention.linear.linear_pool", lambda *args: calls.append(1) or pool(*args))
    layer, x = layer_and_tokens()
    with_operator = gradients(layer, x)
    assert len(calls) == 1
    layer.core.fused = False
    assert_close(gradients(layer, x), with_operator, rtol=1e-4, atol=1e-5)
    assert len(calls) == 1
    assert not AttentionLayer(24, 3, mechanism="infsa_linear", tie_key=False)(x).isnan().any()
    assert len(calls) == 1


def test_timms_switch(monkeypatch):
    monkeypatch.setattr("timm.layers.config._USE_FUSED_ATTN", 0)
    assert not layer_and_tokens()[0].core.fused


def operations(program):
    """Returns the listing of all graphs; what runs without autocast is one of its own."""
    return "\n".join(str(m.graph) for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule))


def test_exported_program_needs_no_operator_of_ours():
    layer, x = layer_and_tokens()
    program = torch.export.export(layer, (x,), dynamic_shapes=({1: torch.export.Dim("token")},))
    assert "infvit" not in operations(program)
    longer = torch.cat([x, -2 * x], 1)
    assert_close(program.module()(longer), layer(longer), rtol=1e-4, atol=1e-5)


def test_operator_is_exported_too():
    class Pool(nn.Module):
        def forward(self, x, weight):
            return kernels.linear_pool(x, weight, None, None, 3, "relu")

    (x, weight, _), _, _ = problem((2, 7, 3, 4), torch.float32)
    program = torch.export.export(Pool(), (x, weight), dynamic_shapes=({1: torch.export.Dim("token")}, None))
    assert "infvit.linear_pool" in operations(program)
    longer = torch.cat([x, -x], 1)
    assert_close(program.module()(longer, weight), Pool()(longer, weight))


def test_compiled_in_one_graph_with_gradients():
    layer, x = layer_and_tokens()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (x, torch.cat([x, -x], 1)):
        assert_close(gradients(compiled, tokens), gradients(layer, tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    layer, x = layer_and_tokens()
    expected = gradients(layer, x)
    x = x.clone().requires_grad_()
    checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    assert_close([x.grad, *[p.grad for p in layer.parameters()]], list(expected))


def test_data_parallel(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layer, x = layer_and_tokens()
        expected = gradients(layer, x)[1:]
        DistributedDataParallel(layer)(x).square().sum().backward()
        assert_close([p.grad for p in layer.parameters()], list(expected))
    finally:
        torch.distributed.destroy_process_group()


def test_autocast_computes_the_projection_in_its_dtype(monkeypatch):
    seen = []
    pool = kernels.linear_pool
    monkeypatch.setattr("infvit.attention.linear.linear_pool", lambda *args: seen.append(args[:3]) or pool(*args))
    layer, x = layer_and_tokens()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
        layer.double()(x.double())
    assert [{t.dtype for t in arguments} for arguments in seen] == [{torch.bfloat16}, {torch.float64}]
    assert_close(out.double(), layer(x.double()), rtol=0, atol=5e-2)


def test_works_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *a: None if name == 'triton' else find(name, *a)\n"
        "import torch, infvit\nfrom infvit.attention import AttentionLayer\n"
        "layer = AttentionLayer(8, 2, mechanism='infsa_linear')\n"
        "layer(torch.randn(1, 3, 8)).sum().backward()\nprint(layer.qkv.weight.grad.abs().sum() > 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "tensor(True)\n", result.stderr


@pytest.mark.parametrize("bias", [True, False])
def test_projection_by_onednn_is_the_projection(bias):
    """Where this processor takes it, also of tokens and weights that do not lie contiguously."""
    (x, weight, b), _, _ = problem((2, 140, 2, 16), torch.float32)
    with torch.no_grad():
        for tokens, matrix in ((x, weight), (x.mT.contiguous().mT, weight.T), (x[:, ::3], weight[::2])):
            arguments = tokens, matrix, b[: len(matrix)].contiguous() if bias else None
            expected = torch.nn.functional.linear(*arguments)
            assert_close(kernels.project(*arguments), expected, rtol=1e-5, atol=1e-5)
            with torch.backends.mkldnn.flags(enabled=False):
                assert torch.equal(kernels.project(*arguments), expected)


def test_second_derivatives_are_refused_and_the_switch_gives_them():
    layer, x = layer_and_tokens()
    layer, x = layer.double(), x.double()[:1, :3].requires_grad_()
    with pytest.raises(NotImplementedError, match="fused = False"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    layer.core.fused = False
    assert torch.autograd.gradgradcheck(lambda x: layer(x), x)
