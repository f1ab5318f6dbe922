"""The attention layer of our models: projections around any registered mechanism, with timm's interface."""

from typing import Any, Optional

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from infvit.attention.mechanism import Mask, Mechanism, Projections, check_hyperparameters, get_mechanism
from infvit.errors import ConfigError


@register_notrace_module
class AttentionLayer(nn.Module):
    """Self-attention on tokens: query, key and value projections, a mechanism, output projection.

    A mechanism with `extra_dim` has one more projection of the tokens, `extra`, whose channels follow those of the
    queries; `qkv` is the same for all mechanisms.

    Names and arguments follow timm's `Attention`, so that DeiT checkpoints load and timm's tools work.

    Args:
        dim: channels C of the tokens.
        num_heads: heads H; must divide `dim`.
        qkv_bias: bias on the query, key, value and extra projections.
        qk_norm: normalise queries and keys per head.
        scale_norm: normalise the concatenated heads before the output projection.
        proj_bias: bias on the output projections.
        attn_drop: dropout on the mixing weights.
        proj_drop: dropout after the output projection.
        norm_layer: class of the norms of `qk_norm` and `scale_norm`.
        device: device of the parameters.
        dtype: dtype of the parameters.
        mechanism: name of a registered mechanism.
        mechanism_args: its hyperparameters.
        tie_key: use the query projection for the keys; None asks the mechanism (`ties_key`).
        double_proj: a second output projection behind the first, as the published InfViT has it. Two linear maps in a
            row: `fold_projection` makes them one for inference.

    Raises:
        ConfigError: width not divisible by the heads, unknown mechanism or hyperparameter, unsupported combination.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: type[nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mechanism: str = "softmax",
        mechanism_args: dict[str, Any] | None = None,
        tie_key: bool | None = None,
        double_proj: bool = False,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            divisors = [h for h in range(1, dim + 1) if dim % h == 0]
            raise ConfigError(f"width {dim} is not divisible by num_heads={num_heads}; allowed: {divisors}.")
        if (qk_norm or scale_norm) and norm_layer is None:
            raise ConfigError("qk_norm and scale_norm need a norm_layer.")
        cls = get_mechanism(mechanism)
        check_hyperparameters(cls, mechanism_args or {})
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.tie_key = cls.ties_key if tie_key is None else tie_key
        self.core: Mechanism = cls(num_heads, self.head_dim, attn_drop, **factory, **(mechanism_args or {}))
        self.qkv = nn.Linear(dim, dim * (2 if self.tie_key else 3), bias=qkv_bias, **factory)
        extra = num_heads * self.core.extra_dim
        self.extra = nn.Linear(dim, extra, bias=qkv_bias, **factory) if extra else None
        self.q_norm = norm_layer(self.head_dim, **factory) if qk_norm and norm_layer else nn.Identity()
        self.k_norm = norm_layer(self.head_dim, **factory) if qk_norm and norm_layer else nn.Identity()
        self.norm = norm_layer(dim, **factory) if scale_norm and norm_layer else nn.Identity()
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **factory)
        self.proj2 = nn.Linear(dim, dim, bias=proj_bias, **factory) if double_proj else nn.Identity()
        self.proj_drop = nn.Dropout(proj_drop)

    def __prepare_scriptable__(self) -> nn.Module:
        """Gives TorchScript, which timm still tests, a traced copy: its compiler does not know our Python."""
        return _Traced(self)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Applies the layer.

        Args:
            x: tokens, (B, N, C).
            attn_mask: boolean, True means "takes part". (B, 1, 1, N) marks padded tokens, which count neither as keys
                nor as queries and get output 0; (N, N), (B, 1, N, N) and (B, H, N, N) exclude single pairs.
            is_causal: token i sees tokens 0..i only.

        Returns:
            Tokens, (B, N, C).

        Raises:
            ConfigError: the mechanism does not support the mask, or its shape or dtype has no meaning here.
        """
        mask = read_mask(x, attn_mask, is_causal, self.num_heads)
        real = None if mask.keys is None else mask.keys[..., None]
        if real is not None:
            x = torch.where(real, x, x.new_zeros(()))  # before any product: NaN times a zero gradient is NaN
        if self.core.absorbs(mask) and isinstance(self.k_norm, nn.Identity):
            heads = self.core.absorbed(x, self._projections(), mask)
        else:
            heads = self.core(*self.project(x), mask).transpose(1, 2).flatten(2)
        out = self.proj2(self.proj(self.norm(heads.to(x.dtype))))
        out = self.proj_drop(out.expand(x.shape))
        return out if real is None else torch.where(real, out, out.new_zeros(()))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries (B, H, N, D + extra_dim), keys and values (B, H, N, D) of tokens (B, N, C)."""
        parts = self.qkv(x).unflatten(-1, (-1, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k, v = parts[0], parts[0] if self.tie_key else parts[1], parts[-1]
        q, k = self.q_norm(q), self.k_norm(k)
        if self.extra is not None:
            q = torch.cat([q, self.extra(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)], -1)
        return q, k, v

    def _projections(self) -> Projections:
        """Returns the parts of the fused projection."""
        names = ("q", "v") if self.tie_key else ("q", "k", "v")
        parts = dict(zip(names, self.qkv.weight.chunk(len(names)), strict=True))
        if self.qkv.bias is not None:
            biases = self.qkv.bias.chunk(len(names))
            parts.update({f"{name}_bias": bias for name, bias in zip(names, biases, strict=True)})
        return Projections(**parts)

    def matrix(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Returns the mixing matrix of each head on tokens (B, N, C): (B, H, N, N). Raises where there is none."""
        q, k, _ = self.project(x)
        return self.core.matrix(q, k, read_mask(x, attn_mask, is_causal, self.num_heads))

    def token_map(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, kind: str | None = None
    ) -> Tensor:
        """Returns the relevance of each token on tokens (B, N, C): (B, H, N). Raises where there is none."""
        q, k, _ = self.project(x)
        return self.core.token_map(q, k, read_mask(x, attn_mask, is_causal, self.num_heads), kind)

    @torch.no_grad()
    def fold_projection(self) -> None:
        """Replaces the two output projections by their product: `W = W2 W1`, `b = W2 b1 + b2`. The same function."""
        if not isinstance(self.proj2, nn.Linear):
            return

        def wide(x: Tensor) -> Tensor:
            return (x.cpu() if x.device.type == "mps" else x).double()  # MPS has no float64

        first, outer = self.proj, wide(self.proj2.weight)
        if first.bias is not None:
            first.bias.copy_(outer @ wide(first.bias) + wide(self.proj2.bias))
        first.weight.copy_(outer @ wide(first.weight))
        self.proj2 = nn.Identity()


class _Traced(nn.Module):
    """TorchScript form of an attention layer, in the mode (training or not) it was made in; without masks."""

    def __init__(self, layer: AttentionLayer) -> None:
        super().__init__()
        weight = layer.proj.weight
        tokens = 3 if layer.core.capabilities.any_length else layer.core.num_tokens
        self.layer = torch.jit.trace(layer, weight.new_zeros(2, tokens, weight.shape[1]), check_trace=False)

    def forward(self, x: Tensor, attn_mask: Optional[Tensor] = None, is_causal: bool = False) -> Tensor:  # noqa: UP045
        assert attn_mask is None, "masks are not available under TorchScript"
        assert not is_causal, "causal masks are not available under TorchScript"
        return self.layer(x)


def read_mask(x: Tensor, attn_mask: Tensor | None, is_causal: bool, num_heads: int) -> Mask:
    """Interprets timm's mask arguments for tokens (B, N, C); see `AttentionLayer.forward`.

    Raises:
        ConfigError: the mask is not boolean, or its shape has no meaning here.
    """
    if attn_mask is None:
        return Mask(causal=is_causal)
    batch, tokens, _ = x.shape
    if attn_mask.dtype != torch.bool:
        raise ConfigError(f"attn_mask must be boolean (True: takes part), not {attn_mask.dtype}: not every mechanism "
                          "has logits to add a bias to.")  # fmt: skip
    shape = tuple(attn_mask.shape)
    if shape == (batch, 1, 1, tokens):
        real = attn_mask[:, 0, 0]
        return Mask(keys=real, queries=real, causal=is_causal)
    if shape != (tokens, tokens) and shape not in [(b, h, tokens, tokens) for b in (1, batch) for h in (1, num_heads)]:
        raise ConfigError(
            f"attn_mask of shape {shape} for {batch} x {tokens} tokens: give ({batch}, 1, 1, {tokens}) for padding, "
            f"or ({tokens}, {tokens}), ({batch}, 1, {tokens}, {tokens}) or ({batch}, {num_heads}, {tokens}, {tokens}) "
            "for single pairs, as scaled_dot_product_attention takes them."
        )
    return Mask(pairs=attn_mask, causal=is_causal)
