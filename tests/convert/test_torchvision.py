"""torchvision's models, small and with random weights, against the formula in place of their softmax."""

import pytest
import torch
import torchvision
from torch import nn
from torch.testing import assert_close
from torchvision.models import VisionTransformer, swin_transformer
from torchvision.models.feature_extraction import create_feature_extractor

import infvit
from infvit.convert.torch import InfSAMultiheadAttention
from infvit.errors import ConfigError
from infvit.testing.conversion import Formula
from infvit.testing.converted_torch import swin


def filled(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.double()


def small_swin(version: str) -> nn.Module:
    return filled(swin(version))


def images(height: int, width: int) -> torch.Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("activation", ["relu", "gelu", "abs"])
@pytest.mark.parametrize("version", ["", "V2"])
@pytest.mark.parametrize("size", [(32, 32), (40, 56)])  # of whole windows, and padded to them
def test_swin_is_the_formula(version, size, activation):
    plain, x = small_swin(version), images(*size)
    converted = infvit.convert(plain, activation=activation)
    assert len(converted.conversion_report.converted) == 4
    with Formula("infsa_pure", head_dim=8, activation=activation, excluded=-50) as formula:
        expected = plain(x)
    assert formula.calls == 4
    for module in (converted, converted.eval()):
        assert_close(module(x), expected)
    with torch.no_grad():
        assert_close(converted(x), expected)
        assert_close(infvit.convert(plain, "softmax")(x), plain(x))
        assert_close(infvit.revert(converted)(x), plain.eval()(x))


@pytest.mark.parametrize("version", ["", "V2"])
def test_linear_refuses_the_position_bias_of_swin_by_name(version):
    with pytest.raises(ConfigError, match=r"(?s)features\.1\.0\.attn.*bias"):
        infvit.convert(small_swin(version), "infsa_linear")


@pytest.mark.parametrize("name", ["infsa_pure", "infsa_linear"])
def test_vit_is_the_formula(name):
    plain = filled(torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5))
    converted, x = infvit.convert(plain, name), images(32, 32)
    with Formula(name) as formula:
        expected = plain(x)
    assert formula.calls == 2
    for module in (converted, converted.eval()):
        assert_close(module(x), expected)
    with torch.no_grad():
        assert_close(converted(x), expected)


def test_the_published_models_convert_whole():
    for build, layers in {
        torchvision.models.vit_b_16: 12,
        torchvision.models.swin_t: 12,
        torchvision.models.swin_v2_t: 12,
    }.items():
        with torch.device("meta"):
            model = build()
        report = infvit.convert(model, inplace=True).conversion_report
        assert len(report.converted) == layers
        assert not report.refused


@pytest.mark.parametrize("kind", ["attention_dropout", "dropout"])
def test_dropout_of_a_window_acts_in_training_only(kind):
    layer = filled(swin_transformer.ShiftedWindowAttention(6, [4, 4], [2, 2], 2, **{kind: 0.5}))
    converted, x = infvit.convert(layer), images(8, 8).movedim(1, -1).repeat(1, 1, 1, 2)
    assert not torch.equal(converted(x), converted(x))
    assert_close(converted.eval()(x), converted(x))
    setattr(converted.train(), kind, 0.0)  # what the module has now counts
    assert_close(converted(x), converted.eval()(x))


def test_features_of_a_converted_vit_are_extracted_where_attention_is_a_leaf():
    plain = filled(VisionTransformer(32, 16, 2, 2, 12, 24, num_classes=5)).eval()
    converted, layer = infvit.convert(plain), "encoder.layers.encoder_layer_0"
    leaves = {"leaf_modules": [InfSAMultiheadAttention]}
    extractor = create_feature_extractor(converted, [layer, "heads"], tracer_kwargs=leaves)
    got, seen = extractor(images(32, 32)), []
    converted.get_submodule(layer).register_forward_hook(lambda module, args, out: seen.append(out))
    assert_close(got["heads"], converted(images(32, 32)))
    assert_close(got[layer], seen[0])
