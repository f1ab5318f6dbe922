"""Weights of one attention mechanism in another: what is taken, and that the result computes what the formulas say.

The reference is a plain float64 forward pass on the source's state dict; it knows nothing of our layers.
"""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import infvit  # noqa: F401 - registers the models
from infvit.errors import CheckpointError
from infvit.models.weights import LoadReport, load_weights

DEPTH, WIDTH, HEADS = 2, 24, 2
SIZE: dict[str, Any] = {"depth": DEPTH, "embed_dim": WIDTH, "num_heads": HEADS, "img_size": 16, "patch_size": 4}
TIMM, SOFTMAX, PURE, LINEAR = "vit_tiny_patch16_224", "vit_mini", "infvit_pure_mini", "infvit_linear_mini"
GAMMAS, QKV = "blocks.*.attn.core.decay.logit (2)", "blocks.*.attn.qkv.bias (2), blocks.*.attn.qkv.weight (2)"
HEAD = {
    "kept as initialised (reset_head): head.bias, head.weight, pooler.bias, pooler.weight",
    "left out (reset_head): head.bias, head.weight",
}
IDENTITY = {
    "set to the identity, since the source has one output projection only: blocks.*.attn.proj2.bias (2), "
    "blocks.*.attn.proj2.weight (2)"
}
NEW_GAMMA = {f"kept as initialised, since the source has none: {GAMMAS}"}
NO_GAMMA = {f"not loaded, since the model's attention has none: {GAMMAS}"}
TIED = {
    "loaded without the rows of the keys, since the model ties its keys to the queries (not with "
    f"model.args.tie_key=false): {QKV}"
}
UNTIED = {f"loaded with the rows of the queries as those of the keys, since the source ties them: {QKV}"}


def build(name: str, **args: Any) -> nn.Module:
    """A model in float64, every parameter away from its initial value."""
    model = timm.create_model(name, **{**SIZE, "num_classes": 5, **args}).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def load(model: nn.Module, source: nn.Module | dict[str, Tensor], **options: Any) -> LoadReport:
    state = source.state_dict() if isinstance(source, nn.Module) else source
    return load_weights(model, state, "the file", **{"transfer": True, **options})


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], set[str]]] = {
    "timm to softmax": (TIMM, {}, SOFTMAX, {}, HEAD | IDENTITY),
    "timm to Pure": (TIMM, {}, PURE, {}, HEAD | IDENTITY | NEW_GAMMA),
    "timm to Pure, one projection": (TIMM, {}, PURE, {"double_proj": False}, HEAD | NEW_GAMMA),
    "timm to Linear": (TIMM, {}, LINEAR, {}, HEAD | IDENTITY | NEW_GAMMA | TIED),
    "timm to Linear, keys of its own": (TIMM, {}, LINEAR, {"tie_key": False}, HEAD | IDENTITY | NEW_GAMMA),
    "softmax to Pure": (SOFTMAX, {}, PURE, {"gamma_per_head": True}, NEW_GAMMA),
    "softmax to Linear": (SOFTMAX, {}, LINEAR, {}, NEW_GAMMA | TIED),
    "Pure to softmax": (PURE, {}, SOFTMAX, {}, NO_GAMMA),
    "Pure to Linear": (PURE, {}, LINEAR, {}, TIED),
    "Linear to Pure": (LINEAR, {}, PURE, {}, UNTIED),
    "Linear to softmax": (LINEAR, {}, SOFTMAX, {}, UNTIED | NO_GAMMA),
    "Linear to Linear": (LINEAR, {}, LINEAR, {}, set()),
    "without biases": (PURE, {"qkv_bias": False}, LINEAR, {"qkv_bias": False}, {
        line.replace("blocks.*.attn.qkv.bias (2), ", "") for line in TIED}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("img_size", [16, 32])
def test_every_tensor_is_accounted_for(case: str, img_size: int):
    source_name, source_args, target_name, target_args, told = CASES[case]
    source, target = build(source_name, **source_args), build(target_name, img_size=img_size, **target_args)
    given, before = copied(source), copied(target)
    report = load(target, source, reset_head=source_name == TIMM)
    after = target.state_dict()

    for names, groups in (
        (given, (report.loaded, report.resized, report.partial, report.skipped)),
        (before, (report.loaded, report.resized, report.partial, report.kept)),
    ):
        assert sorted(name for group in groups for name in group) == sorted(names)
    assert set(report.warnings()) == told
    assert report.changes() == ([] if img_size == 16 else ["pos_embed resized from (1, 17, 24) to (1, 65, 24)"])
    given_count = len(before) - len(report.kept)
    assert report.summary() == f"loaded {given_count} of the model's {len(before)} tensors"

    assert all(torch.equal(after[name], given[name]) for name in report.loaded)
    for name, why in report.kept.items():
        if "identity" not in why:
            assert torch.equal(after[name], before[name])
        elif name.endswith("weight"):
            assert torch.equal(after[name], torch.eye(WIDTH, dtype=torch.float64))
        else:
            assert not after[name].any()
    for name in report.partial:
        theirs, ours = given[name].split(WIDTH), after[name].split(WIDTH)
        assert torch.equal(ours[0], theirs[0]), "queries"
        assert torch.equal(ours[-1], theirs[-1]), "values"
        assert len(ours) == 2 or torch.equal(ours[1], theirs[0]), "keys that were tied to the queries"


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def pure(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT / q.shape[-1]).clamp(min=0)
    return 0.7 * scores @ v / scores.square().sum((-2, -1), keepdim=True).sqrt()


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    norms = q.norm(dim=-1, keepdim=True)
    pooled = (norms * q).sum(-2, keepdim=True) / norms.sum(-2, keepdim=True)
    scores = (pooled @ k.mT / q.shape[-1]).clamp(min=0)
    return (0.7 * scores / scores.sum(-1, keepdim=True) @ v).expand_as(q)


def tokens(s: dict[str, Tensor], x: Tensor, attention: Callable[..., Tensor], tied: bool = False) -> Tensor:
    """The normalised tokens of a vision transformer with these weights and this attention, on images (B, 3, H, W)."""

    def layer(name: str, t: Tensor) -> Tensor:
        return F.linear(t, s[f"{name}.weight"], s[f"{name}.bias"])

    def norm(name: str, t: Tensor) -> Tensor:
        return F.layer_norm(t, (WIDTH,), s[f"{name}.weight"], s[f"{name}.bias"], 1e-6)

    t = F.conv2d(x, s["patch_embed.proj.weight"], s["patch_embed.proj.bias"], stride=4).flatten(2).mT
    t = torch.cat([s["cls_token"].expand(len(t), -1, -1), t], 1) + s["pos_embed"]
    for block in (f"blocks.{i}" for i in range(DEPTH)):
        parts = layer(f"{block}.attn.qkv", norm(f"{block}.norm1", t)).split(WIDTH, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        t = t + layer(f"{block}.attn.proj", attention(q, q if tied else k, v).transpose(1, 2).flatten(2))
        t = t + layer(f"{block}.mlp.fc2", F.gelu(layer(f"{block}.mlp.fc1", norm(f"{block}.norm2", t))))
    return norm("norm", t)


@pytest.mark.parametrize(
    ("name", "args", "attention", "tied"),
    [
        (SOFTMAX, {}, softmax, False),
        (PURE, {}, pure, False),
        (PURE, {"double_proj": False}, pure, False),
        (LINEAR, {}, linear, True),
        (LINEAR, {"tie_key": False}, linear, False),
    ],
)
def test_the_weights_of_a_vit_in_each_attention(name: str, args: dict[str, Any], attention: Any, tied: bool):
    source, x = build(TIMM), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    target = timm.create_model(name, **SIZE, **args, num_classes=3).double().eval()  # gamma starts at 0.7
    load(target, source, reset_head=True)
    with torch.no_grad():
        assert_close(source.forward_features(x), tokens(source.state_dict(), x, softmax))  # the reference is one
        assert_close(target.forward_features(x), tokens(source.state_dict(), x, attention, tied), rtol=1e-5, atol=1e-5)


def test_tied_keys_become_keys_without_a_change_of_the_function():
    source, target = build(LINEAR), build(LINEAR, tie_key=False)
    assert set(load(target, source).warnings()) == UNTIED
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        assert_close(target(x), source(x))


def test_half_precision_sources():
    source = {name: value.bfloat16() for name, value in build(TIMM).state_dict().items()}
    target = build(PURE)
    load(target, source, reset_head=True)
    assert target.blocks[0].attn.proj2.weight.dtype == torch.float64
    assert torch.equal(target.blocks[1].attn.qkv.weight, source["blocks.1.attn.qkv.weight"].double())


def test_without_leave_nothing_is_transferred():
    """An evaluation must never run on a part of the weights."""
    for source, target in ((SOFTMAX, PURE), (PURE, LINEAR), (LINEAR, PURE), (PURE, SOFTMAX), (TIMM, SOFTMAX)):
        with pytest.raises(CheckpointError, match="the file does not fit the model"):
            load(build(target), build(source), reset_head=True, transfer=False)


def without(state: dict[str, Tensor], *parts: str) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if not any(part in name for part in parts)}


REFUSED: dict[str, tuple[Callable[[], nn.Module | dict[str, Tensor]], tuple[str, dict[str, Any]], str]] = {
    "one gamma of several": (
        lambda: without(copied(build(PURE)), "blocks.1.attn.core"), (PURE, {}),
        r"\(1 missing: blocks.1.attn.core.decay.logit\)\.$"),
    "a block": (
        lambda: without(copied(build(SOFTMAX)), "blocks.1."), (PURE, {}),
        r"\(16 missing: blocks.0.attn.core.decay.logit, blocks.1.attn.core.decay.logit, .*, \.\.\.\)\.$"),
    "a projection": (
        lambda: without(copied(build(SOFTMAX)), "blocks.1.attn.qkv"), (PURE, {}),
        r"\(4 missing: blocks.0.attn.core.decay.logit, .*, blocks.1.attn.qkv.bias, blocks.1.attn.qkv.weight\)\.$"),
    "biases": (
        lambda: build(SOFTMAX, qkv_bias=False), (LINEAR, {}),
        r"\(2 missing: blocks.0.attn.qkv.bias, blocks.1.attn.qkv.bias\)\.$"),
    "an MLP": (lambda: without(copied(build(SOFTMAX)), "0.mlp.fc1"), (LINEAR, {}), r"\(2 missing: blocks.0.mlp.fc1.b"),
    "a norm in the attention": (
        lambda: build(SOFTMAX), (PURE, {"qk_norm": True}), r"\(8 missing: blocks.0.attn.k_norm.bias, "),
    "another width": (
        lambda: build(SOFTMAX, embed_dim=48), (LINEAR, {}),
        r"blocks.0.attn.qkv.bias \(144,\) instead of \(48,\), \.\.\.\)\.$"),
    "a second projection too many": (
        lambda: build(SOFTMAX), (PURE, {"double_proj": False}),
        r"\(4 unknown: blocks.0.attn.proj2.bias, blocks.0.attn.proj2.weight, blocks.1.attn.proj2.bias, "),
    "a gamma for each head": (
        lambda: build(PURE, gamma_per_head=True), (LINEAR, {}),
        r"\(2 of another shape: blocks.0.attn.core.decay.logit \(2,\) instead of \(1,\)"),
    "a distilled model": (
        lambda: build("deit_tiny_distilled_patch16_224"), (PURE, {}),
        r"\(3 unknown: dist_token, head_dist.bias, head_dist.weight; 1 of another shape: pos_embed \(1, 18, 24\) inst"),
    "a distilled model from a plain one": (
        lambda: build(TIMM), ("deit_tiny_distilled_patch16_224", {}),
        r"\(1 missing: dist_token; 1 of another shape: pos_embed \(1, 17, 24\) instead of \(1, 18, 24\)\)\.$"),
    "a model of timm from ours": (
        lambda: build(PURE), (TIMM, {}),
        r"\(8 unknown: blocks.0.attn.core.decay.logit, blocks.0.attn.proj2.bias, .*, \.\.\.\)\.$"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str):
    """Nothing but another mechanism is a reason to load a part, and then nothing is loaded at all."""
    source, (name, args), message = REFUSED[case]
    target = build(name, **args)
    before = copied(target)
    with pytest.raises(CheckpointError, match=f"^the file does not fit the model .*{message}"):
        load(target, source(), reset_head=True)
    assert all(torch.equal(value, before[key]) for key, value in target.state_dict().items())


def test_the_pooled_layer_belongs_to_the_head_of_a_vit():
    """Which lacks it: its classifier behind a layer with initial values would be none. Our own sources have theirs."""
    with pytest.raises(CheckpointError, match=r"\(2 missing: pooler.bias, pooler.weight\). reset_head=true starts"):
        load(build(PURE), build(TIMM))
    source, target = build(SOFTMAX), build(PURE)
    report = load(target, source, reset_head=True)
    assert torch.equal(target.pooler.weight, source.pooler.weight)
    assert sorted(report.skipped) == ["head.bias", "head.weight"]
    halved = without(copied(source), "pooler.bias")
    with pytest.raises(CheckpointError, match=r"\(1 missing: pooler.bias\)\.$"):
        load(target, halved, reset_head=True)


def test_distilled_models_load_into_their_own_kind():
    source, target = (build("deit_tiny_distilled_patch16_224", num_classes=n) for n in (5, 3))
    with pytest.raises(CheckpointError, match=r"4 of another shape: head.bias .*reset_head=true starts"):
        load(target, source)
    report = load(target, source, reset_head=True)
    assert sorted(report.kept) == ["head.bias", "head.weight", "head_dist.bias", "head_dist.weight"]
    assert torch.equal(target.dist_token, source.dist_token)
