"""The interface of an attention mechanism, and the registry of all of them.

A mechanism mixes values by queries and keys, per sample and head. It owns what belongs to the mixing (path decay,
activation, dropout) and nothing else: the projections around it belong to `infvit.attention.layer`.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from numbers import Integral, Real
from types import UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from infvit.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Capabilities:
    """What a mechanism promises. The contract suite checks each promise; whatever is not promised is refused.

    Attributes:
        padding: key and query padding masks; real tokens are exactly as if the padded ones were not there.
        causal: position i depends on positions 0..i only.
        pairwise: boolean masks over single query-key pairs.
        bias: a bias on the logit of each pair (`Mask.bias`), relative positions say.
        cross: numbers of queries and keys may differ.
        permutation_equivariant: permuting the tokens permutes the output.
        matrix: the mixing matrix is available, with `output = matrix @ v`.
        token_map: relevance per key token is available.
        any_length: works at every number of tokens. Otherwise the constructor takes a keyword-only `num_tokens`, keeps
            it as an attribute, and calls with another number are refused.
    """

    padding: bool = False
    causal: bool = False
    pairwise: bool = False
    bias: bool = False
    cross: bool = False
    permutation_equivariant: bool = False
    matrix: bool = False
    token_map: bool = False
    any_length: bool = False


@dataclass(frozen=True)
class Mask:
    """Which query-key pairs take part. True means "takes part" everywhere; None means "all".

    Attributes:
        keys: real (not padded) keys, shape (B, N).
        queries: real queries, shape (B, M).
        pairs: allowed pairs, broadcastable to (B, H, M, N).
        causal: allow only keys at or before the query's position.
        bias: finite numbers added to the logits `q k^T / sqrt(D)`, broadcastable to (B, H, M, N).
        ordered: no query may feel a later one, though each sees all keys: the cross-attention of a causal decoder.
    """

    keys: Tensor | None = None
    queries: Tensor | None = None
    pairs: Tensor | None = None
    causal: bool = False
    bias: Tensor | None = None
    ordered: bool = False

    def allowed(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
        """Returns the allowed pairs as one boolean tensor broadcastable to (B, H, M, N), or None when all are."""
        parts = []
        if self.keys is not None:
            parts.append(self.keys[:, None, None, :])
        if self.queries is not None:
            parts.append(self.queries[:, None, :, None])
        if self.pairs is not None:
            parts.append(self.pairs)
        if self.causal:
            parts.append(torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril())
        allowed = None
        for part in parts:
            allowed = part if allowed is None else allowed & part
        return allowed


NO_MASK = Mask()


@dataclass(frozen=True)
class Projections:
    """Weights (C, C) and biases (C,) of the query, key and value projections of tokens; `y = x @ weight.T + bias`.

    Attributes:
        k: None where the keys are the queries.
    """

    q: Tensor
    v: Tensor
    k: Tensor | None = None
    q_bias: Tensor | None = None
    v_bias: Tensor | None = None
    k_bias: Tensor | None = None


class Mechanism(nn.Module):
    """Base of all attention mechanisms.

    A subclass sets `name` and `capabilities`, takes its hyperparameters as keyword-only arguments, and implements
    `mix` (and `_matrix`, `_token_map` where it declares them). Callers use `forward`, `matrix` and `token_map`, which
    refuse whatever the mechanism does not declare.

    Args:
        num_heads: heads H.
        head_dim: channels per head D.
        attn_drop: dropout probability on the mixing weights, active in training mode.
        device: device of parameters.
        dtype: dtype of parameters.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    token_maps: ClassVar[tuple[str, ...]] = ()  # kinds of token map; the first is the default
    ties_key: ClassVar[bool] = False  # whether models use the query projection for the keys as well
    num_tokens: int  # only without `any_length`
    extra_dim: int  # channels that each query carries behind its D, from a projection of the tokens of their own

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        attn_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.extra_dim = 0
        self.scale = head_dim**-0.5  # of q and of k, so that scores carry 1 / D
        self.attn_drop = nn.Dropout(attn_drop)

    @property
    def upcasts(self) -> bool:
        """Whether half-precision input is computed in float32; False where a kernel does so by itself."""
        return True

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Computes the output from unscaled q, k, v; `mask` holds only what `capabilities` declares."""
        raise NotImplementedError(f"{type(self).__name__}.mix is missing: every mechanism has one.")

    def macs(self, tokens: int) -> int | None:
        """Returns the multiply-accumulates of `mix` for one sample of so many tokens, without masks, as a formula.

        Matrix products and convolutions count, elementwise operations do not. None: nobody wrote it down.
        """
        return None

    def absorbs(self, mask: Mask) -> bool:
        """Whether `absorbed` can stand in for projecting all tokens and mixing them, in this call."""
        return False

    def absorbed(self, x: Tensor, weights: Projections, mask: Mask) -> Tensor:
        """Computes the output that all tokens share without projecting the keys and values of each token.

        Args:
            x: tokens before the projections, (B, N, C), zero where padded.
            weights: the projections.
            mask: padding, if any.

        Returns:
            The concatenated heads, (B, 1, C), before the output projection, in at least float32.
        """
        raise NotImplementedError(f"{type(self).__name__}.absorbed is missing: `absorbs` promised it.")

    def _matrix(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__}._matrix is missing: `capabilities` declares a matrix.")

    def _token_map(self, q: Tensor, k: Tensor, mask: Mask, kind: str) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__}._token_map is missing: `capabilities` declares a token map.")

    @staticmethod
    def reference(q: Tensor, k: Tensor, v: Tensor, **hyperparameters: Any) -> Tensor:
        """The paper's formula for unmasked input, as plainly as it can be written; `mix` is tested against it.

        Takes the hyperparameters of the constructor. May be an ordinary method where it needs learned parameters.
        """
        raise NotImplementedError("a mechanism needs its formula as `reference`.")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask = NO_MASK) -> Tensor:
        """Mixes the values.

        Args:
            q: queries, (B, H, M, D + extra_dim), not scaled.
            k: keys, (B, H, N, D), not scaled.
            v: values, (B, H, N, E).
            mask: which pairs take part.

        Returns:
            The output, (B, H, M, E), in the dtype of `v`. Zero at padded queries.

        Raises:
            ConfigError: the mechanism does not declare what the call asks for.
        """
        self._check(q, k, mask)
        q, k, v = zero_padded(q, mask.queries), zero_padded(k, mask.keys), zero_padded(v, mask.keys)
        with full_precision(v) as compute:
            dtype = compute if self.upcasts else v.dtype
            out = self.mix(q.to(dtype), k.to(dtype), v.to(dtype), mask).to(v.dtype)
        return zero_padded(out, mask.queries)

    def matrix(self, q: Tensor, k: Tensor, mask: Mask = NO_MASK) -> Tensor:
        """Returns the mixing matrix, (B, H, M, N): `forward(q, k, v) == matrix(q, k) @ v` without dropout.

        Raises:
            ConfigError: the mechanism has no such matrix, or does not support the mask.
        """
        self._require("matrix", "mixing matrix")
        self._check(q, k, mask)
        with full_precision(q) as compute:
            return self._matrix(zero_padded(q, mask.queries).to(compute), zero_padded(k, mask.keys).to(compute), mask)

    def token_map(self, q: Tensor, k: Tensor, mask: Mask = NO_MASK, kind: str | None = None) -> Tensor:
        """Returns the relevance of every key token, (B, H, N); zero at padded keys.

        Args:
            q: queries, (B, H, M, D + extra_dim).
            k: keys, (B, H, N, D).
            mask: which pairs take part.
            kind: one of `token_maps`; None takes the first.

        Raises:
            ConfigError: the mechanism has no such map, or does not support the mask.
        """
        self._require("token_map", "token map")
        kind = kind or self.token_maps[0]
        if kind not in self.token_maps:
            raise ConfigError(f"{self.name} has no token map {kind!r}. {did_you_mean(kind, self.token_maps)}")
        self._check(q, k, mask)
        with full_precision(q) as compute:
            relevance = self._token_map(
                zero_padded(q, mask.queries).to(compute), zero_padded(k, mask.keys).to(compute), mask, kind
            )
        return relevance if mask.keys is None else relevance.where(mask.keys[:, None], relevance.new_zeros(()))

    def _require(self, capability: str, what: str) -> None:
        if not getattr(self.capabilities, capability):
            can = [f.name for f in fields(Capabilities) if getattr(self.capabilities, f.name)]
            raise ConfigError(f"attention mechanism {self.name!r} does not support: {what}. It declares: {can}.")

    def _check(self, q: Tensor, k: Tensor, mask: Mask) -> None:
        if self.extra_dim and q.shape[-1] != self.head_dim + self.extra_dim:
            raise ConfigError(
                f"attention mechanism {self.name!r} takes queries of {self.head_dim} + {self.extra_dim} channels a "
                f"head, the second part from a projection of its own; got {q.shape[-1]}."
            )
        if mask.keys is not None or mask.queries is not None:
            self._require("padding", "padding masks")
            for name, real, tokens in (("keys", mask.keys, k.shape[-2]), ("queries", mask.queries, q.shape[-2])):
                if real is not None and (real.dtype != torch.bool or real.shape != (q.shape[0], tokens)):
                    raise ConfigError(
                        f"Mask.{name} must be boolean of shape ({q.shape[0]}, {tokens}), "
                        f"not {real.dtype} of shape {tuple(real.shape)}."
                    )
        if mask.pairs is not None:
            self._require("pairwise", "masks over query-key pairs")
            if mask.pairs.dtype != torch.bool:
                raise ConfigError(f"Mask.pairs must be boolean (True: takes part), not {mask.pairs.dtype}.")
        if mask.causal:
            self._require("causal", "causal masks")
            if q.shape[-2] != k.shape[-2]:
                raise ConfigError(f"a causal mask needs as many queries as keys, got {q.shape[-2]} and {k.shape[-2]}.")
        if mask.ordered:
            self._require("causal", "queries that must not feel later ones")
        if mask.bias is not None:
            self._require("bias", "a bias on the logits of query-key pairs")
            if not mask.bias.is_floating_point():
                raise ConfigError(f"Mask.bias must hold floating-point numbers, not {mask.bias.dtype}.")
        if q.shape[-2] != k.shape[-2]:
            self._require("cross", "different numbers of queries and keys")
        # int: while TorchScript traces, sizes are tensors
        if not self.capabilities.any_length and {int(q.shape[-2]), int(k.shape[-2])} != {self.num_tokens}:
            self._require("any_length", f"{k.shape[-2]} tokens when it was built with num_tokens={self.num_tokens}")


def zero_padded(x: Tensor, real: Tensor | None) -> Tensor:
    """Zeroes padded tokens of (B, H, N, D) by selection, so that NaN or infinity in them cannot leak."""
    return x if real is None else torch.where(real[:, None, :, None], x, x.new_zeros(()))


@contextmanager
def full_precision(x: Tensor) -> Iterator[torch.dtype]:
    """Switches autocast off and yields the dtype to compute in: at least float32.

    Sums over thousands of tokens overflow in float16 (silently to an all-zero output) and lose digits in bfloat16.
    """
    available = torch.amp.is_autocast_available(x.device.type)  # not on the meta device
    with torch.autocast(x.device.type, enabled=False) if available else nullcontext():
        yield torch.promote_types(x.dtype, torch.float32)


def beyond_operators() -> bool:
    """Whether derivatives are being taken that a custom operator lacks: those of `torch.func`, and forward-mode ones.

    torch raises for `grad`, `vjp` and what is made of them, and takes forward-mode ones (`jvp`) as 0.
    """
    if torch.compiler.is_compiling():
        return False
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    vmap = torch._C._functorch.TransformType.Vmap
    return getattr(forward_ad, "_current_level", -1) >= 0 or any(level.key() != vmap for level in transforms)


_MECHANISMS: dict[str, type[Mechanism]] = {}
M = TypeVar("M", bound=type[Mechanism])


def register_mechanism(cls: M) -> M:
    """Makes a mechanism available by its `name`, to models and to the contract suite. Usable as a decorator.

    Raises:
        ConfigError: `name` or `capabilities` is missing, or the name belongs to another class.
    """
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not isinstance(getattr(cls, "capabilities", None), Capabilities):
        raise ConfigError(f"{cls.__qualname__} must set the class attributes `name` and `capabilities`.")
    known = _MECHANISMS.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ConfigError(f"attention mechanism {name!r} is already registered by {known.__module__}.")
    if cls.capabilities.token_map and not cls.token_maps:
        raise ConfigError(f"{cls.__qualname__} declares a token map but `token_maps` is empty.")
    if not cls.capabilities.any_length and "num_tokens" not in hyperparameters(cls):
        raise ConfigError(f"{cls.__qualname__} must declare `any_length` or take a keyword-only `num_tokens`.")
    _MECHANISMS[name] = cls
    return cls


def list_mechanisms() -> list[str]:
    """Returns the names of all registered mechanisms."""
    return sorted(_MECHANISMS)


def get_mechanism(name: str) -> type[Mechanism]:
    """Returns a mechanism by name.

    Raises:
        ConfigError: no such mechanism; the closest names are offered.
    """
    if name not in _MECHANISMS:
        raise ConfigError(f"unknown attention mechanism {name!r}. {did_you_mean(name, _MECHANISMS)}")
    return _MECHANISMS[name]


def hyperparameters(cls: type[Mechanism]) -> set[str]:
    """Returns the names of a mechanism's own hyperparameters: the keyword-only arguments of its constructor."""
    parameters = signature(cls.__init__).parameters.values()
    return {p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY}


def with_defaults(cls: type[Mechanism], args: dict[str, Any]) -> dict[str, Any]:
    """Returns all of a mechanism's own hyperparameters by name: those that are given, and defaults of the others."""
    parameters = signature(cls.__init__).parameters
    return {name: args.get(name, parameters[name].default) for name in hyperparameters(cls)}


def check_hyperparameters(cls: type[Mechanism], args: dict[str, Any]) -> None:
    """Checks the names and the types of a mechanism's own hyperparameters, and that none is missing.

    Raises:
        ConfigError: one is unknown, missing, or of another type than its annotation says.
    """
    known = hyperparameters(cls)
    for name in sorted(set(args) - known):
        offered = did_you_mean(name, known) if known else "It takes none."
        raise ConfigError(f"attention mechanism {cls.name!r} has no {name!r}. {offered}")
    if not cls.capabilities.any_length and "num_tokens" not in args:
        raise ConfigError(f"attention mechanism {cls.name!r} is built for one number of tokens: give num_tokens.")
    try:
        hints = get_type_hints(cls.__init__)
    except NameError:  # imported for the type checker only
        return
    for name, value in args.items():
        hint = hints.get(name)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if all(kind in _WORDS for kind in kinds) and not any(_is_a(kind, value) for kind in kinds):
            words = " or ".join(_WORDS[kind] for kind in kinds if kind is not type(None))
            raise ConfigError(f"{name}={value!r} of attention mechanism {cls.name!r} must be {words}.")


_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a name", type(None): "null"}


def _is_a(kind: type, value: Any) -> bool:
    """Whether a value is of a kind; a bool is no number, although Python says so."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, Integral if kind is int else Real if kind is float else kind)
