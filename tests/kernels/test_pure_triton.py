"""The Triton kernels of Pure InfSA against the formula: on a GPU, or on the CPU in Triton's interpreter."""

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, needs_no_interpreter, needs_triton, not_interpreted, run_in_interpreter
from pure_reference import compare, problem, reference, with_gradients
from torch.testing import assert_close

from infvit.attention import Mask
from infvit.attention.pure import choose_path, pure_infsa
from infvit.errors import ConfigError

FLOAT32, FLOAT16 = torch.float32, torch.float16
BFLOAT16 = pytest.param(torch.bfloat16, marks=not_interpreted)
TOLERANCE = {FLOAT32: 3e-5, FLOAT16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
SHAPES = [  # queries, keys, channels of q and k, of v: below, at and above one tile, ragged, rectangular
    (1, 1, 16, 16),
    (17, 17, 32, 32),
    (64, 64, 16, 16),
    (65, 65, 64, 64),
    (129, 129, 16, 16),
    (70, 33, 24, 40),
    (33, 130, 80, 16),
    (40, 40, 128, 128),
]


@pytest.mark.slow
@needs_no_interpreter
def test_in_the_interpreter():
    assert run_in_interpreter(__file__) >= 30


@needs_triton
@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, dtype):
    check(problem(*shape), dtype)


@needs_triton
@DTYPES
@pytest.mark.parametrize("tokens", [1, 17, 65, 129])
def test_causal(tokens, dtype):
    check(problem(tokens, tokens, 16, 16), dtype, causal=True)


@needs_triton
@DTYPES
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "abs"])
def test_activations(activation, causal, dtype):
    check(problem(37, 37, 16, 16), dtype, causal=causal, activation=activation)


@needs_triton
@pytest.mark.parametrize("causal", [False, True])
def test_causal_tiles_of_unequal_sides(causal, monkeypatch):
    from infvit.attention.kernels import pure_triton

    options = pure_triton._options
    for rows, columns in ((16, 32), (32, 16)):
        sides = {"ROWS": rows, "COLUMNS": columns}
        monkeypatch.setattr(pure_triton, "_options", lambda *args, sides=sides: {**options(*args), **sides})
        check(problem(50, 50, 16, 16), FLOAT32, causal=causal)


@needs_triton
@DTYPES
@pytest.mark.parametrize("causal", [False, True])
def test_padding(causal, dtype):
    real = torch.ones(2, 37, dtype=torch.bool)
    real[0, [0, 5, 35, 36]] = False
    q, k, v, grad = problem(37, 37, 16, 16)
    expected = with_gradients(lambda *x: reference(*x, "gelu", causal, real), q, k, v, grad)
    padded = ~real[:, None].expand(-1, 2, -1)
    for x in (q, k, v):
        x[padded] = float("nan")
    mask = Mask(real.to(DEVICE), real.to(DEVICE), causal=causal)
    q, k, v, grad = (x.to(DEVICE, dtype) for x in (q, k, v, grad))
    got = with_gradients(lambda *x: pure_infsa(*x, mask, activation="gelu", path="triton"), q, k, v, grad)
    compare(got, expected, TOLERANCE[dtype])
    assert not any(x[padded.to(DEVICE)].any() for x in got)


@needs_triton
@DTYPES
@pytest.mark.parametrize("factor", [1e-3, 100])
def test_scores_and_gradients_beyond_the_range_of_half_precision(factor, dtype):
    """Scores of 1e-6 and of 1e4, output gradients of 1e-3: the result is of ordinary size, so it must be right."""
    q, k, v, grad = problem(65, 65, 16, 16)
    q, k, v, grad = ((x * f).to(dtype).double() for x, f in ((q, factor), (k, factor), (v, 1), (grad, 1e-3)))
    expected = with_gradients(lambda *x: reference(*x, "relu", False), q, k, v, grad)
    got = with_gradients(run, *(x.to(DEVICE, dtype) for x in (q, k, v, grad)))
    for a, b in zip(got, expected, strict=True):
        tiny = torch.finfo(dtype).smallest_normal
        assert_close(a.double().cpu(), b, rtol=0, atol=10 * TOLERANCE[dtype] * b.abs().max().item() + tiny)


@needs_triton
@pytest.mark.parametrize("causal", [False, True])
def test_no_positive_score_gives_zero_and_touches_no_other_head(causal):
    q, k, v, grad = problem(17, 17, 16, 16)
    q[0, 0], k[0, 0] = 1, -1
    check((q, k, v, grad), FLOAT32, causal=causal)
    out, *grads = with_gradients(run, *(x.to(DEVICE, FLOAT32) for x in (q, k, v, grad)))
    assert not out[0, 0].any()
    assert not any(g[0, 0].any() for g in grads)


@needs_triton
@pytest.mark.parametrize("activation", ["relu", "gelu", "abs"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_nan_is_seen_in_its_head_and_nowhere_else(position, activation):
    inputs = problem(17, 17, 16, 16)
    inputs[position][0, 0, 3, 0] = float("nan")
    q, k, v, _ = (x.to(DEVICE, FLOAT32) for x in inputs)
    out = pure_infsa(q, k, v, activation=activation, path="triton")
    assert out[0, 0].isnan().any()
    assert out[0, 1].isfinite().all()
    assert out[1].isfinite().all()


@needs_triton
def test_strides_as_a_projection_leaves_them():
    q, k, v, grad = (x.to(DEVICE, FLOAT32) for x in problem(21, 21, 16, 16))
    expected = with_gradients(run, q, k, v, grad)
    fused = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)  # (B, N, 3, H, D)
    views = [*fused.permute(2, 0, 3, 1, 4).unbind(0), grad.mT.contiguous().mT]
    assert not any(x.is_contiguous() for x in views)
    for a, b in zip(with_gradients(run, *views), expected, strict=True):
        assert_close(a, b)


@needs_triton
def test_runs_repeat_bit_by_bit_and_empty_input_is_no_error():
    inputs = [x.to(DEVICE, FLOAT32) for x in problem(65, 65, 16, 16)]
    for a, b in zip(with_gradients(run, *inputs), with_gradients(run, *inputs), strict=True):
        assert torch.equal(a, b)
    assert run(*(x[:0] for x in inputs[:3])).shape == (0, 2, 65, 16)
    q, k, v, _ = inputs
    assert not run(q, k[:, :, :0], v[:, :, :0]).any()


@needs_triton
def test_channels_and_dtypes_that_the_kernels_do_not_take_are_refused():
    for inputs in (problem(3, 3, 129, 16), problem(3, 3, 16, 129), problem(3, 3, 16, 16)):
        dtype = torch.float64 if inputs[0].shape[-1] == inputs[2].shape[-1] else FLOAT32
        with pytest.raises(ConfigError, match="path='triton' takes up to 128 channels"):
            run(*(x.to(DEVICE, dtype) for x in inputs[:3]))


@pytest.mark.skipif(DEVICE != "cuda" or INTERPRETED, reason="no CUDA device")
@DTYPES
def test_opcheck_and_choice_on_a_gpu(dtype):
    from infvit.attention.kernels.pure_op import pure_infsa_op

    q, k, v, _ = (x.to(DEVICE, dtype).requires_grad_() for x in problem(33, 33, 32, 32))
    assert choose_path(q, v, Mask(), 0.0) == "triton"
    torch.library.opcheck(pure_infsa_op, (q, k, v, "relu", False, "triton"))


@pytest.mark.skipif(DEVICE != "cuda" or INTERPRETED, reason="no CUDA device")
def test_tf32_follows_torch(monkeypatch):
    q, k, v, _ = (x.to(DEVICE, FLOAT32) for x in problem(129, 129, 64, 64))
    exact = run(q, k, v)
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    rounded = run(q, k, v)
    assert not torch.equal(rounded, exact)
    assert_close(rounded, exact, rtol=0, atol=5e-3 * exact.abs().max().item())


def run(q, k, v):
    return pure_infsa(q, k, v, path="triton")


def check(inputs, dtype, causal=False, activation="relu"):
    """Compares values and gradients in `dtype` with the formula in float64 on the same rounded inputs."""
    inputs = [x.to(dtype).double() for x in inputs]
    expected = with_gradients(lambda *x: reference(*x, activation, causal), *inputs)
    mask = Mask(causal=causal)
    got = with_gradients(
        lambda *x: pure_infsa(*x, mask, activation=activation, path="triton"), *(x.to(DEVICE, dtype) for x in inputs)
    )
    assert all(x.dtype == dtype for x in got)
    compare(got, expected, TOLERANCE[dtype])


@needs_no_interpreter
@pytest.mark.parametrize(
    ("dtype", "dim", "precision"),
    [(torch.bfloat16, 64, "ieee"), (FLOAT16, 16, "ieee"), (FLOAT32, 128, "tf32")],
    ids=["bfloat16", "float16", "tf32"],
)
def test_compiles_for_a_gpu_without_one(dtype, dim, precision, tmp_path, monkeypatch):
    """To machine code of compute capability 8.0, within the shared memory of the smallest such GPU (8.6: 99 KB)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from infvit.attention.kernels import pure_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointer = {FLOAT32: "*fp32", FLOAT16: "*fp16", torch.bfloat16: "*bf16"}[dtype]
    kinds = dict.fromkeys(("q", "k", "v", "grad", "dq", "dk", "dv"), pointer) | {"scale": "fp32"}
    kinds |= dict.fromkeys(("product", "squares", "divisor", "tail"), "*fp32")
    x = torch.empty(1, 1, 1, dim, dtype=dtype)
    constants = {**pure_triton._options(x, x, "gelu", True), "PRECISION": precision}
    for kernel in (pure_triton._forward, pure_triton._backward_q, pure_triton._backward_kv):
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
        source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
        compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=pure_triton.LAUNCH)
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= 99 * 1024
