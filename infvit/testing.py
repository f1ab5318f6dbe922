"""The contract of an attention mechanism, as checks that raise AssertionError. Our tests run them over the registry.

For a mechanism of your own: `python -m infvit.testing my_linear --imports my_pkg.attention`, or in your tests

    @pytest.mark.parametrize("check", infvit.testing.CHECKS, ids=lambda check: check.__name__)
    def test_contract(check):
        check("my_linear")

Each check takes the name of a registered mechanism and, optionally, its hyperparameters. What `capabilities` declares
is checked for values and gradients; what it does not declare must raise ConfigError when asked for.
"""

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.testing import assert_close

from infvit.attention import (
    NO_MASK,
    AttentionLayer,
    Mask,
    Mechanism,
    get_mechanism,
    hyperparameters,
    list_mechanisms,
)
from infvit.errors import ConfigError

LENGTHS = (1, 2, 15, 16, 17, 197)
TOKENS = 7
HEADS = 2
DIM = 4
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}  # of sums in float64 whose order differs


def check_values(name: str, **args: Any) -> None:
    """Shapes, and the reference's values in float64, at many numbers of queries, keys, heads and value channels."""
    cross = get_mechanism(name).capabilities.cross
    for heads, keys, value_dim in product((1, 3), LENGTHS, (DIM, DIM + 1)):
        core = build(name, args, heads=heads, tokens=keys)
        for queries in LENGTHS if cross else (keys,):
            q, k, v = inputs(queries, keys, heads=heads, value_dim=value_dim)
            out = core(q, k, v)
            assert out.shape == (2, heads, queries, value_dim), f"output of shape {tuple(out.shape)}"
            assert_close(out, core.reference(q, k, v, **args), **EXACT)


def check_any_length(name: str, **args: Any) -> None:
    """A mechanism that is built for one number of tokens refuses every other."""
    if not get_mechanism(name).capabilities.any_length:
        core = build(name, args)
        _refused(lambda: core(*inputs(TOKENS + 1)), "any_length")


def check_dtypes(name: str, **args: Any) -> None:
    """The dtype of the input comes out, with the right value, whether parameters have that dtype or float32."""
    for dtype, atol in {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}.items():
        q, k, v = inputs(dtype=dtype)
        expected = build(name, args)(q.double(), k.double(), v.double())
        for parameters in {dtype, torch.promote_types(dtype, torch.float32)}:
            out = build(name, args, dtype=parameters)(q, k, v)
            assert out.dtype == dtype, f"{dtype} in, {out.dtype} out"
            assert_close(out.double(), expected, rtol=0, atol=atol)


def check_gradients(name: str, **args: Any) -> None:
    """Gradients of q, k and v against the reference's; theirs and every parameter's against finite differences."""
    core = build(name, args)
    leaves = inputs(value_dim=3, grad=True)
    weight = _random(2, HEADS, TOKENS, 3)
    got = torch.autograd.grad((core(*leaves) * weight).sum(), leaves)
    expected = torch.autograd.grad((core.reference(*leaves, **args) * weight).sum(), leaves)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, rtol=1e-11, atol=1e-12)

    core = build(name, args, dim=3, tokens=4)
    names = [n for n, _ in core.named_parameters()]
    tensors = [*inputs(4, dim=3, value_dim=2, grad=True)]
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
    q, k, v = inputs()
    weight = _random(2, HEADS, TOKENS, DIM)
    expected = gradients(core, (q, k, v), NO_MASK, weight)
    # As a layer's projection leaves them, every second channel of a wider tensor, and transposed.
    q, k = q.transpose(1, 2).contiguous().transpose(1, 2), k.repeat_interleave(2, -1)[..., ::2]
    v, weight = v.mT.contiguous().mT, weight.mT.contiguous().mT
    _all_close(gradients(core, (q, k, v), NO_MASK, weight), expected)


def check_degenerate(name: str, **args: Any) -> None:
    """Negative scores only, or all-zero queries and keys: finite values and gradients, other samples untouched."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        core = build(name, args, dtype=dtype)
        q, k, v = inputs(batch=3, dtype=dtype)
        q[0], k[0] = 1, -1
        q[1], k[1] = 0, 0
        weight = _random(3, HEADS, TOKENS, DIM).to(dtype)
        with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either
            mixed = gradients(core, (q, k, v), NO_MASK, weight)
            masked = [gradients(core, (q[:2], k[:2], v[:2]), mask, weight[:2]) for mask in declared_masks(core)]
        for result in (*mixed, *chain(*masked)):
            assert result.isfinite().all(), f"value or gradient not finite in {dtype}"
        if dtype == torch.float64:
            alone = gradients(core, (q[2:], k[2:], v[2:]), NO_MASK, weight[2:])
            _all_close([x[2:] for x in mixed[:4]], alone[:4])


def check_nan(name: str, **args: Any) -> None:
    """NaN in gives NaN out, in that head of that sample and nowhere else."""
    core = build(name, args)
    clean = inputs()
    for mask, position in product(declared_masks(core), range(3)):
        expected = core(*clean, mask)
        poisoned = [x.clone() for x in clean]
        poisoned[position][0, 0, 3, 0] = float("nan")
        out = core(*poisoned, mask)
        assert out[0, 0].isnan().any(), f"NaN in {'qkv'[position]} is hidden"
        _all_close([out[0, 1], out[1]], [expected[0, 1], expected[1]])


def check_half_precision(name: str, **args: Any) -> None:
    """At 4096 tokens float16 and bfloat16 stay within 1 % of float64, also at 100 times normal input; gradients 3 %."""
    tokens, dim = 4096, 8
    for dtype, factor in product((torch.float16, torch.bfloat16), (1, 100)):
        half = [(x * factor).to(dtype) for x in inputs(tokens, batch=1, heads=1, dim=dim)]
        weight = _random(1, 1, tokens, dim).to(dtype)
        core, exact = (build(name, args, heads=1, dim=dim, tokens=tokens, dtype=d) for d in (dtype, torch.float64))
        exact.load_state_dict(core.state_dict())  # the same rounded parameters
        got = gradients(core, half, NO_MASK, weight)
        expected = gradients(exact, [x.double() for x in half], NO_MASK, weight.double())
        for a, b in zip(got, expected, strict=True):
            assert a.isfinite().all(), f"not finite in {dtype} at {factor} times normal input"
            tiny = torch.finfo(dtype).smallest_normal  # below it float16 has few digits, or none
            relative = 1e-2 if a is got[0] else 3e-2  # fused kernels read their own rounded output in the backward pass
            assert_close(a.double(), b, rtol=0, atol=relative * b.abs().max().item() + tiny)


def check_autocast(name: str, **args: Any) -> None:
    """Under autocast the mechanism computes as without it, and a layer stays near its float32 output."""
    core, layer = build(name, args, dtype=torch.float32), build_layer(name, args, dtype=torch.float32)
    q, k, v = inputs(dtype=torch.float32)
    x = _random(2, TOKENS, HEADS * DIM).float()
    with torch.autocast("cpu", torch.bfloat16):
        out, mixed = core(q, k, v), layer(x)
    assert_close(out, core(q, k, v), rtol=1e-6, atol=1e-6)
    assert_close(mixed.float(), layer(x), rtol=0, atol=5e-2)
    mixed.float().square().sum().backward()
    for n, p in layer.named_parameters():
        assert p.grad is None or p.grad.isfinite().all(), f"gradient of {n} not finite"


def check_dropout(name: str, **args: Any) -> None:
    """`attn_drop` keeps the expectation in training and is off in evaluation; or the constructor refuses it."""
    q, k, v = inputs(batch=1)
    plain = build(name, args)(q, k, v)
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


def check_padding(name: str, **args: Any) -> None:
    """Real tokens, values and gradients, as if the padded were not there; nothing leaks from those, NaN included."""
    core = build(name, args)
    declared = core.capabilities
    if not declared.padding:
        real = torch.ones(2, TOKENS, dtype=torch.bool)
        _refused(lambda: core(*inputs(), Mask(keys=real)), "padding of keys")
        _refused(lambda: core(*inputs(), Mask(queries=real)), "padding of queries")
        return
    real = torch.ones(3, TOKENS, dtype=torch.bool)
    real[0, [0, 3, 6]] = False  # the first, one amid the others, the last
    real[2] = False
    padded = ~real[:, None].expand(-1, HEADS, -1)
    weight = _random(3, HEADS, TOKENS, DIM)
    for causal, fill in product(sorted({False, declared.causal}), (1e3, float("nan"), float("inf"))):
        qkv = [torch.where(real[:, None, :, None], x, fill) for x in inputs(batch=3)]
        got = gradients(core, qkv, Mask(keys=real, queries=real, causal=causal), weight)
        for result in got[:4]:
            assert not result[padded].any(), f"output or gradient at padded positions that hold {fill}"
        for result in got[4:]:
            assert result.isfinite().all(), f"{fill} at padded positions leaks into the gradient of a parameter"
        if declared.any_length:
            _equals_removed(core, qkv, weight, got, real, real, causal)


def check_causal(name: str, **args: Any) -> None:
    """Position i knows positions 0..i only, by value and by gradient; every prefix stands for itself."""
    core = build(name, args)
    declared = core.capabilities
    if not declared.causal:
        _refused(lambda: core(*inputs(), Mask(causal=True)), "causal")
        return
    causal = Mask(causal=True)
    if declared.cross:
        _refused(lambda: core(*inputs(TOKENS - 1, TOKENS), causal), "a causal mask over M != N")
    leaves = inputs(grad=True)
    out = core(*leaves, causal)
    for i in range(TOKENS):
        for x, grad in zip(leaves, torch.autograd.grad(out[:, :, i].sum(), leaves, retain_graph=True), strict=True):
            assert not grad[:, :, i + 1 :].any(), f"position {i} has a gradient to later ones"
            assert x is leaves[0] or i == 0 or grad[:, :, :i].any(), f"position {i} does not see earlier ones"
        later = [torch.cat([x[:, :, : i + 1], 1e3 * x[:, :, i + 1 :]], 2) for x in leaves]
        assert_close(core(*later, causal)[:, :, : i + 1], out[:, :, : i + 1], **EXACT)
        if declared.any_length:
            assert_close(core(*(x[:, :, : i + 1] for x in leaves), causal), out[:, :, : i + 1], **EXACT)


def check_pairwise(name: str, **args: Any) -> None:
    """An excluded pair carries no value; a key that nobody may see is not there; a query that sees no key gets 0."""
    core = build(name, args)
    declared = core.capabilities
    every = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    if not declared.pairwise:
        _refused(lambda: core(*inputs(), Mask(pairs=every)), "pairwise")
        return
    q, k, v = inputs(grad=True)
    assert_close(core(q, k, v, Mask(pairs=every)), core(q, k, v), **EXACT)
    unseen = 2
    pairs = _pairs(2, TOKENS)
    pairs[..., unseen] = False
    for causal in sorted({False, declared.causal}):
        mask = Mask(pairs=pairs, causal=causal)
        out = core(q, k, v, mask)
        allowed = mask.allowed(TOKENS, TOKENS, q.device)
        assert allowed is not None
        assert not out[~allowed.any(-1)].any(), "a query that sees no key has an output"
        for i in range(TOKENS):
            (grad,) = torch.autograd.grad(out[:, :, i].sum(), v, retain_graph=True)
            assert not grad[~allowed[:, :, i]].any(), "an excluded pair carries a value"
        changed = [x.detach().clone() for x in (k, v)]
        for x in changed:
            x[:, :, unseen] += 10
        assert_close(core(q, *changed, mask), out, **EXACT)
    if declared.cross and declared.any_length:
        kept = [j for j in range(TOKENS) if j != unseen]
        removed = core(q, k[:, :, kept], v[:, :, kept], Mask(pairs=pairs[..., kept]))
        assert_close(removed, core(q, k, v, Mask(pairs=pairs)), **EXACT)
    for shared in (pairs[0, 0], pairs[:1, :1], pairs[:, :1], pairs[:1]):
        full = shared.broadcast_to(2, HEADS, TOKENS, TOKENS)
        assert_close(core(q, k, v, Mask(pairs=shared)), core(q, k, v, Mask(pairs=full)), **EXACT)


def check_cross(name: str, **args: Any) -> None:
    """More keys than queries and the reverse, each with a padding mask of its own. Values: see `check_values`."""
    core = build(name, args)
    declared = core.capabilities
    if not declared.cross:
        _refused(lambda: core(*inputs(TOKENS - 3, TOKENS)), "cross")
        _refused(lambda: core(*inputs(TOKENS, TOKENS - 3)), "cross")
        return
    for queries, keys in ((TOKENS - 3, TOKENS), (TOKENS, TOKENS - 3)):
        qkv = inputs(queries, keys)
        if declared.padding and declared.any_length:
            real_queries, real_keys = torch.rand(2, 2, TOKENS, generator=_generator()) > 0.3
            real_queries, real_keys = real_queries[:, :queries], real_keys[:, :keys]
            weight = _random(2, HEADS, queries, DIM)
            for q_mask, k_mask in ((real_queries, real_keys), (real_queries, None), (None, real_keys)):
                got = gradients(core, qkv, Mask(queries=q_mask, keys=k_mask), weight)
                _equals_removed(core, qkv, weight, got, q_mask, k_mask)


def check_permutation_equivariant(name: str, **args: Any) -> None:
    """Permuting the tokens permutes the output; permuting keys and values alone changes nothing."""
    core = build(name, args)
    if core.capabilities.permutation_equivariant:
        q, k, v = inputs()
        order = torch.randperm(TOKENS, generator=_generator())
        out = core(q, k, v)
        assert_close(core(q[:, :, order], k[:, :, order], v[:, :, order]), out[:, :, order], **EXACT)
        assert_close(core(q, k[:, :, order], v[:, :, order]), out, **EXACT)


def check_matrix(name: str, **args: Any) -> None:
    """`output = matrix @ v` for every v, under every declared mask."""
    core = build(name, args)
    q, k, _ = inputs()
    if not core.capabilities.matrix:
        _refused(lambda: core.matrix(q, k), "matrix")
        return
    for mask in declared_masks(core):
        identity = torch.eye(TOKENS).double().expand(2, HEADS, -1, -1)
        assert_close(core.matrix(q, k, mask), core(q, k, identity, mask), **EXACT)
    if core.capabilities.cross:
        q, k, v = inputs(TOKENS - 2, TOKENS)
        assert_close(core.matrix(q, k) @ v, core(q, k, v), **EXACT)
    half = build(name, args, dtype=torch.float16).matrix(q.half(), k.half())
    assert half.dtype == torch.float32, f"float16 input gives a matrix in {half.dtype}, not in float32"


def check_token_map(name: str, **args: Any) -> None:
    """Each kind of token map: one finite value per key and head, 0 at padded keys, unknown kinds refused."""
    core = build(name, args)
    q, k, _ = inputs()
    if not core.capabilities.token_map:
        _refused(lambda: core.token_map(q, k), "token_map")
        return
    _refused(lambda: core.token_map(q, k, kind="no_such_kind"), "an unknown kind of token map")
    assert_close(core.token_map(q, k), core.token_map(q, k, kind=core.token_maps[0]))
    for kind in core.token_maps:
        assert core.token_map(q, k, kind=kind).shape == (2, HEADS, TOKENS)
        assert core.token_map(q, k, kind=kind).any(-1).all(), f"token map {kind!r} is all zero"
        for mask in declared_masks(core):
            assert core.token_map(q, k, mask, kind).isfinite().all(), f"token map {kind!r} is not finite"
        if core.capabilities.padding and core.capabilities.any_length:
            real = torch.tensor([True] * (TOKENS - 2) + [False] * 2)
            mask = Mask(keys=real.expand(2, -1), queries=real.expand(2, -1))
            filled_q, filled_k = (torch.where(real[:, None], x, float("nan")) for x in (q, k))
            short = core.token_map(q[:, :, real], k[:, :, real], kind=kind)
            assert_close(core.token_map(filled_q, filled_k, mask, kind), F.pad(short, (0, 2)), **EXACT)


def check_layer(name: str, **args: Any) -> None:
    """In our layer: every parameter gets a gradient, masks count, and absorbed projections change nothing."""
    x, weight = _random(2, TOKENS, HEADS * DIM), _random(2, TOKENS, HEADS * DIM)
    real = torch.arange(TOKENS) < torch.tensor([[TOKENS - 2], [TOKENS]])
    padding = real[:, None, None]
    declared = get_mechanism(name).capabilities
    for tie_key, bias in product((None, True, False), (True, False)):
        layer = build_layer(name, args, tie_key=tie_key, qkv_bias=bias)
        trained = [p for p in layer.parameters() if p.requires_grad]
        plain = build_layer(name, args, tie_key=tie_key, qkv_bias=bias)
        plain.core.absorbs = lambda mask: False  # type: ignore[method-assign]
        for attn_mask in (None, padding) if declared.padding else (None,):
            out = layer(x, attn_mask)
            grads = torch.autograd.grad((out * weight).sum(), trained)
            expected = torch.autograd.grad(
                (plain(x, attn_mask) * weight).sum(), [p for p in plain.parameters() if p.requires_grad]
            )
            _all_close([out, *grads], [plain(x, attn_mask), *expected])
            for (n, _), grad in zip(layer.named_parameters(), grads, strict=False):
                assert grad.any(), f"{n} gets no gradient"
            if attn_mask is not None:
                assert not out[~real].any(), "output at padded positions"
    masks: dict[str, tuple[Any, ...]] = {
        "padding": (padding,),
        "pairwise": (_pairs(2, TOKENS),),
        "causal": (None, True),
    }
    for capability, mask in masks.items():
        if getattr(declared, capability):
            assert not torch.allclose(layer(x, *mask), layer(x)), f"the layer ignores a {capability} mask"
        else:
            _refused(partial(layer, x, *mask), f"{capability} in a layer")


def check_meta_device(name: str, **args: Any) -> None:
    """A mechanism made on the meta device gets its values from `reset_parameters` of its modules."""
    core = build(name, args, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for p in core.parameters():
            p.fill_(float("nan"))
    for module in core.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
    for n, p in core.named_parameters():
        assert p.isfinite().all(), f"parameter {n} is not set by any reset_parameters"
    assert core(*inputs()).isfinite().all()


def check_export(name: str, **args: Any) -> None:
    """`torch.export`, with a dynamic number of tokens for any length; mechanism and layer."""
    core, layer = build(name, args), build_layer(name, args)
    any_length = core.capabilities.any_length
    token = torch.export.Dim("token")
    for module, count in ((core, 3), (layer, 1)):
        examples = {n: inputs(n) if count == 3 else (_random(2, n, HEADS * DIM),) for n in (TOKENS, 5, 16)}
        shapes = tuple({x.ndim - 2: token} for x in examples[TOKENS]) if any_length else None
        exported = torch.export.export(module, examples[TOKENS], dynamic_shapes=shapes).module()
        for tokens in examples if any_length else (TOKENS,):
            assert_close(exported(*examples[tokens]), module(*examples[tokens]), **EXACT)


def check_compile(name: str, **args: Any) -> None:
    """`torch.compile` with Inductor, in one graph, forward and backward, mechanism and layer. Takes long."""
    core, layer = build(name, args, dtype=torch.float32), build_layer(name, args, dtype=torch.float32)
    leaves = [*inputs(dtype=torch.float32), _random(2, TOKENS, HEADS * DIM).float()]
    leaves = [x.requires_grad_() for x in leaves]
    leaves += [p for m in (core, layer) for p in m.parameters() if p.requires_grad]

    def run(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return core(q, k, v).square().sum() + layer(x).square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True)(*leaves[:4])
    expected = run(*leaves[:4])
    assert_close(compiled, expected, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(compiled, leaves)
    for a, b in zip(got, torch.autograd.grad(expected, leaves), strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-4)


Check = Callable[..., None]
CHECKS: tuple[Check, ...] = (
    check_values,
    check_any_length,
    check_dtypes,
    check_gradients,
    check_strides,
    check_degenerate,
    check_nan,
    check_half_precision,
    check_autocast,
    check_dropout,
    check_padding,
    check_causal,
    check_pairwise,
    check_cross,
    check_permutation_equivariant,
    check_matrix,
    check_token_map,
    check_layer,
    check_meta_device,
    check_export,
    check_compile,
)


def build(
    name: str,
    args: dict[str, Any],
    heads: int = HEADS,
    dim: int = DIM,
    tokens: int = TOKENS,
    attn_drop: float = 0.0,
    dtype: torch.dtype = torch.float64,
    device: str | None = None,
) -> Mechanism:
    """Returns a mechanism in evaluation mode; the same parameters at every call."""
    torch.manual_seed(0)
    cls = get_mechanism(name)
    return cls(heads, dim, attn_drop, dtype=dtype, device=device, **_with_tokens(cls, args, tokens)).eval()


def build_layer(name: str, args: dict[str, Any], dtype: torch.dtype = torch.float64, **kwargs: Any) -> AttentionLayer:
    """Returns a layer around a mechanism, with biases that are not zero; the same parameters at every call."""
    torch.manual_seed(0)
    args = _with_tokens(get_mechanism(name), args, TOKENS)
    kwargs = {"qkv_bias": True, **kwargs}
    return AttentionLayer(HEADS * DIM, HEADS, dtype=dtype, mechanism=name, mechanism_args=args, **kwargs)


def inputs(
    queries: int = TOKENS,
    keys: int | None = None,
    batch: int = 2,
    heads: int = HEADS,
    dim: int = DIM,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float64,
    grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k, v from a fixed seed."""
    keys = queries if keys is None else keys
    shapes = (queries, dim), (keys, dim), (keys, value_dim or dim)
    q, k, v = (_random(batch, heads, *shape, seed=i).to(dtype).requires_grad_(grad) for i, shape in enumerate(shapes))
    return q, k, v


def declared_masks(core: Mechanism, tokens: int = TOKENS) -> list[Mask]:
    """Returns masks of every declared kind and combination, for a batch of 2."""
    declared = core.capabilities
    real = torch.ones(2, tokens, dtype=torch.bool)
    real[0, 1] = real[0, -1] = False
    kinds = product(
        sorted({False, declared.padding}), sorted({False, declared.pairwise}), sorted({False, declared.causal})
    )
    return [
        Mask(
            keys=real if padding else None,
            queries=real if padding else None,
            pairs=_pairs(2, tokens) if pairwise else None,
            causal=causal,
        )
        for padding, pairwise, causal in kinds
    ]


def gradients(core: Mechanism, qkv: Sequence[Tensor], mask: Mask, weight: Tensor) -> list[Tensor]:
    """Returns the output and the gradients of `sum(output * weight)`: of q, k, v and the trained parameters."""
    leaves = [x.detach().requires_grad_() for x in qkv] + [p for p in core.parameters() if p.requires_grad]
    out = core(*leaves[:3], mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


def _equals_removed(
    core: Mechanism,
    qkv: Sequence[Tensor],
    weight: Tensor,
    got: list[Tensor],
    real_queries: Tensor | None,
    real_keys: Tensor | None,
    causal: bool = False,
) -> None:
    """Asserts that `got`, of a padded batch, is what its samples give alone and without their padded tokens."""
    parameters = [torch.zeros_like(x) for x in got[4:]]
    for i in range(len(weight)):
        queries = slice(None) if real_queries is None else real_queries[i]
        keys = slice(None) if real_keys is None else real_keys[i]
        if not qkv[0][i, :, queries].numel() or not qkv[1][i, :, keys].numel():
            continue
        parts = [(x[i], where) for x, where in zip((weight, *qkv), (queries, queries, keys, keys), strict=True)]
        short, *alone = (x[None, :, where] for x, where in parts)
        expected = gradients(core, alone, Mask(causal=causal), short)
        _all_close([x[i : i + 1, :, where] for x, (_, where) in zip(got[:4], parts, strict=True)], expected[:4])
        for total, grad in zip(parameters, expected[4:], strict=True):
            total += grad
    _all_close(got[4:], parameters)


def _all_close(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, **EXACT)


def _refused(call: Callable[[], Any], what: str) -> None:
    try:
        call()
    except ConfigError:
        return
    raise AssertionError(f"{what}: not declared, or without meaning, but no ConfigError")


def _with_tokens(cls: type[Mechanism], args: dict[str, Any], tokens: int) -> dict[str, Any]:
    return {**args, "num_tokens": tokens} if "num_tokens" in hyperparameters(cls) else args


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _random(*shape: int, seed: int = 9) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=_generator(seed))


def _pairs(batch: int, tokens: int) -> Tensor:
    """Returns allowed pairs that differ between samples and heads; query 1 may see no key."""
    pairs = torch.rand(batch, HEADS, tokens, tokens, generator=_generator()) > 0.3
    pairs[..., 1, :] = False
    return pairs


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all checks on mechanisms and prints one line for each; the exit status is 1 if any fails."""
    parser = argparse.ArgumentParser(prog="python -m infvit.testing", description=main.__doc__)
    parser.add_argument("names", nargs="*", help="registered mechanisms; all by default")
    parser.add_argument("--imports", nargs="*", default=[], help="modules to import first")
    options = parser.parse_args(argv)
    for module in options.imports:
        import_module(module)
    failed = 0
    for name, check in product(options.names or list_mechanisms(), CHECKS):
        try:
            check(name)
            print(f"{name} {check.__name__}: ok", flush=True)
        except Exception:
            failed += 1
            print(f"{name} {check.__name__}: FAILED\n{traceback.format_exc()}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
