"""Converted models of timm's in train.py and eval.py: trained, resumed, scored, looked into, started from."""

import os
import signal
from itertools import count
from pathlib import Path

import pytest
import timm
import torch
from torch import nn
from torch.testing import assert_close

import infvit
from infvit.attention import LinearInfSA
from infvit.attention.infsa import path_decays
from infvit.config import DataConfig, EngineConfig, ModelConfig, RecipeConfig, TrainConfig
from infvit.engine import loop, train
from infvit.engine.signals import Interrupted
from infvit.errors import CheckpointError, ConfigError, UserError
from infvit.evaluation.rebuild import rebuild
from infvit.metrics.health import head_health
from infvit.models import attention_maps, mixing_matrices
from infvit.models.build import build_model
from infvit.models.weights import load_weights
from infvit.reports import card

SIZES = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
MODEL = {"name": "vit_tiny_patch16_224", "convert": "infsa_linear", "gamma": 0.6, "args": SIZES}


def configuration(folder: Path) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(**MODEL),
        data=DataConfig(name="digits", img_size=16, num_workers=0),
        recipe=RecipeConfig(
            lr=0.01, lr_base_batch=None, warmup_epochs=0, mixup=0.0, cutmix=0.0, repeated_aug=1, auto_augment=None,
            color_jitter=None, reprob=0.0, ema_decay=0.9, drop_path=0.0,
        ),
        engine=EngineConfig(device="cpu", precision="fp32"),
        epochs=2,
        batch_size=256,
        run_dir=str(folder),
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    train(configuration(folder))
    return folder


def test_a_run_trains_gamma_and_comes_back_converted(run):
    rebuilt = rebuild(str(run), "raw", {})
    layers = [module for module in rebuilt.model.modules() if isinstance(module, LinearInfSA)]
    assert len(layers) == 2
    assert all(abs(gamma - 0.6) > 1e-4 for gamma in path_decays(rebuilt.model))
    assert {layer.decay.initial for layer in layers} == {0.6}
    maps = attention_maps(rebuilt.model, torch.randn(1, 3, 16, 16))
    assert maps.shape == (2, 1, 2, 2, 2)
    header = (run / "summary.csv").read_text().splitlines()[0]
    assert "dead_heads" in header
    text = card.card_text(run)
    assert "convert infsa_linear" in text or "mechanism infsa_linear" in text
    assert "infvit.convert(timm.create_model" in text
    code = text.split("```python\n")[1].split("```")[0].replace('"best.pt"', repr(str(run / "best.pt")))
    space: dict[str, nn.Module] = {}
    exec(code, space)
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        assert_close(space["model"].eval()(x), rebuilt.model(x))
    with pytest.raises(UserError, match=r"model\.convert=infsa_linear"):
        card.push(run, "nobody/nothing")


@pytest.mark.slow
def test_an_interrupted_run_goes_on_converted(run, tmp_path, monkeypatch):
    original, calls = loop.train_update, count()

    def stop(*args, **kwargs):
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    monkeypatch.setattr(loop, "train_update", stop)
    with pytest.raises(Interrupted):
        train(configuration(tmp_path))
    monkeypatch.setattr(loop, "train_update", original)
    train(configuration(tmp_path))
    last, whole = (torch.load(folder / "last.pt", weights_only=True)["state_dict"] for folder in (tmp_path, run))
    assert any("infsa" in name for name in whole)
    assert_close(last, whole, rtol=0, atol=0)


def test_maps_and_matrices_are_those_of_the_mechanism():
    torch.manual_seed(0)
    plain = timm.create_model("vit_tiny_patch16_224", img_size=16, **SIZES).eval()
    x = torch.randn(2, 3, 16, 16)
    seen: list[torch.Tensor] = []
    for name in ("infsa_pure", "infsa_linear", "softmax"):
        converted = infvit.convert(plain, name)
        seen.clear()
        for module in converted.modules():
            core = module._modules.get("infsa")
            if core is not None:
                core.register_forward_hook(lambda core, args, out: seen.append(core.matrix(args[0], args[1])))
        matrices = mixing_matrices(converted, x)
        assert_close(matrices, torch.stack(seen))
        assert_close(attention_maps(converted, x), mapped(matrices, name).unflatten(-1, (2, 2)))
    assert_close(mixing_matrices(infvit.convert(plain, "softmax"), x), mixing_matrices(plain, x))
    assert head_health(matrices[0]).dead.shape == (2, 2)


def mapped(matrices: torch.Tensor, name: str) -> torch.Tensor:
    rows = {
        "infsa_pure": matrices.sum(-2) / 0.7,
        "infsa_linear": matrices[..., 0, :] / 0.7,
        "softmax": matrices[..., 0, :],
    }
    return rows[name][..., 1:]


def test_weights_of_an_unconverted_model_start_a_converted_one():
    plain, _ = build_model(ModelConfig(name="vit_tiny_patch16_224", args=SIZES), 10, img_size=16)
    model, _ = build_model(ModelConfig(**MODEL), 10, img_size=16)
    report = load_weights(model, plain.state_dict(), "plain", transfer=True)
    assert set(report.kept) == {f"blocks.{i}.attn.infsa.decay.logit" for i in (0, 1)}
    assert_close(model.blocks[0].attn.qkv.weight, plain.blocks[0].attn.qkv.weight)
    with pytest.raises(CheckpointError, match="infsa"):
        load_weights(model, plain.state_dict(), "plain")
    with pytest.raises(CheckpointError, match="infsa"):
        load_weights(plain, model.state_dict(), "converted")


def test_what_does_not_go_together():
    with pytest.raises(ConfigError, match=r"model\.convert"):
        ModelConfig(name="vit_mini", attention="softmax", convert="infsa_pure")
    with pytest.raises(ConfigError, match="attention="):
        build_model(ModelConfig(name="vit_mini", convert="infsa_pure"), 10, img_size=16)
    with pytest.raises(ConfigError, match="nothing to convert"):
        build_model(ModelConfig(name="resnet18", convert="infsa_pure"), 10)
