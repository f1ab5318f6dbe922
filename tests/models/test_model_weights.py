"""Loading weights of other runs, sizes and models: everything or an error that counts what does not fit."""

from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

import infvit  # noqa: F401 - registers the models
from infvit.config import DataConfig, ModelConfig, RecipeConfig, TrainConfig
from infvit.engine import checkpoint
from infvit.engine.plan import make_plan
from infvit.engine.setup import build_run
from infvit.engine.signals import StopRequest
from infvit.errors import CheckpointError
from infvit.models import weights
from infvit.models.weights import load_weights, pretrained_state


def mini(name: str = "infvit_pure_mini", **kwargs) -> nn.Module:
    return timm.create_model(name, depth=2, **kwargs)


def load(model: nn.Module, state: dict[str, Tensor], reset_head: bool = False) -> list[str]:
    return load_weights(model, dict(state), "the file", reset_head)


def same(a: dict[str, Tensor], b: dict[str, Tensor], but: tuple[str, ...] = ()) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a if not name.startswith(but or ("-",)))


def test_all_of_it():
    source, target = mini(), mini()
    assert not same(source.state_dict(), target.state_dict())
    assert load(target, source.state_dict()) == []
    assert same(source.state_dict(), target.state_dict())


def test_another_size_resizes_the_position_embedding_only():
    source, target = mini(), mini(img_size=48)
    notes = load(target, source.state_dict())
    assert notes == ["pos_embed resized from (1, 65, 96) to (1, 145, 96)"]
    a, b = source.state_dict(), target.state_dict()
    assert torch.equal(a.pop("pos_embed")[:, 0], b.pop("pos_embed")[:, 0]), "the class token keeps its own"
    assert same(a, b)
    grid, wanted = source.pos_embed[:, 1:].mean(), target.pos_embed[:, 1:].mean()
    assert float(wanted.detach()) == pytest.approx(float(grid.detach()), abs=1e-3)


def test_another_patch_size_resizes_the_patches():
    notes = load(mini(patch_size=8), mini().state_dict())
    assert "patch_embed.proj.weight resized from (96, 3, 4, 4) to (96, 3, 8, 8)" in notes


def test_another_number_of_classes_names_the_remedy():
    source, target = mini(num_classes=10), mini(num_classes=7)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load(target, source.state_dict())
    text = str(caught.value)
    assert "2 of another shape: head.bias (10,) instead of (7,), head.weight (10, 96) instead of (7, 96)" in text
    assert text.endswith("reset_head=true starts with a new classifier.")
    assert same(before, target.state_dict()), "nothing is loaded in part"
    notes = load(target, source.state_dict(), reset_head=True)
    assert sorted(notes) == ["head.bias left out (reset_head)", "head.weight left out (reset_head)"]
    after = target.state_dict()
    assert same(after, source.state_dict(), but=("head.",))
    assert torch.equal(after["head.weight"], before["head.weight"])


def test_a_backbone_without_classifier_names_the_remedy():
    source = {name: value for name, value in mini().state_dict().items() if not name.startswith("head.")}
    with pytest.raises(CheckpointError, match=r"2 missing: head.bias, head.weight\). reset_head=true"):
        load(mini(), source)
    assert load(mini(), source, reset_head=True) == []


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
    assert len(load(target, source.state_dict(), reset_head=True)) == 2
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


def test_pretrained_by_name(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(CheckpointError, match=r"init_from=timm/resnt18: unknown model. Did you mean 'resnet18'"):
        pretrained_state("resnt18")

    def offline(name: str, pretrained: bool) -> nn.Module:
        assert (name, pretrained) == ("resnet18", True)
        raise OSError("no network\nat all")

    monkeypatch.setattr(weights.timm, "create_model", offline)
    with pytest.raises(CheckpointError, match=r"^init_from=timm/resnet18: weights not available \(no network at all\)"):
        pretrained_state("resnet18")
    monkeypatch.setattr(weights.timm, "create_model", lambda name, pretrained: nn.Linear(2, 2))
    assert pretrained_state("resnet18").keys() == {"weight", "bias"}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("wrapped", [True, False])
def test_init_from_a_file(tmp_path: Path, prefix: str, wrapped: bool):
    """A plain state dict or a checkpoint that holds one, with or without what DDP and compile put before the names."""
    source = mini(num_classes=10)
    state = {prefix + name: value for name, value in source.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 1} if wrapped else state, tmp_path / "best.pt")
    for where in (tmp_path / "best.pt", tmp_path):
        run = start(str(where), tmp_path / "new_run")
        assert same(run.state.model.state_dict(), source.state_dict())
        assert same(run.state.ema.module.state_dict(), source.state_dict()), "the average starts there too"


def test_init_from_a_run_of_another_size_and_head(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    torch.save({"state_dict": mini(num_classes=4, img_size=32).state_dict()}, tmp_path / checkpoint.BEST)
    with pytest.raises(CheckpointError, match=rf"^init_from={tmp_path} does not fit .*reset_head=true"):
        start(str(tmp_path), tmp_path / "new_run")
    with caplog.at_level("INFO"):
        start(str(tmp_path), tmp_path / "new_run", reset_head=True)
    assert "init_from: pos_embed resized from (1, 65, 96) to (1, 17, 96)" in caplog.text
    assert "init_from: head.weight left out (reset_head)" in caplog.text


def start(init_from: str, folder: Path, **values):
    config = TrainConfig(
        model=ModelConfig(name="infvit_pure_mini", args={"depth": 2}),
        data=DataConfig(num_workers=0, img_size=values.pop("img_size", 16 if values else 32)),
        recipe=RecipeConfig(warmup_epochs=0),
        batch_size=64,
        run_dir=str(folder),
        init_from=init_from,
        **values,
    )
    return build_run(make_plan(config), StopRequest())
