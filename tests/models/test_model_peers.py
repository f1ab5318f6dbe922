"""`vit_4l` with the attention of other papers: sizes, training, one number of tokens."""

import pickle
from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn

from infvit.attention import AttentionLayer, list_mechanisms
from infvit.config import ModelConfig
from infvit.errors import CheckpointError, ConfigError
from infvit.models import infvit as models
from infvit.models.build import build_model, count_flops
from infvit.models.infvit import PEERS
from infvit.models.weights import match_weights

Build = Callable[..., nn.Module]
Images = Callable[..., Tensor]

TOKENS = 197
ADDED = {
    "linformer": 4 * 2 * 64 * TOKENS,
    "nystromformer": 4 * 64 * 35,
    "singularformer": 4 * (1024 * 1024 + 1024),
}
"""Parameters beyond those of `vit_4l`, in four layers: E and F, one kernel for each of 64 heads, a projection."""


def test_every_mechanism_that_is_not_ours_is_a_peer():
    assert {*PEERS, "softmax", "infsa_pure", "infsa_linear", "agf"} == set(list_mechanisms())


@pytest.mark.parametrize("attention", PEERS)
def test_peers_differ_from_the_baseline_in_the_mechanism_only(attention: str):
    name = f"vit_4l_{attention}"
    model, baseline = (timm.create_model(n, device="meta") for n in (name, "vit_4l"))
    own, theirs = model.state_dict(), baseline.state_dict()
    extra = own.keys() - theirs.keys()
    assert all(".attn.core." in key or ".attn.extra." in key for key in extra)
    assert {key: own[key].shape for key in theirs} == {key: value.shape for key, value in theirs.items()}
    assert sum(p.numel() for p in model.parameters()) == 57_650_152 + ADDED.get(attention, 0)
    assert {module.core.name for module in model.modules() if isinstance(module, AttentionLayer)} == {attention}
    assert model.default_cfg["input_size"] == (3, 224, 224)
    assert model.default_cfg["architecture"] == name


@pytest.mark.parametrize("attention", PEERS)
def test_entry_points_are_functions_of_the_module(attention: str):
    entry = timm.model_entrypoint(f"vit_4l_{attention}")
    assert pickle.loads(pickle.dumps(entry)) is entry is getattr(models, f"vit_4l_{attention}")
    assert attention in entry.__doc__
    assert f"vit_4l_{attention}" in models.__all__


@pytest.mark.parametrize("attention", PEERS)
def test_peers_train(attention: str, build: Build, images: Images):
    model = build(f"vit_4l_{attention}", num_heads=8).train()
    x = images(model, 4)
    model(x).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.any(), key
    copy = pickle.loads(pickle.dumps(model.eval()))
    with torch.no_grad():
        assert torch.equal(copy(x), model(x))
        torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", [a for a in PEERS if a != "softmax_unfused"])
def test_products_are_fewer_than_those_of_softmax_at_high_resolution(attention: str):
    flops, softmax = (
        count_flops(ModelConfig(name=name), num_classes=10, in_chans=3, img_size=1024)
        for name in (f"vit_4l_{attention}", "vit_4l")
    )
    assert flops < 0.75 * softmax


def linformer(**kwargs) -> nn.Module:
    return timm.create_model("vit_mini", attention="linformer", **{"depth": 2, "projected_tokens": 8, **kwargs})


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ({}, 65),
        ({"class_token": False, "global_pool": "avg"}, 64),
        ({"reg_tokens": 4}, 69),
        ({"img_size": (16, 32)}, 33),
        ({"img_size": 64, "patch_size": 8}, 65),
    ],
)
def test_the_model_tells_the_number_of_tokens(arguments: dict, tokens: int):
    model = linformer(**arguments)
    assert {module.core.num_tokens for module in model.modules() if isinstance(module, AttentionLayer)} == {tokens}
    with torch.no_grad():
        assert model(torch.randn(2, 3, *model.patch_embed.img_size)).shape == (2, 10)


def test_another_number_of_tokens_is_refused_before_anything_changes():
    model = linformer()
    before = model.pos_embed.clone()
    with pytest.raises(ConfigError, match=r"'linformer' was built for 64 patches, and img_size=.* has 128; create"):
        model.set_input_size((32, 64))
    assert torch.equal(model.pos_embed, before)
    assert model.patch_embed.img_size == (32, 32)
    model.set_input_size((16, 64))  # as many patches
    with torch.no_grad():
        assert model(torch.randn(1, 3, 16, 64)).shape == (1, 10)
    with pytest.raises(ConfigError, match="'linformer' takes one number of tokens; dynamic_img_size changes it"):
        linformer(dynamic_img_size=True)
    with pytest.raises(ConfigError, match="patch_drop_rate changes it"):
        linformer(patch_drop_rate=0.5)
    with pytest.raises(TypeError, match="'num_tokens'"):
        linformer(num_tokens=65)
    with pytest.raises(ConfigError, match=r"vit_mini.*num_tokens"):
        build_model(ModelConfig(name="vit_mini", attention="linformer", args={"num_tokens": 65}), 10)


def test_weights_of_another_resolution_do_not_fit():
    state = linformer(img_size=64).state_dict()
    with pytest.raises(CheckpointError, match=r"blocks.0.attn.core.key_proj \(1, 8, 257\) instead of \(1, 8, 65\)"):
        match_weights(linformer(), state, "a.pt")


def test_performer_keeps_its_features_in_the_checkpoint():
    torch.manual_seed(0)
    first, second = (timm.create_model("vit_mini", attention="performer", depth=2).eval() for _ in range(2))
    features = [block.attn.core.directions for block in first.blocks]
    assert not torch.equal(*features)
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        x = torch.randn(2, 3, 32, 32)
        first.head.weight.normal_(std=0.1)
        second.head.weight.copy_(first.head.weight)
        assert torch.equal(first(x), second(x))
        second.blocks[0].attn.core.reset_parameters()
        assert not torch.equal(first(x), second(x))
