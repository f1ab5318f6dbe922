"""What the checks have in common: small mechanisms, inputs, masks and comparisons, the same at every call."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from infvit.attention import AttentionLayer, Mask, Mechanism, get_mechanism, hyperparameters
from infvit.errors import ConfigError

LENGTHS = (1, 2, 15, 16, 17, 197)
TOKENS = 7
HEADS = 2
DIM = 4
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}  # of sums in float64 whose order differs


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
    core = cls(heads, dim, attn_drop, dtype=dtype, device=device, **with_tokens(cls, args, tokens)).eval()
    return awake(core) if device is None else core


def build_layer(name: str, args: dict[str, Any], dtype: torch.dtype = torch.float64, **kwargs: Any) -> AttentionLayer:
    """Returns a layer around a mechanism, with biases that are not zero; the same parameters at every call."""
    torch.manual_seed(0)
    args = with_tokens(get_mechanism(name), args, TOKENS)
    kwargs = {"qkv_bias": True, **kwargs}
    layer = AttentionLayer(HEADS * DIM, HEADS, dtype=dtype, mechanism=name, mechanism_args=args, **kwargs)
    awake(layer.core)
    return layer


def awake(core: Mechanism) -> Mechanism:
    """Fills the parameters that start at 0: what they are multiplied with would have neither effect nor gradient."""
    for parameter in core.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter)
    return core


def inputs(
    queries: int = TOKENS,
    keys: int | None = None,
    batch: int = 2,
    heads: int = HEADS,
    dim: int = DIM,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float64,
    grad: bool = False,
    extra_dim: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k, v from a fixed seed."""
    keys = queries if keys is None else keys
    shapes = (queries, dim + extra_dim), (keys, dim), (keys, value_dim or dim)
    q, k, v = (random(batch, heads, *shape, seed=i).to(dtype).requires_grad_(grad) for i, shape in enumerate(shapes))
    return q, k, v


def inputs_of(
    core: Mechanism, queries: int = TOKENS, keys: int | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k, v in the shapes that a mechanism takes; the rest as `inputs`."""
    return inputs(queries, keys, heads=core.num_heads, dim=core.head_dim, extra_dim=core.extra_dim, **kwargs)


def declared_masks(core: Mechanism, tokens: int = TOKENS) -> list[Mask]:
    """Returns masks of every declared kind and combination, for a batch of 2."""
    declared = core.capabilities
    real = torch.ones(2, tokens, dtype=torch.bool)
    real[0, 1] = real[0, -1] = False
    bias = [Mask(bias=random(2, HEADS, tokens, tokens))] if declared.bias else []
    kinds = product(
        sorted({False, declared.padding}), sorted({False, declared.pairwise}), sorted({False, declared.causal})
    )
    return bias + [
        Mask(
            keys=real if padding else None,
            queries=real if padding else None,
            pairs=random_pairs(2, tokens) if pairwise else None,
            causal=causal,
        )
        for padding, pairwise, causal in kinds
    ]


def gradients(core: Mechanism, qkv: Sequence[Tensor], mask: Mask, weight: Tensor) -> list[Tensor]:
    """Returns the output and the gradients of `sum(output * weight)`: of q, k, v and the trained parameters."""
    leaves = [x.detach().requires_grad_() for x in qkv] + [p for p in core.parameters() if p.requires_grad]
    out = core(*leaves[:3], mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


def all_close(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Asserts that two lists of tensors are equal up to the rounding of float64 sums."""
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, **EXACT)


def refused(call: Callable[[], Any], what: str) -> None:
    """Asserts that a call raises ConfigError."""
    try:
        call()
    except ConfigError:
        return
    raise AssertionError(f"{what}: not declared, or without meaning, but no ConfigError")


def with_tokens(cls: type[Mechanism], args: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Adds the number of tokens for a mechanism that is built for one."""
    return {**args, "num_tokens": tokens} if "num_tokens" in hyperparameters(cls) else args


def generator(seed: int = 0) -> torch.Generator:
    """Returns a seeded generator."""
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 9) -> Tensor:
    """Returns normal float64 numbers from a fixed seed."""
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


def random_pairs(batch: int, tokens: int) -> Tensor:
    """Returns allowed pairs that differ between samples and heads; query 1 may see no key."""
    pairs = torch.rand(batch, HEADS, tokens, tokens, generator=generator()) > 0.3
    pairs[..., 1, :] = False
    return pairs
