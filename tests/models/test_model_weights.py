"""Loading weights of other runs, sizes and models: everything or an error that counts what does not fit."""

from typing import Any

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from torch import Tensor, nn

import infvit  # noqa: F401 - registers the models
from infvit.errors import CheckpointError
from infvit.models.weights import LoadReport, load_weights, match_weights


def mini(name: str = "infvit_pure_mini", **kwargs) -> nn.Module:
    return timm.create_model(name, depth=2, **kwargs)


def load(model: nn.Module, state: dict[str, Tensor], reset_head: bool = False) -> LoadReport:
    return load_weights(model, dict(state), "the file", reset_head=reset_head)


def same(a: dict[str, Tensor], b: dict[str, Tensor], but: tuple[str, ...] = ()) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a if not name.startswith(but or ("-",)))


def test_all_of_it():
    source, target = mini(), mini()
    assert not same(source.state_dict(), target.state_dict())
    report = load(target, source.state_dict())
    assert sorted(report.loaded) == sorted(source.state_dict())
    assert report.changes() == report.warnings() == []
    assert report.summary() == f"loaded {len(report.loaded)} of the model's {len(report.loaded)} tensors"
    assert same(source.state_dict(), target.state_dict())


@pytest.mark.parametrize(
    ("args", "prefix"),
    [({}, 1), ({"no_embed_class": True}, 0), ({"reg_tokens": 3}, 4), ({"class_token": False, "global_pool": "avg"}, 0)],
    ids=["class_token", "no_embed_class", "reg_tokens", "no_class_token"],
)
@pytest.mark.parametrize("size", [(48, 48), (48, 32), (16, 64)], ids=str)
def test_another_size_resizes_the_position_embedding_only(args: dict[str, Any], prefix: int, size: tuple[int, int]):
    """As timm does, also to a grid of as many patches; what belongs to no patch keeps its own."""
    source, target = mini(**args), mini(img_size=size, **args)
    report = load(target, source.state_dict())
    rows, columns = size[0] // 4, size[1] // 4
    assert report.changes() == [f"pos_embed resized from (1, {prefix + 64}, 96) to (1, {prefix + rows * columns}, 96)"]
    a, b = source.state_dict(), target.state_dict()
    before, after = a.pop("pos_embed"), b.pop("pos_embed")
    assert torch.equal(after, resample_abs_pos_embed(before, [rows, columns], [8, 8], num_prefix_tokens=prefix))
    assert torch.equal(after[:, :prefix], before[:, :prefix])
    assert not torch.equal(after, before)
    assert same(a, b)


def test_another_patch_size_resizes_the_patches():
    source, target = mini(), mini(patch_size=8)
    report = load(target, source.state_dict())
    assert report.changes() == [
        "pos_embed resized from (1, 65, 96) to (1, 17, 96)",
        "patch_embed.proj.weight resized from (96, 3, 4, 4) to (96, 3, 8, 8)",
    ]
    assert torch.equal(target.patch_embed.proj.weight, resample_patch_embed(source.patch_embed.proj.weight, [8, 8]))


def test_what_cannot_be_resized_is_named():
    """A grid that is not square and not the model's: its sides are unknown."""
    with pytest.raises(CheckpointError, match=r"1 of another shape: pos_embed \(1, 33, 96\) instead of \(1, 65, 96\)"):
        load(mini(), mini(img_size=(16, 32)).state_dict())
    with pytest.raises(
        CheckpointError, match=r"1 missing: reg_token; 1 of another shape: pos_embed \(1, 65, 96\) inst"
    ):
        load(mini(reg_tokens=4), mini().state_dict())
    target = mini(img_size=(16, 32))
    assert load(target, mini(img_size=(16, 32)).state_dict()).changes() == []


def test_the_source_is_left_as_it_was():
    """timm's filter takes some formats apart; `mask_token` marks one of them."""
    state = {**mini().state_dict(), "mask_token": torch.zeros(1, 96)}
    names = list(state)
    report = load_weights(mini(), state, "the file")
    assert list(state) == names
    assert report.warnings() == ["renamed or dropped by timm's checkpoint filter: mask_token"]


def test_matching_leaves_the_model_alone():
    """Also one without memory: a run finds out before it is built."""
    with torch.device("meta"):
        target = mini(img_size=16)
    matched, report = match_weights(target, mini().state_dict(), "the file")
    assert {name: value.shape for name, value in matched.items()} == {
        name: value.shape for name, value in target.state_dict().items()
    }
    assert list(report.resized) == ["pos_embed"]
    with pytest.raises(CheckpointError, match="the file does not fit the model"):
        match_weights(target, mini("vit_mini").state_dict(), "the file")
    target, state = mini(), mini().state_dict()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    match_weights(target, state, "the file")
    assert same(before, target.state_dict())


def test_another_number_of_classes_names_the_remedy():
    source, target = mini(num_classes=10), mini(num_classes=7)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load(target, source.state_dict())
    text = str(caught.value)
    assert "2 of another shape: head.bias (10,) instead of (7,), head.weight (10, 96) instead of (7, 96)" in text
    assert text.endswith("reset_head=true starts with a new classifier.")
    assert same(before, target.state_dict()), "nothing is loaded in part"
    report = load(target, source.state_dict(), reset_head=True)
    assert report.warnings() == [
        "kept as initialised (reset_head): head.bias, head.weight",
        "left out (reset_head): head.bias, head.weight",
    ]
    after = target.state_dict()
    assert same(after, source.state_dict(), but=("head.",))
    assert torch.equal(after["head.weight"], before["head.weight"])


def test_a_backbone_without_classifier_names_the_remedy():
    source = {name: value for name, value in mini().state_dict().items() if not name.startswith("head.")}
    with pytest.raises(CheckpointError, match=r"2 missing: head.bias, head.weight\). reset_head=true"):
        load(mini(), source)
    report = load(mini(), source, reset_head=True)
    assert report.warnings() == ["kept as initialised (reset_head): head.bias, head.weight"]


def test_reset_head_also_where_the_shapes_agree():
    source, target = mini(), mini()
    nn.init.ones_(source.head.weight)
    head = target.head.weight.clone()
    load(target, source.state_dict(), reset_head=True)
    assert torch.equal(target.head.weight, head)
    assert not torch.equal(target.head.weight, source.head.weight)


def test_reset_head_of_a_convnet():
    source, target = timm.create_model("resnet18", num_classes=3), timm.create_model("resnet18", num_classes=5)
    with pytest.raises(CheckpointError, match=r"fc.weight.*reset_head=true"):
        load(target, source.state_dict())
    report = load(target, source.state_dict(), reset_head=True)
    assert sorted(report.kept) == sorted(report.skipped) == ["fc.bias", "fc.weight"]
    assert torch.equal(target.layer1[0].conv1.weight, source.layer1[0].conv1.weight)


def test_less_than_the_whole_body():
    state = mini().state_dict()
    partial = {name: value for name, value in state.items() if not name.startswith("blocks.1.")}
    missing = len(state) - len(partial)
    for reset_head in (False, True):
        with pytest.raises(CheckpointError, match=rf"^the file does not fit the model \({missing} missing: blocks.1."):
            load(mini(), partial, reset_head)


def test_more_than_the_model():
    with pytest.raises(CheckpointError, match=r"\(1 unknown: extra.weight\)\.$"):
        load(mini(), {**mini().state_dict(), "extra.weight": torch.zeros(1)})


def test_softmax_weights_lack_gamma():
    with pytest.raises(CheckpointError, match=r"2 missing: blocks.0.attn.core.decay.logit, blocks.1.attn.core.decay"):
        load(mini(), mini("vit_mini").state_dict())


def test_another_model():
    with pytest.raises(CheckpointError, match=r"\(\d+ missing: .*, \.\.\.; \d+ unknown: .*, \.\.\.\)\.$"):
        load(mini(), timm.create_model("resnet18").state_dict())


@pytest.mark.parametrize("state", [{}, {"epoch": 3}, {"model": {"a": torch.zeros(1)}}, {1: 2}])
def test_no_weights_at_all(state: dict):
    with pytest.raises(CheckpointError, match=r"^the file holds no weights, only: "):
        load(mini(), state)
