"""Runs that start from other weights: of a run, of a file, of another attention, of a hub."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants as hub
import pytest
import safetensors.torch
import timm
import torch
from timm.models import save_for_hf
from torch import Tensor

from infvit.config import TrainConfig
from infvit.engine import train
from infvit.errors import CheckpointError

Config = Callable[..., TrainConfig]
ROOT = Path(__file__).resolve().parents[2]
ARGS: dict[str, Any] = {"depth": 1, "embed_dim": 24, "num_heads": 2}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def best(tiny: Config, load: Any) -> dict[str, Tensor]:
    """The best weights of a run of Linear InfSA in the folder `source`."""
    train(tiny(run="source"))
    return load(Path(str(tiny(run="source").run_dir)) / "best.pt")["state_dict"]


def test_the_best_weights_of_a_run(tiny: Config, built: Any, best: dict[str, Tensor], tmp_path: Path) -> None:
    """The average starts there too."""
    run = built(tiny(init_from=str(tmp_path / "source")))
    assert same(run.state.model.state_dict(), best)
    assert same(run.state.ema.module.state_dict(), best)
    fresh_head = built(tiny(init_from=str(tmp_path / "source"), reset_head=True, run="head")).state.model.state_dict()
    changed = [name for name, value in fresh_head.items() if not torch.equal(value, best[name])]
    assert changed == ["head.weight", "head.bias"]


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("wrapped", ["state_dict", "model", None])
def test_a_file(tiny: Config, built: Any, tmp_path: Path, prefix: str, wrapped: str | None) -> None:
    """A plain state dict or a file that holds one, with or without what DDP and compile put before the names."""
    source = timm.create_model("infvit_linear_mini", **ARGS, img_size=16, num_classes=3).state_dict()
    state = {prefix + name: value for name, value in source.items()}
    torch.save({wrapped: state, "epoch": 1} if wrapped else state, tmp_path / "best.pt")
    for where in (tmp_path / "best.pt", tmp_path):
        assert same(built(tiny(init_from=str(where))).state.model.state_dict(), source)


def test_a_safetensors_file(tiny: Config, built: Any, tmp_path: Path) -> None:
    source = timm.create_model("infvit_linear_mini", **ARGS, img_size=16, num_classes=3).state_dict()
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(source, path)
    assert same(built(tiny(init_from=str(path))).state.model.state_dict(), source)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
        train(tiny(init_from=str(path), run="half"))


def test_a_run_that_goes_on_keeps_its_own_weights(tiny: Config, built: Any, best: Any, load: Any, tmp_path: Path):
    """And does without the source, which may be gone."""
    source = str(tmp_path / "source")
    train(tiny(init_from=source, max_steps=2))
    trained = load(tmp_path / "run" / "last.pt")["state_dict"]
    shutil.rmtree(source)
    again = built(tiny(init_from=source, max_steps=2)).state.model.state_dict()
    assert same(again, trained)
    assert not same(again, best)
    with pytest.raises(CheckpointError, match=f"no run folder or checkpoint at {source}"):
        train(tiny(init_from=source, max_steps=2, fresh=True))
    with pytest.raises(CheckpointError, match=r"init_from=.*/run/last.pt lies in run_dir=.*, which fresh=true moves a"):
        train(tiny(init_from=str(tmp_path / "run" / "last.pt"), fresh=True))
    assert (tmp_path / "run" / "last.pt").exists(), "the run is not moved aside for one that cannot start"


def test_what_cannot_be_had_or_does_not_fit_is_found_before_anything_is_written(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a dry run, too."""
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    torch.save(timm.create_model("infvit_linear_mini", **ARGS, num_classes=4).state_dict(), tmp_path / "classes.pt")
    for source, message in (
        ("/no/where", "no run folder or checkpoint at /no/where"),
        ("timm/resnet18", "init_from=timm/resnet18: weights not available"),
        ("timm/resnt18", "init_from=timm/resnt18: unknown model. Did you mean 'resnet18'"),
        ("hf-hub:no/body", "init_from=hf-hub:no/body: weights not available"),
        (str(tmp_path / "classes.pt"), r"does not fit the model \(2 of another shape: head.*reset_head=true starts"),
    ):
        for dry_run in (False, True):
            with pytest.raises(CheckpointError, match=message):
                train(tiny(init_from=source, dry_run=dry_run))
            assert {path.name for path in tmp_path.iterdir()} == {"classes.pt"}


def test_another_size_and_another_head(tiny: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = timm.create_model("infvit_linear_mini", **ARGS, img_size=32, num_classes=4).state_dict()
    torch.save({"state_dict": state}, tmp_path / "last.pt")
    with caplog.at_level("INFO"):
        train(tiny(init_from=str(tmp_path), reset_head=True, max_steps=1))
    told = [(record.levelname, record.message) for record in caplog.records if "init_from" in record.message]
    assert told == [
        ("INFO", f"init_from: loaded {len(state) - 2} of the model's {len(state)} tensors"),
        ("INFO", "init_from: pos_embed resized from (1, 65, 24) to (1, 17, 24)"),
        ("WARNING", "init_from: kept as initialised (reset_head): head.bias, head.weight"),
        ("WARNING", "init_from: left out (reset_head): head.bias, head.weight"),
    ]


def test_from_softmax_to_pure_infsa(
    tiny: Config, built: Any, load: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run starts with the source's weights, and its log lists what it did not get from there."""
    softmax = {"model.name": "vit_mini", "model.args": {**ARGS, "depth": 2}}
    pure = {**softmax, "model.name": "infvit_pure_mini", "model.gamma": 0.4}
    train(tiny(softmax, run="source"))
    source = load(tmp_path / "source" / "best.pt")["state_dict"]
    config = tiny(pure, init_from=str(tmp_path / "source"))
    state = built(config).state.model.state_dict()
    gammas = [f"blocks.{i}.attn.core.decay.logit" for i in range(2)]
    assert [float(state.pop(name).sigmoid()) for name in gammas] == pytest.approx([0.4, 0.4])
    assert same(state, source)

    with caplog.at_level("INFO"):
        train(config)
    lines = re.findall(r"(INFO|WARNING) (init_from: .*)", (tmp_path / "run" / "train.log").read_text())
    assert lines == [
        ("INFO", f"init_from: loaded {len(source)} of the model's {len(source) + 2} tensors"),
        ("WARNING", "init_from: kept as initialised, since the source has none: blocks.*.attn.core.decay.logit (2)"),
    ]
    trained = load(tmp_path / "run" / "last.pt")["state_dict"]
    assert all(float(trained[name].sigmoid()) != pytest.approx(0.4, abs=1e-4) for name in gammas), "gamma is trained"


@pytest.mark.slow
def test_from_a_hub_cache_as_a_command(tmp_path: Path) -> None:
    """timm's own code reads the cache; without network and without the repository it is one line."""
    repository = tmp_path / "home" / "hub" / "models--org--vit"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    source = timm.create_model("vit_tiny_patch16_224", **ARGS, patch_size=4, img_size=32)
    save_for_hf(source, repository / "snapshots" / COMMIT)

    def call(name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
        model = [f"+model.args.{key}={value}" for key, value in ARGS.items()]
        command = [sys.executable, str(ROOT / "train.py"), "model=infvit_linear_mini", *model, f"init_from={name}"]
        home = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [*command, "max_steps=1", "run_dir=out", "data.num_workers=0", "engine.device=cpu", *overrides],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), **home},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    for name, message in (
        ("hf-hub:org/vit", r"hf-hub:org/vit does not fit the model \(.*head.*reset_head=true starts with a new class"),
        ("hf-hub:org/other@main", r"hf-hub:org/other@main: weights not available \(.*\)\. Check the name and the net"),
    ):
        failed = call(name)
        assert failed.returncode == 1
        assert re.search(f"^error: init_from={message}", failed.stderr)
        assert failed.stderr.count("\n") == 1
        assert not (tmp_path / "out").exists()
    done = call("hf-hub:org/vit", "reset_head=true", "recipe.lr=1e-20", "recipe.min_lr=0", "recipe.warmup_epochs=0")
    assert done.returncode == 0, done.stderr
    assert "init_from: pos_embed resized from (1, 65, 24) to (1, 17, 24)" in done.stderr
    assert "init_from: loaded without the rows of the keys" in done.stderr
    trained = torch.load(tmp_path / "out" / "last.pt", weights_only=True)["state_dict"]
    query, _, value = source.blocks[0].attn.qkv.weight.detach().chunk(3)
    assert torch.equal(trained["blocks.0.attn.qkv.weight"], torch.cat([query, value]))
