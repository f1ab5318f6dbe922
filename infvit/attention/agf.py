"""AGF, a graph filter in the singular value domain ("Learning Advanced Self-Attention for Linear Transformers in the
Singular Value Domain", arXiv 2505.08516, IJCAI 2025)."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from infvit.attention.auxiliary import AuxiliaryLoss
from infvit.attention.factored import FactoredAttention, softmax_over_tokens
from infvit.attention.mechanism import Capabilities, Mask, zero_padded
from infvit.errors import ConfigError, did_you_mean

FORMS = ("filter", "svd", "uv")
FIXED = {"legendre": (0.0, 0.0), "chebyshev": (-0.5, -0.5)}  # Jacobi polynomials by another name
BASES = ("jacobi", *FIXED, "monomial")
ORDER, A, B = 4, 1.5, 1.0  # not published for images; the paper searches K in 3..10, a in {1, 1.5, 2}, b in -2..2

Recurrence = list[tuple[float, float, float]]


def jacobi_recurrence(order: int, a: float, b: float) -> Recurrence:
    """Returns (A_k, B_k, C_k) of `P_k = (A_k x + B_k) P_{k-1} - C_k P_{k-2}` for k = 1..order, with `P_0 = 1`.

    Raises:
        ConfigError: a denominator is 0, or a or b, or what follows from them, is not finite.
    """
    if not (math.isfinite(a) and math.isfinite(b)):
        raise ConfigError(f"a={a}, b={b} of the Jacobi polynomials must be finite.")
    triples = [((a + b + 2) / 2, (a - b) / 2, 0.0)]
    for k in range(2, order + 1):
        for name, value in (("k + a + b", k + a + b), ("2 k + a + b - 2", 2 * k + a + b - 2)):
            if math.isclose(value, 0, abs_tol=1e-9):  # 0.3 - 2.3 is not quite -2
                raise ConfigError(
                    f"a={a}, b={b}: the Jacobi polynomials have no recurrence there, the denominator {name} is 0 at "
                    f"k={k}. Change a or b a little, or take order={k - 1}."
                )
        below = 2 * k * (k + a + b) * (2 * k + a + b - 2)
        triples.append(
            (
                (2 * k + a + b) * (2 * k + a + b - 1) / (2 * k * (k + a + b)),
                (2 * k + a + b - 1) * (a * a - b * b) / below,
                2 * (k + a - 1) * (k + b - 1) * (2 * k + a + b) / below,
            )
        )
    if not all(math.isfinite(value) for triple in triples for value in triple):
        raise ConfigError(
            f"a={a}, b={b}: coefficients of the Jacobi polynomials exceed all numbers. Take smaller ones."
        )
    return triples


def polynomial_sum(x: Tensor, first: Tensor | float, weights: Tensor, recurrence: Recurrence) -> Tensor:
    """Returns `first P_0(x) + sum_k weights[k - 1] P_k(x)`, elementwise."""
    below: Tensor | float = 0.0
    current: Tensor | float = 1.0
    total: Tensor | float = first
    for weight, (slope, shift, back) in zip(weights.unbind(), recurrence, strict=True):
        below, current = current, (slope * x + shift) * current - back * below
        total = total + weight * current
    assert isinstance(total, Tensor)
    return total


class Orthogonality(AuxiliaryLoss):
    """`mean |U^T U - I| + mean |V^T V - I|` over heads and r x r entries: keeps singular vectors apart."""

    def term(self, *inputs: Tensor) -> Tensor:
        """Returns the loss of each sample, from U (B, H, M, r) and V^T (B, H, r, N), both 0 at padded tokens."""
        u, v = inputs
        eye = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
        return sum(
            ((gram - eye).abs().mean((-3, -2, -1)) for gram in (u.transpose(-2, -1) @ u, v @ v.transpose(-2, -1))),
            start=u.new_zeros(()),
        )


class AGF(FactoredAttention):
    """`(U * F(s)) (V^T values)`, `F(s) = sum_k theta_k P_k(s)`: a singular value decomposition that is learned.

    The queries are two projections of the tokens side by side. From the first come the left singular vectors U, a
    softmax over the r = D channels; from the second the singular values s, a sigmoid, one for each token and channel.
    The keys give the right singular vectors V, a softmax over the tokens. Nothing is divided by sqrt(D). `theta_0` is
    1 and stays, the others are tanh of parameters that start at 0: at the start the matrix is U V^T.

    Args:
        num_heads: heads H.
        head_dim: channels per head D, and the rank r.
        attn_drop: must be 0.
        device: device of the parameters.
        dtype: dtype of the parameters.
        form: "filter" (AGF), or of the paper's ablation "uv" (singular values 1) or "svd" (singular values that are
            parameters, one for each head and channel, and start at 1). These two have no second query projection.
        order: K, the largest order of the polynomials; 4 by default.
        basis: "jacobi" (default), "legendre" (a = b = 0), "chebyshev" (a = b = -0.5) or "monomial" (x^k).
        a: of the Jacobi polynomials; 1.5 by default.
        b: likewise; 1 by default.
        theta0_trainable: learn theta_0 as well, which then is a parameter that starts at 1, without tanh.
        orthogonality: weight of the loss `Orthogonality`; 0: none.
    """

    name = "agf"
    capabilities = Capabilities(
        padding=True, cross=True, permutation_equivariant=True, matrix=True, token_map=True, any_length=True
    )

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        attn_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        form: str = "filter",
        order: int | None = None,
        basis: str | None = None,
        a: float | None = None,
        b: float | None = None,
        theta0_trainable: bool = False,
        orthogonality: float = 1e-3,
    ) -> None:
        super().__init__(num_heads, head_dim, attn_drop, device, dtype)
        if form not in FORMS:
            raise ConfigError(f"form={form!r} of agf. {did_you_mean(form, FORMS)}")
        self.form = form
        self.orthogonality = Orthogonality(orthogonality)
        if form == "filter":
            self.extra_dim = head_dim
            self.basis, self.order, self.a, self.b = _checked(basis, order, a, b)
            self.recurrence: Recurrence = (
                [(1.0, 0.0, 0.0)] * self.order
                if self.basis == "monomial"
                else jacobi_recurrence(self.order, self.a, self.b)
            )
            self.theta = nn.Parameter(torch.empty(self.order, device=device, dtype=dtype))
            if theta0_trainable:
                self.theta0 = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        else:
            given = {"order": order, "basis": basis, "a": a, "b": b, "theta0_trainable": theta0_trainable or None}
            for key, value in given.items():
                if value is not None:
                    raise ConfigError(f"{key}={value} has no effect with form={form!r} of agf, which has no filter.")
            if form == "svd":
                # One-dimensional, as weight decay leaves those alone; it would pull singular values to 0.
                self.singular_values = nn.Parameter(torch.empty(num_heads * head_dim, device=device, dtype=dtype))
        self.theta0_trainable = theta0_trainable
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the filter, or the singular values, back to 1 (also after creation on the meta device)."""
        if self.form == "filter":
            nn.init.zeros_(self.theta)
        if self.theta0_trainable:
            nn.init.ones_(self.theta0)
        if self.form == "svd":
            nn.init.ones_(self.singular_values)

    def vectors(self, q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """Returns U, (B, H, M, r), and V^T, (B, H, r, N), which is 0 at padded keys."""
        return q[..., : self.head_dim].softmax(-1), softmax_over_tokens(k.transpose(-2, -1), mask.keys)

    def values(self, q: Tensor) -> Tensor:
        """Returns the singular values after the filter, broadcastable to (B, H, M, r)."""
        if self.form == "uv":
            return q.new_ones(())
        if self.form == "svd":
            return self.singular_values.to(q.dtype).view(self.num_heads, 1, self.head_dim)
        first = self.theta0.to(q.dtype) if self.theta0_trainable else 1.0
        theta = self.theta.to(q.dtype).tanh()
        return polynomial_sum(q[..., self.head_dim :].sigmoid(), first, theta, self.recurrence)

    def macs(self, tokens: int) -> int:
        return 2 * tokens * self.num_heads * self.head_dim**2

    def factors(self, q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        u, v = self.vectors(q, k, mask)
        return u * self.values(q), v

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        left, right = self.vectors(q, k, mask)
        self.orthogonality(zero_padded(left, mask.queries), right)
        return (left * self.values(q)) @ (right @ v)

    def reference(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        r = self.head_dim
        u, columns = q[..., :r].exp(), k.exp()
        u, columns = u / u.sum(-1, keepdim=True), columns / columns.sum(-2, keepdim=True)
        if self.form == "svd":
            u = u * self.singular_values.reshape(-1, 1, r)
        elif self.form == "filter":
            s = 1 / (1 + (-q[..., r:]).exp())
            filtered = self.theta0 * s**0 if self.theta0_trainable else s**0
            for n in range(1, self.order + 1):
                polynomial = s**n
                if self.basis != "monomial":  # the explicit sum, without a recurrence
                    terms = [
                        _binomial(n + self.a, n - m)
                        * _binomial(n + self.b, m)
                        * ((s - 1) / 2) ** m
                        * ((s + 1) / 2) ** (n - m)
                        for m in range(n + 1)
                    ]
                    polynomial = torch.stack(terms).sum(0)
                filtered = filtered + torch.tanh(self.theta[n - 1]) * polynomial
            u = u * filtered
        return u @ (columns.mT @ v)

    def extra_repr(self) -> str:
        filtered = f", basis={self.basis}, order={self.order}, a={self.a}, b={self.b}"
        return f"form={self.form}{filtered if self.form == 'filter' else ''}"


def _checked(basis: str | None, order: int | None, a: float | None, b: float | None) -> tuple[str, int, float, float]:
    """Returns the filter's arguments with their defaults."""
    basis = "jacobi" if basis is None else basis
    order = ORDER if order is None else order
    if basis not in BASES:
        raise ConfigError(f"basis={basis!r} of agf. {did_you_mean(basis, BASES)}")
    if order < 1:
        raise ConfigError(f"order={order} of agf must be at least 1; without a filter it is form='uv'.")
    if basis != "jacobi":
        for key, value in (("a", a), ("b", b)):
            if value is not None:
                raise ConfigError(f"{key}={value} has no effect with basis={basis!r} of agf; only jacobi takes it.")
        a, b = FIXED.get(basis, (math.nan, math.nan))
    return basis, order, A if a is None else a, B if b is None else b


def _binomial(top: float, below: int) -> float:
    return math.prod((top - i) / (i + 1) for i in range(below))
