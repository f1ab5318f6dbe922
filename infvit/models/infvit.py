"""InfViT: timm's `VisionTransformer` with a registered attention mechanism, as published (arXiv 2603.00175).

The published parameter counts fix what the text leaves open: a second output projection behind the first in every
attention block, and one pooled d x d layer with tanh before the classifier.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from math import prod
from typing import Any, Optional

from timm.layers import to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._input import update_model_args
from timm.models.vision_transformer import Block, VisionTransformer, checkpoint_filter_fn, get_init_weights_vit
from torch import Tensor, nn

from infvit.attention import AttentionLayer, get_mechanism, hyperparameters, list_mechanisms
from infvit.errors import ConfigError

__all__ = ["InfViT"]  # timm's decorator adds every entry point


class InfViT(VisionTransformer):
    """Vision transformer around any registered attention mechanism.

    Args:
        *args: as `timm.models.vision_transformer.VisionTransformer`.
        attention: name of a registered mechanism.
        tie_key: use the query projection for the keys; None asks the mechanism.
        double_proj: a second output projection in each attention block, as published.
        pooler: the pooled d x d layer with tanh before the classifier, as published; False: the head of a DeiT.
        **kwargs: the mechanism's hyperparameters (`gamma=0.5`); everything else goes to timm's `VisionTransformer`.

    Raises:
        TypeError: an argument that neither the mechanism nor timm's class knows.
        ConfigError: a value that is not allowed.
    """

    def __init__(
        self,
        *args: Any,
        attention: str = "softmax",
        tie_key: bool | None = None,
        double_proj: bool = True,
        pooler: bool = True,
        **kwargs: Any,
    ) -> None:
        given = {**dict(zip(("img_size", "patch_size"), args, strict=False)), **kwargs}
        if not (given.get("dynamic_img_size") and given.get("dynamic_img_pad")):
            _check_image_size(given.get("img_size", 224), given.get("patch_size", 16))
        own = hyperparameters(get_mechanism(attention)) - {"num_tokens"}
        mechanism_args = {name: kwargs.pop(name) for name in list(kwargs) if name in own}
        for name in kwargs.keys() & {
            key for other in list_mechanisms() for key in hyperparameters(get_mechanism(other))
        }:
            raise TypeError(f"attention {attention!r} has no {name!r}; it takes {sorted(own) or 'nothing of its own'}")
        if not get_mechanism(attention).capabilities.any_length:
            for name in ("dynamic_img_size", "patch_drop_rate"):
                if kwargs.get(name):
                    raise ConfigError(f"attention {attention!r} takes one number of tokens; {name} changes it.")
        options = {
            "mechanism": attention,
            "mechanism_args": mechanism_args,
            "tie_key": tie_key,
            "double_proj": double_proj,
        }
        try:
            super().__init__(*args, **kwargs, block_fn=partial(self._block, options), attn_layer=_Deferred)  # type: ignore
        except TypeError as error:
            raise TypeError(f"{error} (attention {attention!r} takes {sorted(own) or 'nothing of its own'})") from error
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        self.attention = attention
        self.class_token_only = False  # see `reparameterize`
        # Not called `pre_logits`: timm's checkpoint filter drops that name.
        self.pooler: nn.Module = nn.Identity()
        self.pooler_act: nn.Module = nn.Identity()
        if pooler:
            self.pooler = nn.Linear(self.embed_dim, self.embed_dim, device=device, dtype=dtype)
            self.pooler_act = nn.Tanh()
        if pooler and kwargs.get("weight_init") != "skip":
            get_init_weights_vit(self.weight_init_mode, needs_reset=False)(self.pooler, name="pooler")

    def _block(self, options: dict[str, Any], **kwargs: Any) -> Block:
        """Builds timm's block around our attention layer; timm hands options of ours to neither of them."""
        block = Block(**kwargs)
        assert isinstance(block.attn, _Deferred)
        if not get_mechanism(options["mechanism"]).capabilities.any_length:
            tokens = self.patch_embed.num_patches + self.num_prefix_tokens
            options = {**options, "mechanism_args": {**options["mechanism_args"], "num_tokens": tokens}}
        block.attn = AttentionLayer(**block.attn.arguments, **options)
        return block

    def forward(self, x: Tensor, attn_mask: Optional[Tensor] = None, is_causal: bool = False) -> Tensor:  # noqa: UP045
        """Classifies images (B, 3, height, width); see timm for the masks."""
        if self.class_token_only and self.global_pool == "token" and self.attn_pool is None and len(self.blocks) > 0:
            return self.forward_head(self._class_token(x, attn_mask, is_causal))
        return self.forward_head(self.forward_features(x, attn_mask=attn_mask, is_causal=is_causal))

    def _class_token(self, x: Tensor, attn_mask: Optional[Tensor], is_causal: bool) -> Tensor:  # noqa: UP045
        """Returns the class token alone, (B, 1, C), as `forward_features` has it at position 0.

        No token but this one is read behind the last attention, so the last MLP is applied to no other.
        """
        x = self.norm_pre(self.patch_drop(self._pos_embed(self.patch_embed(x))))
        for block in self.blocks[:-1]:
            x = block(x, attn_mask=attn_mask, is_causal=is_causal)
        last = self.blocks[-1]
        mixed = last.attn(last.norm1(x), attn_mask=attn_mask, is_causal=is_causal)  # type: ignore[operator]
        x = x[:, :1] + last.drop_path1(last.ls1(mixed[:, :1]))  # type: ignore[operator]
        x = x + last.drop_path2(last.ls2(last.mlp(last.norm2(x))))  # type: ignore[operator]
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pools tokens (B, N, C) and classifies them; with `pre_logits` returns what enters the classifier."""
        x = self.fc_norm(self.pool(x))
        x = self.head_drop(self.pooler_act(self.pooler(x)))
        return x if pre_logits else self.head(x)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops what the given intermediate layers do not need; see timm."""
        if prune_head:
            self.pooler, self.pooler_act = nn.Identity(), nn.Identity()
        return super().prune_intermediate_layers(indices, prune_norm, prune_head)

    def __prepare_scriptable__(self) -> nn.Module:
        """Gives TorchScript a copy: it would put its form of our attention layers into this model."""
        return deepcopy(self)

    def set_input_size(
        self, img_size: tuple[int, int] | None = None, patch_size: tuple[int, int] | None = None
    ) -> None:
        """Changes the image or patch size and resizes the position embedding; see timm.

        Raises:
            ConfigError: the image size is not divisible by the patch size, or gives another number of patches to an
                attention that was built for one.
        """
        patch_embed = self.patch_embed
        sizes = img_size or patch_embed.img_size, patch_size or patch_embed.patch_size
        if not (self.dynamic_img_size and patch_embed.dynamic_img_pad):
            _check_image_size(*sizes)
        if not get_mechanism(self.attention).capabilities.any_length:
            patches = prod(size // step for size, step in zip(*map(to_2tuple, sizes), strict=True))
            if patches != patch_embed.num_patches:
                raise ConfigError(
                    f"attention {self.attention!r} was built for {patch_embed.num_patches} patches, and "
                    f"img_size={sizes[0]} has {patches}; create the model with that img_size instead (its weights do "
                    "not carry over)."
                )
        super().set_input_size(img_size, patch_size)


class _Deferred(nn.Module):
    """Stands where timm's block builds its attention, and keeps the arguments it was given."""

    def __init__(self, dim: int, **kwargs: Any) -> None:
        super().__init__()
        self.arguments = {"dim": dim, **kwargs}


def _check_image_size(img_size: int | Sequence[int] | None, patch_size: int | Sequence[int]) -> None:
    """Refuses an image size that the patches do not cover: timm would cut the rest off without a word."""
    if img_size is None:
        return
    for size, step in zip(to_2tuple(img_size), to_2tuple(patch_size), strict=True):
        if size % step:
            near = [m for m in (size // step * step, (size // step + 1) * step) if m]
            raise ConfigError(f"img_size={size} is not divisible by the patch size {step}; nearest: {near}.")


def reparameterize(model: nn.Module) -> nn.Module:
    """Brings a model into its form for inference, in place. The function stays the same up to rounding.

    * The two output projections of every attention layer become one; the parameters of the second are gone.
    * `forward` of a model that reads nothing but the class token applies its last MLP to that token alone. What
      `forward_features` and its relatives return stays as it is.

    Args:
        model: any model; layers that are not ours stay as they are.

    Returns:
        The same model.

    Raises:
        ConfigError: not a module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"reparameterize takes a torch.nn.Module, not {type(model).__name__}.")
    for module in model.modules():
        if isinstance(module, AttentionLayer):
            module.fold_projection()
        elif isinstance(module, InfViT):
            module.class_token_only = True
            update_model_args(module, double_proj=False)  # what `save_for_hf` writes down
    return model


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        **kwargs,
    }


_MINI = _cfg(num_classes=10, input_size=(3, 32, 32), crop_pct=1.0)

# Attention mechanisms from other papers, each as `vit_4l_NAME`: the baseline with only the mechanism exchanged.
PEERS = (
    "softmax_unfused",
    "linear_transformer",
    "performer",
    "linformer",
    "nystromformer",
    "efficient",
    "cosformer",
    "singularformer",
)

default_cfgs = generate_default_cfgs(
    {
        **{f"vit_4l_{attention}.untrained": _cfg() for attention in PEERS},
        "vit_4l.untrained": _cfg(),
        "infvit_pure_4l.untrained": _cfg(),
        "infvit_linear_4l.untrained": _cfg(),
        "vit_24l.untrained": _cfg(),
        "infvit_pure_24l.untrained": _cfg(),
        "infvit_linear_24l.untrained": _cfg(),
        "agf_4l.untrained": _cfg(),
        "deit_tiny_agf.untrained": _cfg(),
        "deit_small_agf.untrained": _cfg(),
        "vit_mini.untrained": _MINI,
        "agf_mini.untrained": _MINI,
        "infvit_pure_mini.untrained": _MINI,
        "infvit_linear_mini.untrained": _MINI,
    }
)

# Widths that reproduce the published parameter counts; `qkv_bias` is timm's default.
_4L: dict[str, Any] = {"patch_size": 16, "embed_dim": 1024, "depth": 4, "num_heads": 64}
_24L: dict[str, Any] = {"patch_size": 16, "embed_dim": 1024, "depth": 24, "num_heads": 16}
# timm's DeiT, with another attention: its head, and one output projection.
_DEIT: dict[str, Any] = {"patch_size": 16, "depth": 12, "double_proj": False, "pooler": False}
# timm's "jax" initialisation (Xavier): the default, normal with std 0.02, all but silences branches of width 96.
_MINI_ARGS: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 4,
    "embed_dim": 96,
    "depth": 4,
    "num_heads": 6,
    "weight_init": "jax",
}


def _create(variant: str, pretrained: bool, defaults: dict[str, Any], kwargs: dict[str, Any]) -> InfViT:
    out_indices = kwargs.pop("out_indices", 3)
    return build_model_with_cfg(
        InfViT,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **{**defaults, **kwargs},
    )


@register_model
def vit_4l(pretrained: bool = False, **kwargs: Any) -> InfViT:
    """Softmax baseline, 4 layers, width 1024, 64 heads: 57.7 M parameters."""
    return _create("vit_4l", pretrained, _4L, kwargs)


def _peer(attention: str) -> Callable[..., InfViT]:
    """Registers `vit_4l` with another attention mechanism; a function of this module like those written out."""

    def entry(pretrained: bool = False, **kwargs: Any) -> InfViT:
        return _create(entry.__name__, pretrained, {**_4L, "attention": attention}, kwargs)

    entry.__name__ = entry.__qualname__ = f"vit_4l_{attention}"
    entry.__doc__ = f"`vit_4l` with the attention mechanism `{attention}`; see docs/mechanisms.md."
    return register_model(entry)


globals().update({entry.__name__: entry for entry in map(_peer, PEERS)})


@register_model
def infvit_pure_4l(pretrained: bool = False, **kwargs: Any) -> InfViT:
    """Pure InfSA, 4 layers, width 1024, 64 heads: 57.7 M parameters."""
    return _create("infvit_pure_4l", pretrained, {**_4L, "attention": "infsa_pure"}, kwargs)


@register_model
def infvit_linear_4l(pretrained: bool = False, **kwargs: Any) -> InfViT:
    """Linear InfSA with keys tied to the queries, 4 layers, width 1024, 64 heads: 53.5 M parameters."""
    return _create("infvit_linear_4l", pretrained, {**_4L, "attention": "infsa_linear"}, kwargs)


@register_model
def vit_24l(pretrained: bool = False, **kwargs: Any) -> InfViT:
    """Softmax baseline, 24 layers, width 1024, 16 heads: 330.6 M parameters."""
    return _create("vit_24l", pretrained, _24L, kwargs)


@register_model
def infvit_pure_24l(pretrained: bool = False, **kwargs: Any) -> InfViT:
    """Pure InfSA, 24 layers, width 1024, 16 heads: 330.6 M parameters."""
    return _create("infvit_pure_24l", pretrained, {**_24L, "attention": "infsa_pure"}, kwargs)


@register_model
def infvit_linear_24l(pretrained: bool = False, **kwargs: Any) -> InfViT:
    """Linear InfSA with keys tied to the queries, 24 layers, width 1024, 16 heads: 305.4 M parameters."""
    return _create("infvit_linear_24l", pretrained, {**_24L, "attention": "infsa_linear"}, kwargs)


@register_model
def agf_4l(pretrained: bool = False, **kwargs: Any) -> InfViT:
    """AGF, 4 layers, width 1024, 64 heads: 61.8 M parameters."""
    return _create("agf_4l", pretrained, {**_4L, "attention": "agf"}, kwargs)


@register_model
def deit_small_agf(pretrained: bool = False, **kwargs: Any) -> InfViT:
    """DeiT-S with AGF for attention, 12 layers, width 384, 6 heads: 23.8 M parameters."""
    return _create(
        "deit_small_agf", pretrained, {**_DEIT, "embed_dim": 384, "num_heads": 6, "attention": "agf"}, kwargs
    )


@register_model
def deit_tiny_agf(pretrained: bool = False, **kwargs: Any) -> InfViT:
    """DeiT-Ti with AGF for attention, 12 layers, width 192, 3 heads: 6.2 M parameters."""
    return _create("deit_tiny_agf", pretrained, {**_DEIT, "embed_dim": 192, "num_heads": 3, "attention": "agf"}, kwargs)


@register_model
def vit_mini(pretrained: bool = False, **kwargs: Any) -> InfViT:
    """Softmax baseline for small images on a CPU: 4 layers, width 96, 6 heads, patch 4."""
    return _create("vit_mini", pretrained, _MINI_ARGS, kwargs)


@register_model
def infvit_pure_mini(pretrained: bool = False, **kwargs: Any) -> InfViT:
    """Pure InfSA for small images on a CPU: 4 layers, width 96, 6 heads, patch 4."""
    return _create("infvit_pure_mini", pretrained, {**_MINI_ARGS, "attention": "infsa_pure"}, kwargs)


@register_model
def infvit_linear_mini(pretrained: bool = False, **kwargs: Any) -> InfViT:
    """Linear InfSA for small images on a CPU: 4 layers, width 96, 6 heads, patch 4."""
    return _create("infvit_linear_mini", pretrained, {**_MINI_ARGS, "attention": "infsa_linear"}, kwargs)


@register_model
def agf_mini(pretrained: bool = False, **kwargs: Any) -> InfViT:
    """AGF for small images on a CPU: 4 layers, width 96, 6 heads, patch 4."""
    return _create("agf_mini", pretrained, {**_MINI_ARGS, "attention": "agf"}, kwargs)
