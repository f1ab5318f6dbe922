"""What a mechanism declares: each capability holds, and whatever is not declared raises."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from infvit.attention import Mask, Mechanism
from infvit.testing.cases import (
    DIM,
    EXACT,
    HEADS,
    TOKENS,
    all_close,
    build,
    declared_masks,
    generator,
    gradients,
    inputs_of,
    random,
    random_pairs,
    refused,
)


def check_padding(name: str, **args: Any) -> None:
    """Real tokens, values and gradients, as if the padded were not there; nothing leaks from those, NaN included."""
    core = build(name, args)
    declared = core.capabilities
    if not declared.padding:
        real = torch.ones(2, TOKENS, dtype=torch.bool)
        refused(lambda: core(*inputs_of(core), Mask(keys=real)), "padding of keys")
        refused(lambda: core(*inputs_of(core), Mask(queries=real)), "padding of queries")
        return
    real = torch.ones(3, TOKENS, dtype=torch.bool)
    real[0, [0, 3, 6]] = False  # the first, one amid the others, the last
    real[2] = False
    padded = ~real[:, None].expand(-1, HEADS, -1)
    weight = random(3, HEADS, TOKENS, DIM)
    for causal, fill in product(sorted({False, declared.causal}), (1e3, float("nan"), float("inf"))):
        qkv = [torch.where(real[:, None, :, None], x, fill) for x in inputs_of(core, batch=3)]
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
        refused(lambda: core(*inputs_of(core), Mask(causal=True)), "causal")
        return
    causal = Mask(causal=True)
    if declared.cross:
        refused(lambda: core(*inputs_of(core, TOKENS - 1, TOKENS), causal), "a causal mask over M != N")
    leaves = inputs_of(core, grad=True)
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
        refused(lambda: core(*inputs_of(core), Mask(pairs=every)), "pairwise")
        return
    q, k, v = inputs_of(core, grad=True)
    assert_close(core(q, k, v, Mask(pairs=every)), core(q, k, v), **EXACT)
    unseen = 2
    pairs = random_pairs(2, TOKENS)
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
    if declared.causal:
        triangle = every.tril()
        assert_close(core(q, k, v, Mask(pairs=triangle)), core(q, k, v, Mask(causal=True)), **EXACT)
    for shared in (pairs[0, 0], pairs[:1, :1], pairs[:, :1], pairs[:1]):
        full = shared.broadcast_to(2, HEADS, TOKENS, TOKENS)
        assert_close(core(q, k, v, Mask(pairs=shared)), core(q, k, v, Mask(pairs=full)), **EXACT)


def check_bias(name: str, **args: Any) -> None:
    """A bias on the logits is what the last channel of queries and keys adds to them, under every mask."""
    core = build(name, args)
    zero = torch.zeros(TOKENS, TOKENS, dtype=torch.float64)
    if not core.capabilities.bias:
        refused(lambda: core(*inputs_of(core), Mask(bias=zero)), "bias")
        return
    q, k, v = inputs_of(core, grad=True)
    assert_close(core(q, k, v, Mask(bias=zero)), core(q, k, v), **EXACT)
    refused(lambda: core(q, k, v, Mask(bias=zero.bool())), "a boolean bias")
    weight = random(2, HEADS, TOKENS, DIM)
    keep = torch.tensor([1.0] * (DIM - 1) + [0.0]).double()
    for mask in declared_masks(core):
        bias = q[..., -1:] @ k[..., -1:].mT / DIM**0.5
        out = core(q * keep, k * keep, v, replace(mask, bias=bias))
        expected = core(q, k, v, replace(mask, bias=None))
        all_close([out], [expected])
        all_close(torch.autograd.grad(out, (q, k, v), weight), torch.autograd.grad(expected, (q, k, v), weight))
    full = random(2, HEADS, TOKENS, TOKENS)
    for shared in (full[0, 0], full[:1, :1], full[:, :1], full[:1]):
        spread = shared.broadcast_to(full.shape)
        assert_close(core(q, k, v, Mask(bias=shared)), core(q, k, v, Mask(bias=spread)), **EXACT)
    half = build(name, args, dtype=torch.float16)(*(x.half() for x in (q, k, v)), Mask(bias=full.half()))
    assert_close(half.double(), core(q, k, v, Mask(bias=full)), rtol=0, atol=4e-3)


def check_ordered(name: str, **args: Any) -> None:
    """Queries in order see all keys and feel no later query, by value and by gradient."""
    core = build(name, args)
    declared = core.capabilities
    ordered = Mask(ordered=True)
    if not declared.causal:
        refused(lambda: core(*inputs_of(core), ordered), "queries in order")
        return
    for keys in (TOKENS - 3, TOKENS) if declared.cross else (TOKENS,):
        q, k, v = inputs_of(core, TOKENS, keys, grad=True)
        out = core(q, k, v, ordered)
        for i in range(TOKENS):
            grads = torch.autograd.grad(out[:, :, i].sum(), (q, k, v), retain_graph=True)
            assert not grads[0][:, :, i + 1 :].any(), f"query {i} has a gradient to later ones"
            assert i or grads[2][:, :, 1:].any(), "the first query sees no later key"
            if declared.cross and declared.any_length:
                assert_close(core(q[:, :, : i + 1], k, v, ordered), out[:, :, : i + 1], **EXACT)
        assert_close(out[:, :, -1], core(q, k, v)[:, :, -1], **EXACT)
        if declared.matrix:
            assert_close(core.matrix(q, k, ordered) @ v, out, **EXACT)


def check_cross(name: str, **args: Any) -> None:
    """More keys than queries and the reverse, each with a padding mask of its own. Values: see `check_values`."""
    core = build(name, args)
    declared = core.capabilities
    if not declared.cross:
        refused(lambda: core(*inputs_of(core, TOKENS - 3, TOKENS)), "cross")
        refused(lambda: core(*inputs_of(core, TOKENS, TOKENS - 3)), "cross")
        return
    for queries, keys in ((TOKENS - 3, TOKENS), (TOKENS, TOKENS - 3)):
        qkv = inputs_of(core, queries, keys)
        if declared.padding and declared.any_length:
            real_queries, real_keys = torch.rand(2, 2, TOKENS, generator=generator()) > 0.3
            real_queries, real_keys = real_queries[:, :queries], real_keys[:, :keys]
            weight = random(2, HEADS, queries, DIM)
            for q_mask, k_mask in ((real_queries, real_keys), (real_queries, None), (None, real_keys)):
                got = gradients(core, qkv, Mask(queries=q_mask, keys=k_mask), weight)
                _equals_removed(core, qkv, weight, got, q_mask, k_mask)


def check_permutation_equivariant(name: str, **args: Any) -> None:
    """Permuting the tokens permutes the output; where keys may be others, permuting them alone changes nothing."""
    core = build(name, args)
    if core.capabilities.permutation_equivariant:
        q, k, v = inputs_of(core)
        order = torch.randperm(TOKENS, generator=generator())
        out = core(q, k, v)
        assert_close(core(q[:, :, order], k[:, :, order], v[:, :, order]), out[:, :, order], **EXACT)
        if core.capabilities.cross:
            assert_close(core(q, k[:, :, order], v[:, :, order]), out, **EXACT)


def check_matrix(name: str, **args: Any) -> None:
    """`output = matrix @ v` for every v, under every declared mask."""
    core = build(name, args)
    q, k, _ = inputs_of(core)
    if not core.capabilities.matrix:
        refused(lambda: core.matrix(q, k), "matrix")
        return
    for mask in declared_masks(core):
        identity = torch.eye(TOKENS).double().expand(2, HEADS, -1, -1)
        assert_close(core.matrix(q, k, mask), core(q, k, identity, mask), **EXACT)
    if core.capabilities.cross:
        q, k, v = inputs_of(core, TOKENS - 2, TOKENS)
        assert_close(core.matrix(q, k) @ v, core(q, k, v), **EXACT)
    half = build(name, args, dtype=torch.float16).matrix(q.half(), k.half())
    assert half.dtype == torch.float32, f"float16 input gives a matrix in {half.dtype}, not in float32"


def check_token_map(name: str, **args: Any) -> None:
    """Each kind of token map: one finite value per key and head, 0 at padded keys, unknown kinds refused."""
    core = build(name, args)
    q, k, _ = inputs_of(core)
    if not core.capabilities.token_map:
        refused(lambda: core.token_map(q, k), "token_map")
        return
    refused(lambda: core.token_map(q, k, kind="no_such_kind"), "an unknown kind of token map")
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
        all_close([x[i : i + 1, :, where] for x, (_, where) in zip(got[:4], parts, strict=True)], expected[:4])
        for total, grad in zip(parameters, expected[4:], strict=True):
            total += grad
    all_close(got[4:], parameters)
