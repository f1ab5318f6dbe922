"""The models with AGF: parameters and products against closed formulas, and DeiT's weights in them."""

import pickle
from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf
from timm.optim import create_optimizer_v2
from torch.utils.flop_counter import FlopCounterMode

import infvit
from infvit.attention import AttentionLayer
from infvit.models.weights import load_weights

# name: width, heads, depth, output projections, pooled layers, classes, patches on a side, parameters
MODELS = {
    "deit_small_agf": (384, 6, 12, 1, 0, 1000, 14, 22_050_664 + 1_774_080 + 48),
    "deit_tiny_agf": (192, 3, 12, 1, 0, 1000, 14, 5_717_416 + 12 * (192 * 192 + 192) + 48),
    "agf_4l": (1024, 64, 4, 2, 1, 1000, 14, 57_650_152 + 4 * (1024 * 1024 + 1024) + 16),
    "agf_mini": (96, 6, 4, 2, 1, 10, 8, 506_122 + 4 * (96 * 96 + 96) + 16),
}
THEIRS = {"deit_small_agf": "deit_small_patch16_224", "deit_tiny_agf": "deit_tiny_patch16_224", "agf_4l": "vit_4l",
          "agf_mini": "vit_mini"}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_relative_and_one_projection_more(name: str):
    d, heads, depth, *_, literal = MODELS[name]
    model, relative = (timm.create_model(n, device="meta") for n in (name, THEIRS[name]))
    own, theirs = dict(model.named_parameters()), dict(relative.named_parameters())
    assert sum(p.numel() for p in own.values()) == literal
    assert {n: own[n].shape for n in theirs} == {n: p.shape for n, p in theirs.items()}
    assert {n: tuple(own[n].shape) for n in own.keys() - theirs.keys()} == {
        f"blocks.{i}.attn.{n}": shape
        for i in range(depth)
        for n, shape in {"extra.weight": (d, d), "extra.bias": (d,), "core.theta": (4,)}.items()
    }
    layers = [layer for layer in model.modules() if isinstance(layer, AttentionLayer)]
    assert {(layer.core.name, layer.num_heads) for layer in layers} == {("agf", heads)}
    assert (len(layers), model.num_classes) == (depth, relative.num_classes)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_flops_follow_the_closed_formula(name: str, folded: bool):
    d, heads, depth, projections, pooled, classes, side, _ = MODELS[name]
    model = timm.create_model(name, device="meta").eval()
    if folded:
        infvit.reparameterize(model)
        projections = 1
    n, patch = side**2 + 1, model.patch_embed.patch_size[0]
    layer = (4 + projections) * n * d * d + 2 * n * d * d // heads
    mlps = (depth * n - folded * (n - 1)) * 8 * d * d
    macs = (n - 1) * 3 * patch**2 * d + depth * layer + mlps + pooled * d * d + d * classes
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, 3, *model.patch_embed.img_size, device="meta"))
    assert counter.get_total_flops() == 2 * macs


def test_the_weights_of_a_deit():
    """Each tensor of DeiT's is taken: its queries make U, its keys V. What it has not stays as initialised."""
    deit = timm.create_model("deit_tiny_patch16_224", depth=2)
    model = timm.create_model("deit_tiny_agf", depth=2)
    given = deit.state_dict()
    report = load_weights(model, given, "the file", transfer=True)
    assert sorted(report.loaded) == sorted(given)
    assert not report.partial
    assert set(report.kept) == {
        f"blocks.{i}.attn.{n}" for i in range(2) for n in ("extra.weight", "extra.bias", "core.theta")
    }
    assert report.warnings() == [
        "kept as initialised, since the source has none: blocks.*.attn.core.theta (2), blocks.*.attn.extra.bias (2), "
        "blocks.*.attn.extra.weight (2)"
    ]
    assert all(torch.equal(model.state_dict()[name], value) for name, value in given.items())


def test_the_head_is_that_of_a_deit():
    deit, model = (timm.create_model(n, depth=1) for n in ("deit_tiny_patch16_224", "deit_tiny_agf"))
    load_weights(model, deit.state_dict(), "the file", transfer=True)
    tokens = torch.randn(2, 197, 192)
    torch.testing.assert_close(model.eval().forward_head(tokens), deit.eval().forward_head(tokens))


def test_copies_files_and_a_fresh_start(tmp_path: Path):
    model = timm.create_model("agf_mini", depth=2, order=3, weight_init="").train()
    x = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.core.theta.normal_()
    model(x).square().sum().backward()  # no graph of the loss is left, which could not be copied
    model.eval()
    save_for_hf(model, str(tmp_path), safe_serialization=False)
    others = (pickle.loads(pickle.dumps(model)), timm.create_model(f"local-dir:{tmp_path}", pretrained=True))
    with torch.no_grad():
        for other in others:
            assert torch.equal(other.eval()(x), model(x))
        torch.testing.assert_close(infvit.reparameterize(others[0])(x), model(x), rtol=1e-4, atol=1e-5)
        for block in model.blocks:
            block.attn.core.reset_parameters()
            assert not block.attn.core.theta.any()


@pytest.mark.parametrize("args", [{}, {"form": "svd"}], ids=str)
def test_the_filter_has_no_weight_decay_and_learns(args: dict):
    model = timm.create_model("agf_mini", depth=1, weight_init="", **args)
    own = next(iter(model.blocks[0].attn.core.parameters()))
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-2, weight_decay=0.05)
    (group,) = (g for g in optimizer.param_groups if any(p is own for p in g["params"]))
    assert group["weight_decay"] == 0
    before = own.detach().clone()
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    assert (own != before).all()
