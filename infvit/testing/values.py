"""What a mechanism computes: values, gradients, degenerate input, precision, dropout."""

from itertools import chain, product
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.testing import assert_close

from infvit.attention import NO_MASK, Mask, get_mechanism
from infvit.errors import ConfigError
from infvit.testing.cases import (
    DIM,
    EXACT,
    HEADS,
    LENGTHS,
    TOKENS,
    all_close,
    build,
    build_layer,
    declared_masks,
    gradients,
    inputs_of,
    random,
    refused,
)


def check_values(name: str, **args: Any) -> None:
    """Shapes, and the reference's values in float64, at many numbers of queries, keys, heads and value channels."""
    cross = get_mechanism(name).capabilities.cross
    for heads, keys, value_dim in product((1, 3), LENGTHS, (DIM, DIM + 1)):
        core = build(name, args, heads=heads, tokens=keys)
        for queries in LENGTHS if cross else (keys,):
            q, k, v = inputs_of(core, queries, keys, value_dim=value_dim)
            out = core(q, k, v)
            assert out.shape == (2, heads, queries, value_dim), f"output of shape {tuple(out.shape)}"
            assert_close(out, core.reference(q, k, v, **args), **EXACT)


def check_any_length(name: str, **args: Any) -> None:
    """A mechanism that is built for one number of tokens refuses every other."""
    if not get_mechanism(name).capabilities.any_length:
        core = build(name, args)
        refused(lambda: core(*inputs_of(core, TOKENS + 1)), "any_length")


def check_dtypes(name: str, **args: Any) -> None:
    """The dtype of the input comes out, with the right value, whether parameters have that dtype or float32."""
    for dtype, atol in {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}.items():
        for parameters in {dtype, torch.promote_types(dtype, torch.float32)}:
            core, exact = build(name, args, dtype=parameters), build(name, args)
            q, k, v = inputs_of(core, dtype=dtype)
            exact.load_state_dict(core.state_dict())  # drawn parameters differ between dtypes
            expected = exact(q.double(), k.double(), v.double())
            out = core(q, k, v)
            assert out.dtype == dtype, f"{dtype} in, {out.dtype} out"
            assert_close(out.double(), expected, rtol=0, atol=atol)


def check_gradients(name: str, **args: Any) -> None:
    """Gradients of q, k and v against the reference's; theirs and every parameter's against finite differences."""
    core = build(name, args)
    leaves = inputs_of(core, value_dim=3, grad=True)
    weight = random(2, HEADS, TOKENS, 3)
    got = torch.autograd.grad((core(*leaves) * weight).sum(), leaves)
    expected = torch.autograd.grad((core.reference(*leaves, **args) * weight).sum(), leaves)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, rtol=1e-11, atol=1e-12)

    core = build(name, args, dim=3, tokens=4)
    names = [n for n, _ in core.named_parameters()]
    tensors = [*inputs_of(core, 4, value_dim=2, grad=True)]
    tensors += [p.detach().requires_grad_() for p in core.parameters()]
    for mask in declared_masks(core, 4):

        def call(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor, mask: Mask = mask) -> Tensor:
            return functional_call(core, dict(zip(names, parameters, strict=True)), (q, k, v, mask))

        assert torch.autograd.gradcheck(call, tensors)
        grads = torch.autograd.grad(call(*tensors).square().sum(), tensors)
        for n, grad in zip(names, grads[3:], strict=True):
            assert grad.any(), f"parameter {n} gets no gradient"


def check_strides(name: str, **args: Any) -> None:
    """Inputs and output gradients that do not lie contiguously in memory."""
    core = build(name, args)
    q, k, v = inputs_of(core)
    weight = random(2, HEADS, TOKENS, DIM)
    expected = gradients(core, (q, k, v), NO_MASK, weight)
    # As a layer's projection leaves them, every second channel of a wider tensor, and transposed.
    q, k = q.transpose(1, 2).contiguous().transpose(1, 2), k.repeat_interleave(2, -1)[..., ::2]
    v, weight = v.mT.contiguous().mT, weight.mT.contiguous().mT
    all_close(gradients(core, (q, k, v), NO_MASK, weight), expected)


def check_degenerate(name: str, **args: Any) -> None:
    """Negative scores only, or all-zero queries and keys: finite values and gradients, other samples untouched."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        core = build(name, args, dtype=dtype)
        q, k, v = inputs_of(core, batch=3, dtype=dtype)
        q[0], k[0] = 1, -1
        q[1], k[1] = 0, 0
        weight = random(3, HEADS, TOKENS, DIM).to(dtype)
        with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either
            mixed = gradients(core, (q, k, v), NO_MASK, weight)
            masked = [gradients(core, (q[:2], k[:2], v[:2]), mask, weight[:2]) for mask in declared_masks(core)]
        for result in (*mixed, *chain(*masked)):
            assert result.isfinite().all(), f"value or gradient not finite in {dtype}"
        if dtype == torch.float64:
            alone = gradients(core, (q[2:], k[2:], v[2:]), NO_MASK, weight[2:])
            all_close([x[2:] for x in mixed[:4]], alone[:4])


def check_nan(name: str, **args: Any) -> None:
    """NaN in gives NaN out, in that head of that sample and nowhere else."""
    core = build(name, args)
    clean = inputs_of(core)
    for mask, position, channel in product(declared_masks(core), range(3), (0, -1)):
        expected = core(*clean, mask)
        poisoned = [x.clone() for x in clean]
        poisoned[position][0, 0, 3, channel] = float("nan")
        out = core(*poisoned, mask)
        assert out[0, 0].isnan().any(), f"NaN in {'qkv'[position]} is hidden"
        all_close([out[0, 1], out[1]], [expected[0, 1], expected[1]])


def check_half_precision(name: str, **args: Any) -> None:
    """At 4096 tokens float16 and bfloat16 stay within 1 % of float64, also at 100 times normal input; gradients 3 %."""
    tokens, dim = 4096, 8
    for dtype, factor in product((torch.float16, torch.bfloat16), (1, 100)):
        core, exact = (build(name, args, heads=1, dim=dim, tokens=tokens, dtype=d) for d in (dtype, torch.float64))
        half = [(x * factor).to(dtype) for x in inputs_of(core, tokens, batch=1)]
        weight = random(1, 1, tokens, dim).to(dtype)
        exact.load_state_dict(core.state_dict())  # the same rounded parameters
        got = gradients(core, half, NO_MASK, weight)
        expected = gradients(exact, [x.double() for x in half], NO_MASK, weight.double())
        for a, b in zip(got, expected, strict=True):
            within = b.abs() < torch.finfo(dtype).max / 2  # a parameter's gradient, a sum over tokens, can be beyond
            assert b.isfinite().all(), f"not finite in float64 at {factor} times normal input"
            assert a[within].isfinite().all(), f"not finite in {dtype} at {factor} times normal input"
            tiny = torch.finfo(dtype).smallest_normal  # below it float16 has few digits, or none
            relative = 1e-2 if a is got[0] else 3e-2  # fused kernels read their own rounded output in the backward pass
            assert_close(a[within].double(), b[within], rtol=0, atol=relative * b.abs().max().item() + tiny)


def check_autocast(name: str, **args: Any) -> None:
    """Under autocast the mechanism computes as without it, and a layer stays near its float32 output."""
    core, layer = build(name, args, dtype=torch.float32), build_layer(name, args, dtype=torch.float32)
    q, k, v = inputs_of(core, dtype=torch.float32)
    x = random(2, TOKENS, HEADS * DIM).float()
    with torch.autocast("cpu", torch.bfloat16):
        out, mixed = core(q, k, v), layer(x)
    assert_close(out, core(q, k, v), rtol=1e-6, atol=1e-6)
    assert_close(mixed.float(), layer(x), rtol=0, atol=5e-2)
    mixed.float().square().sum().backward()
    for n, p in layer.named_parameters():
        assert p.grad is None or p.grad.isfinite().all(), f"gradient of {n} not finite"


def check_dropout(name: str, **args: Any) -> None:
    """`attn_drop` keeps the expectation in training and is off in evaluation; or the constructor refuses it."""
    core = build(name, args)
    q, k, v = inputs_of(core, batch=1)
    plain = core(q, k, v)
    assert_close(build(name, args).train()(q, k, v), plain, **EXACT)
    try:
        core = build(name, args, attn_drop=0.4)
    except ConfigError:
        return
    assert_close(core(q, k, v), plain, **EXACT)
    torch.manual_seed(0)
    draws = 4096
    dropped = core.train()(*(x.expand(draws, -1, -1, -1) for x in (q, k, v)))
    error = dropped.std(0) / draws**0.5
    assert (error > 1e-6).any(), "attn_drop has no effect"
    assert ((dropped.mean(0) - plain[0]).abs() <= 5 * error + 1e-9).all(), "attn_drop changes the expectation"
