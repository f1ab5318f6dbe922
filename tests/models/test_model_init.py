"""Initial values, the meta device, and change of dtype."""

from collections.abc import Callable

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

from infvit.attention import AttentionLayer

Create = Callable[..., nn.Module]
Images = Callable[..., Tensor]


def test_pooled_layer_starts_like_the_other_linear_layers(mini: str, create: Create):
    model = create(mini, embed_dim=240, depth=1, weight_init="")
    layer = model.blocks[0].attn.proj
    assert layer.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.pooler.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.pooler.weight.abs().max() > 0.06, "a normal distribution, not a uniform one"
    assert model.pooler.bias.abs().max() == 0


@pytest.mark.parametrize("mode", ["jax", "jax_nlhb", "moco"])
def test_pooled_layer_follows_the_mode_of_initialisation(mini: str, mode: str, create: Create):
    """Xavier's uniform distribution: bound sqrt(6 / (d + d))."""
    model = create(mini, embed_dim=240, depth=1, weight_init=mode)
    bound = (6 / 480) ** 0.5
    for weight in (model.pooler.weight, model.blocks[0].attn.proj.weight, model.blocks[0].attn.proj2.weight):
        assert 0.99 * bound < weight.abs().max() <= bound
    assert model.pooler.bias.abs().max() == 0


def test_minis_start_with_xavier_and_a_silent_head(mini: str, create: Create):
    """The mode "jax": normal with std 0.02 all but silences branches of width 96."""
    model = create(mini)
    bound = (6 / 192) ** 0.5
    assert 0.99 * bound < model.pooler.weight.abs().max() <= bound
    assert model.head.weight.abs().max() == 0


def test_second_projection_starts_like_the_first(name: str, create: Create):
    for layer in create(name, weight_init="").modules():
        if isinstance(layer, AttentionLayer):
            assert layer.proj2.weight.std().item() == pytest.approx(0.02, rel=0.05)
            assert layer.proj2.bias.abs().max() == 0
            assert not torch.equal(layer.proj2.weight, layer.proj.weight)


@pytest.mark.parametrize("per_head", [False, True])
def test_meta_creation_gives_the_same_start(name: str, per_head: bool, create: Create):
    own = {"gamma": 0.3, "gamma_per_head": per_head} if "infvit" in name else {}
    usual, meta = create(name, **own), create(name, device="meta", **own)
    assert {p.device.type for p in meta.parameters()} == {"meta"}
    meta.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in meta.parameters():
            parameter.fill_(float("nan"))
    meta.init_weights()
    ours = dict(meta.named_parameters())
    for key, wanted in usual.named_parameters():
        got = ours[key].detach()
        assert got.isfinite().all(), key
        if "logit" in key:
            assert got.sigmoid().tolist() == pytest.approx([0.3] * got.numel()), key
        if "logit" in key or wanted.unique().numel() == 1:  # gamma, zero biases, unit norms
            assert torch.equal(got, wanted), key
            continue
        spread = wanted.std().item()
        slack = 7 / wanted.numel() ** 0.5
        assert got.std().item() == pytest.approx(spread, rel=slack), key
        assert got.mean().item() == pytest.approx(wanted.mean().item(), abs=slack * spread), key


def test_factory_device_and_dtype(name: str, create: Create):
    model = create(name, device="meta", dtype=torch.float64)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert {(t.device.type, t.dtype) for t in tensors.values()} == {("meta", torch.float64)}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3), (torch.float64, 1e-5)])
def test_dtype_change_after_a_forward(name: str, dtype: torch.dtype, tolerance: float, build: Create, images: Images):
    model = build(name)
    x = images(model)
    with torch.no_grad():
        expected = model(x)
        converted = model.to(dtype)(x.to(dtype))
    assert converted.dtype == dtype
    assert expected.std() > 0.02
    torch.testing.assert_close(converted.float(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("learnable", [True, False])
def test_the_optimiser_moves_gamma(learnable: bool, images: Images):
    for mini in ("infvit_pure_mini", "infvit_linear_mini"):
        model = timm.create_model(mini, depth=2, gamma_trainable=learnable, weight_init="")
        decays = [layer.core.decay for layer in model.modules() if isinstance(layer, AttentionLayer)]
        optimizer = create_optimizer_v2(model, "adamw", lr=1e-2, weight_decay=0.05)
        before = [decay().item() for decay in decays]
        model(images(model)).square().sum().backward()
        optimizer.step()
        moved = [decay().item() != start for decay, start in zip(decays, before, strict=True)]
        assert moved == [learnable] * 2
