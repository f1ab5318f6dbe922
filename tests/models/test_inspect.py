"""Maps and matrices of models against what their layers really compute."""

import re

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import infvit
from infvit.attention import Capabilities, SoftmaxAttention, list_mechanisms, register_mechanism
from infvit.attention import mechanism as registry
from infvit.errors import ConfigError, DataError
from infvit.models import attention_calls, attention_maps, mixing_matrices

TINY = {"depth": 2, "embed_dim": 24, "num_heads": 2}
OURS = ("vit_mini", "infvit_pure_mini", "infvit_linear_mini")
TIMM = {
    "vit_tiny_patch16_224": {**TINY, "img_size": (32, 48), "dynamic_img_size": True, "qk_norm": True},
    "deit_tiny_distilled_patch16_224": {**TINY, "img_size": 48},
    "vit_small_patch14_reg4_dinov2": {**TINY, "img_size": 42},
    "vit_relpos_small_patch16_224": {**TINY, "img_size": 48},
    "vit_small_patch16_dinov3": {**TINY, "img_size": 48},
    "eva02_tiny_patch14_224": {**TINY, "img_size": 42},
    "beit_base_patch16_224": {**TINY, "img_size": 48},
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    """Returns a model with weights that are not all alike, and two images of its size."""
    arguments = TIMM.get(name, {**TINY, "img_size": (16, 24)})
    model = timm.create_model(name, **arguments).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    side = arguments["img_size"]
    return model, torch.randn(2, 3, *(side if isinstance(side, tuple) else (side, side)))


@pytest.mark.parametrize("name", [*OURS, *TIMM])
def test_the_matrix_is_the_one_that_mixes(name: str) -> None:
    """matrix @ v, through the layer's own output projection, is the layer's output: normed, rotated, biased queries."""
    model, images = build(name)
    calls = attention_calls(model, images)
    outputs: list[Tensor] = []
    layers = [call.layer for call in calls]
    handles = [layer.register_forward_hook(lambda _, __, out: outputs.append(out)) for layer in layers]
    with torch.no_grad():
        model(images)
    for handle in handles:
        handle.remove()
    assert len(calls) == 2
    for call, matrix, output in zip(calls, mixing_matrices(model, images), outputs, strict=True):
        layer = call.layer
        if name in OURS:
            v = layer.project(call.tokens)[2]
        elif layer.qkv is not None:
            bias = getattr(layer, "v_bias", None)
            weight = layer.qkv.weight.chunk(3)[2]
            bias = layer.qkv.bias.chunk(3)[2] if bias is None and layer.qkv.bias is not None else bias
            v = nn.functional.linear(call.tokens, weight, bias).unflatten(-1, (2, -1)).transpose(1, 2)
        else:
            v = layer.v_proj(call.tokens).unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = (matrix @ v).transpose(1, 2).flatten(2)
        out = layer.proj(layer.norm(mixed) if hasattr(layer, "norm") else mixed)
        out = layer.proj2(out) if name in OURS else out
        assert_close(out, output, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "prefix", "grid"),
    [("infvit_linear_mini", 1, (4, 6)), ("infvit_pure_mini", 1, (4, 6)), ("vit_mini", 1, (4, 6)),
     ("vit_tiny_patch16_224", 1, (2, 3)), ("deit_tiny_distilled_patch16_224", 2, (3, 3)),
     ("vit_small_patch14_reg4_dinov2", 5, (3, 3)), ("vit_relpos_small_patch16_224", 0, (3, 3))],
)  # fmt: skip
def test_maps_leave_the_prefix_out(name: str, prefix: int, grid: tuple[int, int]) -> None:
    """0, 1, 2 and 5 tokens come before the patches; grids of 4 x 6 too. Row 0 of the matrix is the class token's."""
    model, images = build(name)
    maps, matrices = attention_maps(model, images), mixing_matrices(model, images)
    assert maps.shape == (2, 2, 2, *grid)
    assert matrices.shape[-1] == prefix + grid[0] * grid[1]
    gamma = 0.5 if "infvit" in name else None
    if gamma:
        gamma = model.blocks[0].attn.core.decay().flatten()[0]
    expected = {
        "infvit_linear_mini": lambda: matrices[..., 0, prefix:] / gamma,
        "infvit_pure_mini": lambda: matrices.sum(-2)[..., prefix:] / gamma,
        "vit_relpos_small_patch16_224": lambda: matrices.sum(-2),
    }.get(name, lambda: matrices[..., 0, prefix:])()
    first = 1 if gamma is not None else 2  # the layers have gammas of their own
    assert_close(maps[:first].flatten(3), expected[:first], rtol=1e-4, atol=1e-6)


def test_katz_is_the_sum_over_all_paths() -> None:
    """Against the series sum_t (gamma A)^t in float64, prefix token included and taken off afterwards."""
    model, images = build("infvit_pure_mini")
    call = attention_calls(model.double(), images.double())[1]
    weights, power, total = call.matrix(), call.matrix(), torch.zeros(2, 2, 25, dtype=torch.float64)
    for _ in range(200):
        total, power = total + power.sum(-2), power @ weights
    assert_close(call.token_map("katz"), total)
    assert_close(attention_maps(model, images.double(), "katz")[1].flatten(2), total[..., 1:])


def test_every_registered_mechanism_has_maps_or_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind(SoftmaxAttention):
        name, capabilities, token_maps = "blind", Capabilities(any_length=True), ()

    monkeypatch.setattr(registry, "_MECHANISMS", dict(registry._MECHANISMS))
    register_mechanism(Blind)
    for name in list_mechanisms():
        model = timm.create_model("vit_mini", attention=name, **TINY)
        if name == "blind":
            for read, what in ((attention_maps, "no token map"), (mixing_matrices, "mixing matrix")):
                with pytest.raises(ConfigError, match=what):
                    read(model, torch.randn(1, 3, 32, 32))
        else:
            assert infvit.attention_maps(model, torch.randn(1, 3, 32, 32)).shape == (2, 1, 2, 8, 8)


def test_the_model_is_left_as_it_was() -> None:
    """Its modes, one part frozen in evaluation mode; no hook, no gradient; unfused layers stay unfused, same maps."""
    model, images = build("vit_tiny_patch16_224")
    fused = attention_maps(model, images)
    model.train()
    model.blocks[1].eval()
    for block in model.blocks:
        block.attn.fused_attn = False
    maps = attention_maps(model, images)
    assert_close(maps, fused, rtol=1e-4, atol=1e-5)
    assert not maps.requires_grad
    assert model.training and model.blocks[0].attn.training and not model.blocks[1].attn.training  # noqa: PT018
    assert not any(block.attn.fused_attn for block in model.blocks)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_hooks_go_after_an_error_too() -> None:
    model, images = build("vit_mini")
    with pytest.raises(RuntimeError):
        attention_maps(model, images[:, :2])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("name", "reason"),
    [("swin_tiny_patch4_window7_224", "SwinTransformer"), ("xcit_nano_12_p16_224", "Xcit"), ("resnet18", "ResNet"),
     ("cait_xxs24_224", "TalkingHeadAttn"), ("vit_dlittle_patch16_reg1_gap_256", "DiffAttention")],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(name: str, reason: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
        images = torch.empty(1, *model.default_cfg["input_size"])
        with pytest.raises(ConfigError, match=reason):
            attention_maps(model, images)


def test_attention_that_mixes_other_tokens_is_refused() -> None:
    """A layer that sees windows, runs the kernel twice, or stands beside one that is not known: never a wrong map."""
    model, images = build("vit_tiny_patch16_224")

    class Windows(type(model.blocks[0].attn)):
        def forward(self, x: Tensor, **kwargs: object) -> Tensor:
            return super().forward(x.flatten(0, 1)[:, None]).reshape(x.shape)

    class Twice(type(model.blocks[0].attn)):
        def forward(self, x: Tensor, **kwargs: object) -> Tensor:
            return super().forward(super().forward(x))

    plain = type(model.blocks[0].attn)
    for cls, reason in ((Windows, "no map of whole images"), (Twice, "2 times")):
        model.blocks[1].attn.__class__ = cls
        with pytest.raises(ConfigError, match=reason):
            attention_maps(model, images)
    model.blocks[1].attn.__class__ = plain

    class Hidden(nn.Module):
        def forward(self, x: Tensor, **kwargs: object) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    model.blocks[1].attn = Hidden()
    with pytest.raises(ConfigError, match="self-attention that cannot be read"):
        attention_maps(model, images)


def test_kinds_of_maps_are_checked() -> None:
    model, images = build("vit_relpos_small_patch16_224")
    with pytest.raises(ConfigError, match="no class token"):
        attention_maps(model, images, "class_token")
    with pytest.raises(ConfigError, match="no token map 'katz'"):
        attention_maps(model, images, "katz")


def test_a_map_of_nan_is_an_error() -> None:
    model, images = build("infvit_pure_mini")
    images[1] = torch.nan
    with pytest.raises(DataError, match=r"blocks\.0\.attn is not finite"):
        attention_maps(model, images)


@pytest.mark.parametrize("shape", [(0, 3, 32, 32), (1, 3, 36, 32), (3, 32, 32)], ids=str)
def test_images_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    model = timm.create_model("vit_mini")
    with pytest.raises(ConfigError, match=rf"images.*{re.escape(str(shape))}"):
        attention_maps(model, torch.zeros(shape))
