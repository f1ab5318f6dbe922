"""Pure InfSA as section 1 of the specification has it, in float64, differentiated by autograd; and how to compare."""

import math

import torch
from torch import Tensor
from torch.testing import assert_close

from infvit.attention import Mask
from infvit.attention.pure import pure_infsa

EPS = 1e-6
PHI = {
    "relu": lambda x: x * (x > 0),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "abs": lambda x: x * x.sign(),
}


def reference(q: Tensor, k: Tensor, v: Tensor, activation: str, causal: bool, real: Tensor | None = None) -> Tensor:
    """Computes A V with the whole matrix; `real` (B, N) marks the queries and keys that are not padded."""
    scores = PHI[activation](torch.einsum("bhmd,bhnd->bhmn", q, k) / q.shape[-1])
    if real is not None:
        scores = scores * real[:, None, None, :] * real[:, None, :, None]
    if causal:
        scores = scores.tril()
        squares = (scores**2).sum(-1).cumsum(-1)
        zero = squares == 0
        norm = squares.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)[..., None]
    else:
        norm = torch.linalg.matrix_norm(scores)[..., None, None]
    return torch.einsum("bhmn,bhne->bhme", scores / (norm + EPS), v)


def problem(queries: int, keys: int, dim: int, value_dim: int, batch: int = 2, heads: int = 2) -> list[Tensor]:
    """Returns q, k, v and a gradient of the output, normal, in float64 on the CPU."""
    shapes = (queries, dim), (keys, dim), (keys, value_dim), (queries, value_dim)
    generator = torch.Generator().manual_seed(queries + keys)
    return [torch.randn(batch, heads, *shape, dtype=torch.float64, generator=generator) for shape in shapes]


def with_gradients(function, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Returns the output of `function(q, k, v)` and the gradients of q, k and v for the output's gradient `grad`."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def compare(got: list[Tensor], expected: list[Tensor], relative: float) -> None:
    """Asserts that output and gradients agree, relative to the largest entry of each.

    The gradients of q and k of a few tokens are differences of two nearly equal terms, so an entry of 1 is allowed for.
    """
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
        largest = b.abs().max().item() if b.numel() else 0.0
        bound = relative * max(largest, 1.0 if name in ("dq", "dk") else 0.0)
        assert_close(a.double().cpu(), b, rtol=0, atol=bound, msg=lambda text, name=name: f"{name}: {text}")


def tiled(q, k, v, mask=Mask(), **options):  # noqa: B008
    return pure_infsa(q, k, v, mask, path="tiled", **options)
