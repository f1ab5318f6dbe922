"""What the pooling of Linear InfSA must compute: inputs of many shapes, the formula in float64, and the comparison.

`TRITON_INTERPRET=1 python tests/kernels/linear_cases.py float32 float16` runs the Triton kernels through all of it on a
CPU; the interpreter must be switched on before Triton is imported, hence in a process of its own.
"""

import sys
from itertools import product

import torch
from torch.testing import assert_close

from infvit.attention.kernels import linear_pool as kernels

# batch, tokens, heads, channels of a head: less than a tile, several tiles, no power of two, many heads, one token
SHAPES = [(2, 7, 3, 4), (1, 1, 1, 8), (2, 140, 2, 16), (1, 70, 3, 12), (1, 33, 20, 3), (1, 40, 1, 40)]
PHI = {
    "relu": lambda s: s * (s > 0),
    "gelu": lambda s: s * (1 + torch.erf(s / 2**0.5)) / 2,
    "abs": lambda s: torch.where(s < 0, -s, s),
}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
EPS = 1e-6


def formula(x, weight, bias, real, heads, activation):
    """Sections 2 and 2.1 of the paper's formulas, head by head, in float64: pooled tokens and total weights."""
    pooled, totals = [], []
    for sample, kept in zip(x, real, strict=True):
        tokens = sample[kept]
        for w, b in zip(weight.chunk(heads), bias.chunk(heads), strict=True):
            q = (tokens @ w.T + b) / len(b) ** 0.5
            length = (q * q).sum(-1, keepdim=True)
            length = torch.where(length > 0, length, 1).sqrt() * (length > 0)  # a gradient of 0 at 0
            mean = (length * q).sum(0) / (length.sum() + EPS)
            f = PHI[activation](q @ mean)
            a = f / (f.sum() + EPS if f.sum() >= 0 else f.sum() - EPS)
            pooled.append(a @ tokens)
            totals.append(a.sum())
    return torch.stack(pooled).view(len(x), heads, -1), torch.stack(totals).view(len(x), heads)


def problem(shape, dtype, seed=0, device="cpu"):
    """Returns tokens, weight, bias, padding and the weights of the results that a gradient is taken of."""
    batch, tokens, heads, dim = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    width = heads * dim
    real = torch.arange(tokens) < torch.tensor([[max(1, tokens * 2 // 3)], [tokens]])[:batch]
    x = torch.where(real[..., None], draw(batch, tokens, width), 0)
    values = x, draw(width, width) / width**0.5, draw(width) / 2
    leaves = [v.to(device, dtype).requires_grad_() for v in values]
    return leaves, real.to(device), (draw(batch, heads, width).to(device), draw(batch, heads).to(device))


def differentiate(function, leaves, weights, *rest):
    """Returns the two results and the gradients of their weighted sum, in float64."""
    results = function(*leaves, *rest)
    loss = sum((r.double() * w).sum() for r, w in zip(results, weights, strict=True))
    return [t.detach().double() for t in (*results, *torch.autograd.grad(loss, leaves))]


def compare(shape, dtype, activation, padded, device="cpu", factor=1.0):
    """Values and gradients against the formula on the same rounded inputs, by the norm of the error.

    Not by the largest error: in half precision single scores near 0 change sides of the kink of relu and abs.
    """
    leaves, real, weights = problem(shape, dtype, device=device)
    leaves[0] = (leaves[0].detach() * factor).requires_grad_()
    heads = shape[2]
    got = differentiate(kernels.linear_pool, leaves, weights, real if padded else None, heads, activation)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = differentiate(formula, exact, weights, real if padded else torch.ones_like(real), heads, activation)
    for a, b in zip(got, expected, strict=True):
        assert a.isfinite().all()
        error = (a - b).norm() / b.norm().clamp(min=0.1)  # of one token it is all but 0
        assert error < TOLERANCE[dtype], f"{shape} {dtype} {activation}: relative error {error:.1e}"


def degenerate(dtype, device="cpu"):
    """Scores that are all 0 give exactly 0 and finite gradients, in that sample only; NaN stays NaN in its sample."""
    leaves, _, weights = problem((2, 6, 2, 8), dtype, device=device)
    x, weight, _ = (leaf.detach() for leaf in leaves)
    alone = kernels.linear_pool(x[1:], weight, None, None, 2, "relu")
    for fill, activation in product((0.0, float("nan")), PHI):
        x[0] = fill
        leaf = x.clone().requires_grad_()
        pooled, total = kernels.linear_pool(leaf, weight, None, None, 2, activation)
        (grad,) = torch.autograd.grad((pooled * weights[0]).sum() + (total * weights[1]).sum(), leaf)
        if fill == 0:
            assert not pooled[0].any()
            assert not total[0].any()
            assert grad.isfinite().all()
        else:
            assert pooled[0].isnan().all()
            assert total[0].isnan().all()
        assert pooled[1].isfinite().all()
        if activation == "relu":
            assert_close(pooled[1:], alone[0], rtol=1e-5, atol=1e-6)


def check_all(dtypes, device="cpu"):
    """Everything, for some dtypes on a device."""
    for dtype in dtypes:
        for shape, (activation, padded) in product(SHAPES, (("relu", True), ("gelu", False), ("abs", True))):
            compare(shape, dtype, activation, padded, device)
        degenerate(dtype, device)
        compare((1, 140, 2, 16), dtype, "relu", False, device, factor=3000.0)


if __name__ == "__main__":
    chosen = [getattr(torch, name) for name in sys.argv[1:]]
    assert all(kernels.triton_is_used(torch.empty(1, 1, 1, dtype=dtype)) for dtype in chosen)
    check_all(chosen)
    print("all equal")
