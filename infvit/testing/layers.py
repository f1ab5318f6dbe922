"""A mechanism in our layer, on the meta device, exported and compiled."""

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from infvit.attention import get_mechanism
from infvit.testing.cases import (
    DIM,
    EXACT,
    HEADS,
    TOKENS,
    all_close,
    build,
    build_layer,
    inputs_of,
    random,
    random_pairs,
    refused,
)


def check_layer(name: str, **args: Any) -> None:
    """In our layer: every parameter gets a gradient, masks count, and absorbed projections change nothing."""
    x, weight = random(2, TOKENS, HEADS * DIM), random(2, TOKENS, HEADS * DIM)
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
            all_close([out, *grads], [plain(x, attn_mask), *expected])
            for (n, _), grad in zip(layer.named_parameters(), grads, strict=False):
                assert grad.any(), f"{n} gets no gradient"
            if attn_mask is not None:
                assert not out[~real].any(), "output at padded positions"
    masks: dict[str, tuple[Any, ...]] = {
        "padding": (padding,),
        "pairwise": (random_pairs(2, TOKENS),),
        "causal": (None, True),
    }
    for capability, mask in masks.items():
        if getattr(declared, capability):
            assert not torch.allclose(layer(x, *mask), layer(x)), f"the layer ignores a {capability} mask"
        else:
            refused(partial(layer, x, *mask), f"{capability} in a layer")


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
    assert core(*inputs_of(core)).isfinite().all()


def check_export(name: str, **args: Any) -> None:
    """`torch.export`, with a dynamic number of tokens for any length; mechanism and layer."""
    core, layer = build(name, args), build_layer(name, args)
    any_length = core.capabilities.any_length
    token = torch.export.Dim("token")
    for module, count in ((core, 3), (layer, 1)):
        examples = {n: inputs_of(core, n) if count == 3 else (random(2, n, HEADS * DIM),) for n in (TOKENS, 5, 16)}
        shapes = tuple({x.ndim - 2: token} for x in examples[TOKENS]) if any_length else None
        exported = torch.export.export(module, examples[TOKENS], dynamic_shapes=shapes).module()
        for tokens in examples if any_length else (TOKENS,):
            assert_close(exported(*examples[tokens]), module(*examples[tokens]), **EXACT)


def check_compile(name: str, *, backend: str = "inductor", **args: Any) -> None:
    """`torch.compile` in one graph, forward and backward, mechanism and layer. Takes long with Inductor."""
    core, layer = build(name, args, dtype=torch.float32), build_layer(name, args, dtype=torch.float32)
    leaves = [*inputs_of(core, dtype=torch.float32), random(2, TOKENS, HEADS * DIM).float()]
    leaves = [x.requires_grad_() for x in leaves]
    leaves += [p for m in (core, layer) for p in m.parameters() if p.requires_grad]

    def run(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return core(q, k, v).square().sum() + layer(x).square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend=backend)(*leaves[:4])
    expected = run(*leaves[:4])
    assert_close(compiled, expected, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(compiled, leaves)
    for a, b in zip(got, torch.autograd.grad(expected, leaves), strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-4)
