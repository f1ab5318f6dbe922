"""Weights that timm fetches: by name, and from a hub cache made by hand, read by timm's own code without a network."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants as hub
import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn

import infvit  # noqa: F401 - registers the models
from infvit.errors import CheckpointError
from infvit.models import weights
from infvit.models.weights import pretrained_state


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no network."""
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    return tmp_path


def store(cache: Path, name: str, model: nn.Module, form: bool | str = True) -> Path:
    """Puts a model into a hub cache as a download would have, and returns the folder of its files."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    save_for_hf(model, folder / "snapshots" / commit, safe_serialization=form)
    return folder / "snapshots" / commit


@pytest.mark.parametrize("form", [True, False], ids=["safetensors", "pickle"])
def test_from_the_hub(cache: Path, form: bool):
    source = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32, patch_size=8, num_classes=7)
    store(cache, "someone/their_vit", source, form)
    state = pretrained_state("hf-hub:someone/their_vit")
    assert state.keys() == source.state_dict().keys()
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in state.items())
    assert pretrained_state("hf-hub:someone/their_vit@main").keys() == state.keys()


def test_our_models_from_the_hub(cache: Path):
    """The architecture in the repository's file is one of our registry, with its own arguments."""
    source = timm.create_model("infvit_linear_mini", depth=1, tie_key=False, gamma=0.3)
    store(cache, "someone/theirs", source)
    state = pretrained_state("hf-hub:someone/theirs")
    assert torch.equal(state["blocks.0.attn.qkv.weight"], source.blocks[0].attn.qkv.weight)
    assert float(state["blocks.0.attn.core.decay.logit"].sigmoid()) == pytest.approx(0.3)


def test_a_name_with_a_tag(cache: Path):
    """Each set of weights is a repository of its own."""
    source = timm.create_model("vit_tiny_patch16_224.augreg_in21k")
    store(cache, "timm/vit_tiny_patch16_224.augreg_in21k", source)
    state = pretrained_state("vit_tiny_patch16_224.augreg_in21k")
    assert state["head.weight"].shape == (21843, 192)
    assert torch.equal(state["pos_embed"], source.pos_embed)
    with pytest.raises(CheckpointError, match="weights not available"):
        pretrained_state("vit_tiny_patch16_224")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnt18", r"init_from=timm/resnt18: unknown model. Did you mean 'resnet18'"),
        ("resnet18.a9_in1k", r"init_from=timm/resnet18.a9_in1k: timm has no such weights. Did you mean 'resnet18.a\d_"),
        ("infvit_pure_mini", r"init_from=timm/infvit_pure_mini: timm has no such weights. "),
        (
            "resnet18",
            r"init_from=timm/resnet18: weights not available \(.*\). Check the name and the network; .*HF_HOME",
        ),
        (
            "hf-hub:no/body",
            r"init_from=hf-hub:no/body: weights not available \(.*cache.*\). Check the name and the netw",
        ),
        ("hf-hub:", r"init_from=hf-hub:: weights not available \(.*no model id"),
        ("hf-hub:a/b/c", r"init_from=hf-hub:a/b/c: weights not available \(Repo id must be in the form"),
        ("hf-hub:a/b@c@d", r"init_from=hf-hub:a/b@c@d: weights not available \(.*only contain one @"),
    ],
)
def test_not_to_be_had(cache: Path, name: str, message: str):
    with pytest.raises(CheckpointError, match=f"^{message}") as caught:
        pretrained_state(name)
    assert "\n" not in str(caught.value)


def test_damaged_repositories(cache: Path):
    files = store(cache, "a/b", timm.create_model("infvit_pure_mini", depth=1))
    config = json.loads((files / "config.json").read_text())
    for change, message in (
        ({"architecture": "of_another_library"}, r"Unknown model \(of_another_library\)"),
        ({"architecture": "infvit_linear_mini"}, "size mismatch"),
        ({"model_args": {"depth": 2}}, "Missing key"),
    ):
        (files / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match=f"init_from=hf-hub:a/b: weights not available .*{message}"):
            pretrained_state("hf-hub:a/b")
    (files / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(CheckpointError, match=r"\(no model of timm's: it lacks 'architecture'\)"):
        pretrained_state("hf-hub:a/b")
    shutil.rmtree(files)
    with pytest.raises(CheckpointError, match="weights not available"):
        pretrained_state("hf-hub:a/b")


def test_retries_are_not_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """What timm and the hub client say on the way is held back, for that time only; real warnings of timm are not."""

    def offline(name: str, **kwargs: Any) -> nn.Module:
        assert (name, kwargs) == ("resnet18", {"pretrained": True})
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s")
        logging.getLogger("timm.models._builder").info("Loading pretrained weights")
        logging.getLogger("timm.models._builder").warning("Using random initialization.")
        raise OSError("no network\nat all")

    caplog.set_level("DEBUG", logger="timm")
    caplog.set_level("INFO", logger="huggingface_hub")
    monkeypatch.setattr(weights.timm, "create_model", offline)
    with caplog.at_level("INFO"), pytest.raises(CheckpointError, match=r"not available \(no network at all\)"):
        pretrained_state("resnet18")
    assert caplog.messages == ["Using random initialization."]
    assert logging.getLogger("timm").level == logging.DEBUG
    assert logging.getLogger("huggingface_hub").level == logging.INFO
