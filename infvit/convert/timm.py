"""timm's attention: which of its classes are converted, which are refused, and why.

No forward of timm's is written anew. While a converted module runs its own forward, the one call in it that mixes
tokens goes to the mechanism (`timm_doors.py`); fused projections, normalised, rotated, grouped, pooled or windowed
queries and keys, gates, biases and masks remain what timm makes of them. The tables are those of timm 1.0.31; a class
that is in neither, a newer one or somebody's subclass, is refused.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from timm.layers import register_notrace_module
from torch import nn

from infvit.convert.site import Library, Site, converted_core, library_class
from infvit.convert.timm_doors import FusedDoor, ShiftedWindows, SoftmaxDoor

Number = str | int | Callable[[Any], int]


@dataclass(frozen=True)
class Kind:
    """How one class of timm's is converted.

    Attributes:
        path: `module:Class` below `timm`.
        head_dim: channels of a query per head: the number, the name of an attribute, or a function of the module.
        heads: heads, likewise.
        doors: what catches its call: `FusedDoor` where its forward can call torch's fused kernel, `SoftmaxDoor` where
            it calls a softmax of its own logits, and what comes before them.
        layout: class attributes of the doors.
        bias: whether a module has a bias on its logits.
        cross: whether a module has other numbers of queries than of keys.
        projection: the name of its projection of the tokens, where one more beside it can be added.
    """

    path: str
    head_dim: Number = "head_dim"
    heads: Number = "num_heads"
    doors: tuple[type, ...] = (FusedDoor,)
    layout: dict[str, Any] = field(default_factory=dict)
    bias: Callable[[Any], bool] = lambda module: False
    cross: Callable[[Any], bool] = lambda module: False
    projection: str | None = None

    def needs(self, module: nn.Module) -> set[str]:
        """Returns the capabilities that all calls of a module take."""
        needs = {"bias", "matrix"} if SoftmaxDoor in self.doors else set()
        needs |= {"bias"} if self.bias(module) else set()
        needs |= {"pairwise"} if ShiftedWindows in self.doors else set()
        return needs | ({"cross"} if self.cross(module) else set())


def _always(module: Any) -> bool:
    return True


def _third(module: Any) -> int:
    """Channels per head of a fused projection of queries, keys and values of one size."""
    return int(module.qkv.out_features) // (3 * module.num_heads)


def _share(module: Any) -> int:
    return int(module.dim) // int(module.num_heads)


def _softmax(path: str, head_dim: Number = "head_dim", **options: Any) -> Kind:
    return Kind(path, head_dim, doors=(SoftmaxDoor,), **options)


def _biased(path: str, head_dim: Number, bias: Callable[[Any], bool], **layout: Any) -> Kind:
    return Kind(path, head_dim, bias=bias, layout={"mask_is_bias": True, **layout})


def _swin(path: str, door: type, **layout: Any) -> Kind:
    return Kind(path, _third, doors=(ShiftedWindows, door), layout=layout, bias=_always)


KINDS = [
    Kind("layers.attention:Attention", projection="qkv"),
    Kind("layers.attention:AttentionRope"),
    Kind("layers.attention2d:Attention2d", "dim_head"),
    Kind("layers.attention2d:MultiQueryAttention2d", "key_dim", cross=lambda m: m.kv_stride > 1 or m.has_query_strides),
    Kind("layers.attention_pool:AttentionPoolLatent", cross=_always, layout={"self_attention": False}),
    Kind("layers.attention_pool:AttentionPoolPrr"),
    Kind("layers.attention_pool2d:AttentionPool2d"),
    Kind("layers.attention_pool2d:RotAttentionPool2d"),
    _softmax("layers.bottleneck_attn:BottleneckAttn", "dim_head_qk", layout={"heads_in_batch": True}),
    _softmax("layers.halo_attn:HaloAttn", "dim_head_qk", layout={"heads_in_batch": True, "groups": 2}, cross=_always),
    _biased("models.beit:Attention", _third, lambda m: m.relative_position_bias_table is not None),
    Kind("models.cait:ClassAttn", lambda m: m.q.out_features // m.num_heads, cross=_always),
    _softmax("models.cait:TalkingHeadAttn", _third),
    _softmax("models.convit:MHSA", _third),
    Kind("models.cpubone:ConvAttention"),
    _softmax("models.crossvit:CrossAttention", lambda m: m.wq.out_features // m.num_heads, cross=_always),
    Kind("models.davit:WindowAttention", _third),
    _softmax("models.efficientformer:Attention", "key_dim"),
    _softmax("models.efficientformer_v2:Attention2d", "key_dim"),
    _softmax("models.efficientformer_v2:Attention2dDownsample", "key_dim", cross=_always),
    Kind("models.eva:EvaAttention"),
    Kind("models.fastvit:Attention"),
    _softmax("models.gcvit:WindowAttentionGlobal"),
    Kind("models.gemma4_vit:Gemma4Attention"),
    Kind("models.hiera:MaskUnitAttention", heads="heads", cross=lambda m: m.q_stride > 1, layout={"groups": 2}),
    Kind("models.hieradet_sam2:MultiScaleAttention", _third, cross=lambda m: m.q_pool is not None),
    Kind("models.iformer:SHMA", lambda m: m.q.c.out_channels, heads=1),
    _softmax("models.levit:Attention", "key_dim"),
    _softmax("models.levit:AttentionDownsample", "key_dim", cross=_always),
    Kind("models.lowformer:ConvAttention"),
    _biased("models.maxxvit:Attention2d", "dim_head", lambda m: m.rel_pos is not None),
    _biased("models.maxxvit:AttentionCl", "dim_head", lambda m: m.rel_pos is not None),
    Kind("models.metaformer:Attention"),
    _softmax("models.mvitv2:MultiScaleAttention", cross=_always),
    Kind("models.nest:Attention", _third, layout={"groups": 2}),
    Kind("models.nextvit:EfficientAttention", cross=lambda m: m.sr is not None),
    Kind("models.pvt_v2:Attention", cross=lambda m: m.sr is not None),
    _softmax("models.shvit:SHSA", "qk_dim", heads=1, layout={"heads_in_batch": True}),
    _swin("models.swin_transformer:WindowAttention", FusedDoor, mask_is_bias=True),
    _swin("models.swin_transformer_v2:WindowAttention", SoftmaxDoor),
    _swin("models.swin_transformer_v2_cr:WindowMultiHeadAttention", SoftmaxDoor),
    _biased("models.tiny_vit:Attention", "key_dim", _always),
    _softmax("models.tnt:Attention"),
    Kind("models.twins:GlobalSubSampleAttn", _share, cross=lambda m: m.sr is not None),
    Kind("models.twins:LocallyGroupedAttn", _share, layout={"groups": 1}),
    Kind("models.vision_transformer:ParallelScalingBlock"),
    _biased("models.vision_transformer_relpos:RelPosAttention", "head_dim", lambda m: m.rel_pos is not None),
    _biased("models.vision_transformer_sam:Attention", "head_dim", lambda m: m.use_rel_pos, heads_in_batch=True),
    Kind("models.visformer:Attention"),
    Kind("models.volo:Attention", _third),
    _softmax("models.volo:ClassAttention", cross=_always),
]

NO_PAIRS = "weighs channels or places by a gate; it has no queries and keys"
REFUSED = {
    "mixes channels, not tokens": ["models.davit:ChannelAttention", "models.davit:ChannelAttentionV2",
                                   "models.edgenext:CrossCovarianceAttn", "models.xcit:XCA"],
    "has no matrix of query-key pairs: its keys and values are summed first": [
        "models.coat:FactorAttnConvRelPosEnc", "models.efficientvit_mit:LiteMLA", "layers.lambda_layer:LambdaLayer"],
    "has no matrix of query-key pairs: it pools the tokens by one weight each": [
        "models.mobilevit:LinearSelfAttention", "models.swiftformer:EfficientAdditiveAttention"],
    "computes the weights of neighbours from each token alone; it has no keys": ["models.volo:OutlookAttention"],
    "mixes by the sum of two softmaxes, one of them of positions": ["models.convit:GPSA"],
    "mixes by the difference of two softmaxes": ["layers.diff_attention:DiffAttention",
                                                "models.vision_transformer:DiffParallelScalingBlock"],
    "computes its heads one after the other, each from the output of the one before": [
        "models.efficientvit_msra:CascadedGroupAttention"],
    "mixes the samples of a batch, by one channel": ["models.csatv2:SpatialTransformerBlock"],
    "raises values to a power and takes the root of the mixture, which needs weights that are not negative": [
        "layers.other_pool:SimPool1d", "layers.other_pool:SimPool2d"],
    "is a convolution whose kernel is called attention": ["models.nextvit:ConvAttention"],
    NO_PAIRS: ["layers.cbam:ChannelAttn", "layers.cbam:LightChannelAttn", "layers.cbam:SpatialAttn",
               "layers.cbam:LightSpatialAttn", "layers.coord_attn:CoordAttn", "layers.coord_attn:SimpleCoordAttn",
               "layers.coord_attn:EfficientLocalAttn", "layers.coord_attn:StripAttn",
               "layers.non_local_attn:BilinearAttnTransform", "layers.selective_kernel:SelectiveKernelAttn",
               "layers.split_attn:SplitAttn"],
}  # fmt: skip


def _load(path: str) -> type[nn.Module] | None:
    """Returns a class of timm's; None where this version has no such class."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(f"timm.{module}"), name, None)
    except ModuleNotFoundError:
        return None


def _known() -> dict[type[nn.Module], tuple[Kind, type[nn.Module]]]:
    """Makes the converted class of each kind, in this module, where pickle finds it; returns both by timm's class."""
    known = {}
    for kind in KINDS:
        if (original := _load(kind.path)) is None:
            continue
        name = f"InfSA_{kind.path.rpartition('.')[2].replace(':', '_')}"
        body = {"__module__": __name__, "__doc__": f"timm's `{kind.path}` with a mechanism for its attention."}
        converted = register_notrace_module(type(name, (*kind.doors, original), {**kind.layout, **body}))
        globals()[name] = converted
        known[original] = kind, converted
    return known


KNOWN = _known()
REASONS = {cls: reason for reason, paths in REFUSED.items() for path in paths if (cls := _load(path)) is not None}


def find(model: nn.Module) -> list[Site]:
    """Returns timm's attention in a model: classes of the tables, and subclasses of those as refused."""
    shared = any(
        getattr(module, name, None) is not None
        for module in model.modules()
        for name in ("rel_pos_bias", "shared_rel_pos")
    )  # a bias of the whole model, handed to every layer
    classes: tuple[type[nn.Module], ...] = tuple(KNOWN)
    sites = []
    for name, module in model.named_modules():
        cls = library_class(module)
        if cls in KNOWN:
            sites.append(_site(name, module, *KNOWN[cls], shared))
        elif cls in REASONS:
            sites.append(Site(name, module, 0, 0, refusal=REASONS[cls]))
        elif isinstance(module, classes):
            refusal = "a subclass of timm's attention that infvit does not know; it may compute something else"
            sites.append(Site(name, module, 0, 0, refusal=refusal))
    return sites


def _site(name: str, module: nn.Module, kind: Kind, converted: type[nn.Module], shared: bool) -> Site:
    heads, head_dim = (_number(module, number) for number in (kind.heads, kind.head_dim))
    needs = kind.needs(module) | ({"bias"} if shared and kind.layout.get("mask_is_bias") else set())
    scale = getattr(module, "scale", None)
    refusal = None
    if kind.doors == (FusedDoor,) and scale is not None and not math.isclose(scale, head_dim**-0.5):
        refusal = (
            f"its scale is {scale}, which timm's fused kernel ignores; set it to {head_dim}**-0.5, or scale the keys"
        )
    drop = getattr(module, "attn_drop", None)
    return Site(
        name,
        module,
        heads,
        head_dim,
        converted,
        dropout=drop.p if isinstance(drop, nn.Dropout) else 0.0,
        needs=frozenset(needs),
        refusal=refusal,
        projection=getattr(module, kind.projection) if kind.projection else None,
    )


def _number(module: nn.Module, number: Number) -> int:
    if isinstance(number, int):
        return number
    return int(getattr(module, number) if isinstance(number, str) else number(module))


def settle(model: nn.Module) -> None:
    """Renames the architecture under which timm saves a model, `NAME+MECHANISM` while it is converted.

    timm builds a saved model by that name, and where its number of classes is another one reports the weights of a
    mechanism, which its own attention has no place for, in a line of its log only. No model has the new name, so that
    it raises.
    """
    for module in model.modules():
        config = getattr(module, "pretrained_cfg", None)
        if isinstance(config, dict) and config.get("architecture"):
            plain = config["architecture"].partition("+")[0]
            core = next((core for part in module.modules() if (core := converted_core(part))), None)
            config["architecture"] = plain if core is None else f"{plain}+{core.name}"


LIBRARY = Library("timm (its attention classes)", find, settle)
