"""Every family of timm's that has attention: converted exactly, or refused by name; no model crashes.

Whole models run once, with weights that nobody initialised, which saves time. Each class of attention in them then runs
alone, in float64 and with random weights, on inputs like those its model gave it, against the formula in place of its
softmax.
"""

import re
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import timm
import torch
from timm.layers import Attention2d, AttentionPool2d, AttentionPoolPrr, RotAttentionPool2d
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.halo_attn import HaloAttn
from timm.models import list_models, list_modules
from timm.models.vision_transformer_sam import Attention as SamAttention
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

import infvit
from infvit.convert.timm import KNOWN, REASONS
from infvit.convert.timm_doors import ShiftedWindows
from infvit.errors import ConfigError
from infvit.testing.conversion import Formula

CONVERTED = [
    "beit_base_patch16_224", "halonet26t", "eca_botnext26ts_256", "resnet50_clip", "cait_xxs24_224",
    "convit_tiny", "cpubone_nano", "crossvit_tiny_240", "csatv2", "davit_tiny", "davit_base_fl",
    "vit_tiny_patch16_dinov3_qkvb", "deepseek_vit_412m", "deit_tiny_patch16_224", "efficientformer_l1",
    "efficientformerv2_s0",
    "eva02_tiny_patch14_224", "vit_pe_core_tiny_patch16_384", "fastvit_mci0", "gcvit_xxtiny", "gemma4_vit_167m",
    "hiera_tiny_224", "sam2_hiera_tiny", "iformer_t", "levit_128s", "lowformer_b0",
    "coatnet_nano_rw_224", "maxvit_tiny_pm_256", "caformer_s18", "mobilenetv4_hybrid_medium", "mobilenetv5_300m",
    "mobilevit_xxs", "mvitv2_tiny", "naflexvit_base_patch16_gap", "naflexvit_base_patch16_map", "nest_tiny",
    "nextvit_small", "pit_ti_224", "pvt_v2_b0", "qwen3_vit_88m", "shvit_s1", "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256", "swinv2_cr_tiny_ns_224", "tiny_vit_5m_224", "tnt_s_patch16_224", "twins_svt_small",
    "visformer_tiny", "vit_tiny_patch16_224", "vit_pwee_patch16_reg1_gap_256", "vit_tiny_r_s16_p8_224",
    "vit_relpos_small_patch16_224", "vit_srelpos_small_patch16_224", "samvit_base_patch16_224",
    "vitamin_small_224", "volo_d1_224", "xcit_nano_12_p16_224",
]  # fmt: skip
REFUSED = [
    "lambda_resnet26t", "bat_resnext26ts", "coat_tiny", "edgenext_xx_small", "efficientvim_m1", "efficientvit_b0",
    "efficientvit_m0", "resnest14d", "skresnet18", "swiftformer_xs", "mobilevitv2_050",
    "vit_dwee_patch16_reg1_gap_256", "vit_dpwee_patch16_reg1_gap_256",
]  # fmt: skip

SHALLOW: dict[str, dict] = {
    **{name: {"depth": 1} for name in (
        "beit_base_patch16_224", "cait_xxs24_224", "deepseek_vit_412m", "deit_tiny_patch16_224",
        "eva02_tiny_patch14_224", "vit_tiny_patch16_dinov3_qkvb", "vit_pe_core_tiny_patch16_384",
        "gemma4_vit_167m", "naflexvit_base_patch16_gap", "naflexvit_base_patch16_map", "qwen3_vit_88m",
        "vit_tiny_patch16_224", "vit_pwee_patch16_reg1_gap_256", "vit_tiny_r_s16_p8_224",
        "vit_relpos_small_patch16_224", "vit_srelpos_small_patch16_224", "samvit_base_patch16_224",
        "tnt_s_patch16_224", "xcit_nano_12_p16_224",
    )},
    **{name: {"depths": (1, 1, 1, 1)} for name in (
        "davit_tiny", "davit_base_fl", "pvt_v2_b0", "swin_tiny_patch4_window7_224",
        "swinv2_tiny_window8_256", "swinv2_cr_tiny_ns_224", "tiny_vit_5m_224",
    )},
    "convit_tiny": {"depth": 2, "local_up_to_layer": 1},
    "crossvit_tiny_240": {"depth": [[1, 1, 0]]},
    "pit_ti_224": {"depth": (1, 1, 1)},
}  # fmt: skip
SIZES = {
    **dict.fromkeys(("caformer_s18", "davit_tiny", "davit_base_fl", "nextvit_small", "pvt_v2_b0", "cpubone_nano"), 96),
    **dict.fromkeys(
        ("csatv2", "mobilenetv4_hybrid_medium", "mobilenetv5_300m", "resnet50_clip", "sam2_hiera_tiny"), 128
    ),
    **dict.fromkeys(("fastvit_mci0", "iformer_t", "lowformer_b0", "shvit_s1", "mobilevit_xxs"), 128),
    "deepseek_vit_412m": 224,
    "gemma4_vit_167m": 240,
    "qwen3_vit_88m": 224,
}
HUGE = {"mobilenetv5_300m"}
"""What saves time: fewer layers, smaller images than these models' own, and for the last the shapes only."""

PARTS = [
    (lambda: Attention2d(16, num_heads=2), (2, 16, 3, 4)),
    (lambda: AttentionPoolPrr(16, num_heads=2), (2, 5, 16)),
    (lambda: AttentionPool2d(16, 3, embed_dim=16, num_heads=2), (2, 16, 3, 3)),
    (lambda: BottleneckAttn(16, feat_size=(3, 3), num_heads=2), (2, 16, 3, 3)),
    (lambda: HaloAttn(16, num_heads=2, block_size=2, halo_size=1), (2, 16, 4, 4)),
    (lambda: SamAttention(16, num_heads=2, use_rel_pos=True, input_size=(3, 4)), (2, 3, 4, 16)),
    (lambda: RotAttentionPool2d(16, 8, embed_dim=16, num_heads=2, ref_feat_size=3), (2, 16, 3, 3)),
]
"""Classes that no model has, or a large one only, or whose heads are in the batch; and two images for them."""
VERIFIED = {AttentionPool2d}


class Uninitialised(TorchFunctionMode):
    """Leaves weights as they were allocated."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.erfinv_):
            return args[0]
        return func(*args, **(kwargs or {}))


def create(name: str) -> nn.Module:
    with torch.device("meta" if name in HUGE else "cpu"), Uninitialised():
        return timm.create_model(name, **SHALLOW.get(name, {}))


@cache
def swept(name: str) -> tuple[nn.Module, dict[type, tuple], int]:
    """Runs a converted model; returns it, what one layer of each class was given, and the number of calls."""
    model = infvit.convert(create(name), inplace=True).eval()
    given, calls = {}, []

    def note(layer, args, kwargs):
        calls.append(layer)
        given.setdefault(layer.original(), (layer, args, kwargs))

    for layer in converted(model):
        layer.register_forward_pre_hook(note, with_kwargs=True)
    size = SIZES.get(name, model.default_cfg["input_size"][-1])
    with torch.no_grad():
        model(torch.zeros(1, 3, size, size, device="meta" if name in HUGE else "cpu"))
    return model, given, len(calls)


def converted(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "infsa")]


def real(x):
    """Returns random numbers for a tensor."""
    return torch.randn(x.shape, dtype=torch.float64) if isinstance(x, torch.Tensor) else x


def initialised(layer: nn.Module) -> nn.Module:
    """Returns a copy in float64 with random weights, and without the hook of `swept`."""
    layer = deepcopy(layer).double()
    layer._forward_pre_hooks.clear()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


def channels(layer: nn.Module) -> int:
    """Returns the channels of a head, by timm's own scale where it has one."""
    if hasattr(layer, "scale"):
        return round(layer.scale**-2)
    return layer.qkv.weight.shape[0] // (3 * layer.num_heads) if hasattr(layer, "qkv") else layer.head_dim


def compare(layer: nn.Module, *args, **kwargs) -> None:
    """Compares a converted layer with the same layer as timm has it and the formula in place of its softmax."""
    plain = infvit.revert(deepcopy(layer))
    gamma = layer.infsa.decay().item()
    with torch.no_grad(), Formula("infsa_pure", channels(plain), gamma, excluded=-50.0) as formula:
        expected = plain(*args, **kwargs)
    assert formula.calls == 1
    with torch.no_grad():
        out = layer(*args, **kwargs)
    if isinstance(out, tuple):  # MViT returns the size of its grid, too
        out, expected = out[0], expected[0]
    assert_close(out, expected)
    assert out.std() > 1e-6


@pytest.mark.parametrize("name", REFUSED)
def test_models_without_attention_between_tokens_are_refused_by_the_name_of_its_class(name):
    model = create(name)
    with pytest.raises(ConfigError, match="nothing to convert in") as error:
        infvit.convert(model, inplace=True)
    classes = {type(module) for module in model.modules()}
    assert not classes & set(KNOWN)
    for cls in classes & set(REASONS):
        assert f"{cls.__name__} " in str(error.value)
        assert REASONS[cls] in str(error.value)


@pytest.mark.parametrize("name", CONVERTED)
def test_a_model_of_each_family_is_converted_exactly(name):
    model, given, calls = swept(name)
    report = model.conversion_report
    assert calls == len(report.converted) == len(converted(model))
    assert all("infvit does not know" not in entry.note for entry in report.refused)
    for cls, (layer, args, kwargs) in given.items():
        if cls in VERIFIED or name in HUGE:
            continue
        VERIFIED.add(cls)
        layer = initialised(layer)
        args, kwargs = [real(x) for x in args], {key: real(x) for key, x in kwargs.items()}
        if isinstance(layer, ShiftedWindows):
            args = args[:1]
            windows, tokens = args[0].shape[:2]
            neighbours = torch.rand(windows, tokens, tokens) < 0.7
            compare(layer, *args, mask=torch.where(neighbours, 0.0, -100.0).double())
        compare(layer, *args, **kwargs)


@pytest.mark.parametrize(("part", "shape"), PARTS)
def test_classes_alone_are_exact(part, shape):
    layer = initialised(infvit.convert(part()))
    compare(layer.eval(), torch.randn(shape).double())


@pytest.mark.slow
def test_no_family_and_no_class_is_left_out():
    attention = re.compile(r"scaled_dot_product_attention\(|softmax\(|\b\w*(Attention|Attn)\w*\(|MultiheadAttention")
    for family in list_modules():
        module = sys.modules.get(f"timm.models.{family}")  # or one of ours
        if module is not None and attention.search(Path(module.__file__).read_text()):
            assert set(list_models(module=family)) & {*CONVERTED, *REFUSED}, f"{family} is not swept"
    seen = {type(layer) for layer in (part() for part, _ in PARTS)}
    for name in CONVERTED:
        seen |= set(swept(name)[1])
    assert seen == set(KNOWN)
