"""What a run leaves behind: rows, tables, picture, record, checkpoints."""

import csv
import dataclasses
import importlib.metadata
import json
import logging
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image

import infvit
from infvit.config import TrainConfig
from infvit.engine import train
from infvit.engine.folder import git_state
from infvit.engine.record import read_history, write_history
from infvit.errors import UserError
from infvit.reports import draw_curves

Config = Callable[..., TrainConfig]


def folder_of(config: TrainConfig) -> Path:
    return Path(str(config.run_dir))


# Rows, tables, picture


def test_rows(tiny: Config, rows: Any) -> None:
    """One an epoch, with raw and averaged scores in it; `summary.csv` is the same as a table."""
    result = train(tiny())
    folder = folder_of(tiny())
    found = rows(folder)
    assert [row["epoch"] for row in found] == [1, 2]
    assert list(found[0]) == [
        "epoch", "update", "lr", "train_loss", "grad_norm", "images_per_second", "data_wait", "train_seconds",
        "skipped", "top1", "top5", "loss", "images", "ema_top1", "ema_top5", "ema_loss", "eval_seconds", "gamma",
        "dead_heads", "dead_rows", "spectral_radius",
    ]  # fmt: skip
    assert found[1]["images"] == 11
    assert 0 <= found[1]["data_wait"] <= 1
    seconds = found[1]["train_seconds"]  # rounded to 0.01
    assert 24 / (seconds + 0.01) - 1 < found[1]["images_per_second"] < 24 / max(seconds - 0.01, 1e-3) + 1
    assert result.folder == folder
    assert result.metrics == found[-1]
    with open(folder / "summary.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 2
    for line, row in zip(table, found, strict=True):
        assert list(line) == list(row)
        for name, cell in line.items():
            values = row[name] if isinstance(row[name], list) else [row[name]]
            assert [float(x) for x in cell.split()] == pytest.approx(values, rel=1e-5), name


@pytest.mark.parametrize("line", ['{"epoch": 2, "top1"', "", "null", '{"top1": 3}', "\0\0"])
def test_damaged_rows_are_named_and_written_anew(tiny: Config, rows: Any, line: str) -> None:
    """By the run's own command, which changes nothing else in a run that is over."""
    train(tiny(max_steps=1))
    folder = folder_of(tiny())
    before = rows(folder)
    assert read_history(folder) == before
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2 is damaged: .*remove the file and start"):
        read_history(folder)
    (folder / "metrics.jsonl").unlink()
    assert read_history(folder) == []
    train(tiny(max_steps=1))
    assert rows(folder) == before


def test_without_an_average_there_are_no_columns_of_it(tiny: Config, rows: Any, load: Any) -> None:
    train(tiny({"recipe.ema_decay": None}))
    assert not [name for name in rows(folder_of(tiny()))[0] if name.startswith("ema")]
    assert load(folder_of(tiny()) / "last.pt")["ema_state_dict"] is None


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path, rows: Any) -> None:
    write_history([{"epoch": 1, "loss": math.nan, "gamma": [0.5, math.inf]}, {"epoch": 2, "top1": 1.0}], tmp_path)
    assert rows(tmp_path) == [{"epoch": 1, "loss": None, "gamma": [0.5, None]}, {"epoch": 2, "top1": 1.0}]
    assert (tmp_path / "summary.csv").read_text() == "epoch,loss,gamma,top1\n1,,0.5 nan,\n2,,,1.0\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "summary.csv"]


def test_curves_are_a_picture_of_the_rows(tmp_path: Path) -> None:
    """Not blank, different for different rows, and drawn with one epoch, with NaN, and without an average."""
    row = {"epoch": 1, "train_loss": 2.0, "loss": 1.5, "top1": 30.0, "lr": 0.1}
    histories = {
        "one": [row],
        "nan": [row, {**row, "epoch": 2, "train_loss": math.nan}],
        "ema": [{**row, "epoch": e, "top1": 30.0 + e, "ema_top1": 20.0 + 2 * e, "ema_loss": 1 / e} for e in (1, 2, 3)],
        "unscored": [{name: row[name] for name in ("epoch", "train_loss", "lr")}],
    }
    pictures = {}
    for name, history in histories.items():
        folder = tmp_path / name
        folder.mkdir()
        write_history(history, folder)
        draw_curves(folder)
        pixels = np.asarray(Image.open(folder / "curves.png").convert("L"))
        assert pixels.shape[1] > 1000
        assert pixels.shape[0] > 300
        for panel in np.array_split(pixels, 3, axis=1):
            assert (panel < 200).mean() > 0.002
        pictures[name] = pixels.tobytes()
    assert len(set(pictures.values())) == 4
    assert not (tmp_path / "one" / "curves.png.tmp").exists()


def test_curves_are_drawn_after_each_epoch(tiny: Config) -> None:
    seen: list[int] = []
    train(tiny(), after_epoch=[draw_curves, lambda folder: seen.append((folder / "curves.png").stat().st_mtime_ns)])
    assert len(set(seen)) == 2


# Record and checkpoints


def test_the_record_says_what_was_run_and_with_what(tiny: Config, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "infvit")
    config = tiny({"recipe.lr": 0.003}, seed=5)
    train(config)
    folder = folder_of(config)
    assert yaml.safe_load((folder / "config.yaml").read_text()) == dataclasses.asdict(config)
    record = json.loads((folder / "environment.json").read_text())
    assert set(record) == {"command", "started", "python", "packages", "machine", "device", "git"}
    for name in ("infvit", "torch", "timm", "torchvision", "hydra-core"):
        assert record["packages"][name] == importlib.metadata.version(name)
    assert record["device"] == "cpu"
    assert record["command"][1:] == sys.argv[1:]
    log = (folder / "train.log").read_text()
    assert re.search(r"^\S+ \S+ INFO model   infvit_linear_mini, depth 1", log)
    assert "Held-out top-1" in log.splitlines()[-1]


def test_git_state(tmp_path: Path) -> None:
    import subprocess

    assert git_state(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    state = git_state(tmp_path)
    assert state is not None
    assert re.fullmatch("[0-9a-f]{40}", state["commit"])
    assert state["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == {**state, "dirty": True}


def assert_plain(value: Any) -> None:
    """Nothing that plain torch or a reader in ten years would stumble over."""
    if isinstance(value, dict):
        for key, inner in value.items():
            assert type(key) in (str, int)
            assert_plain(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            assert_plain(inner)
    else:
        assert type(value) in (str, int, float, bool, type(None), torch.Tensor), type(value)


def test_checkpoints_are_plain_and_say_what_they_are(rich: Config, load: Any, rows: Any) -> None:
    config = rich({"model.gamma": 0.4})
    train(config)
    folder = folder_of(config)
    last, best = load(folder / "last.pt"), load(folder / "best.pt")
    for content in (last, best):
        assert_plain(content)
        assert content["format"] == 2
        assert content["arch"] == "infvit_linear_mini"
        assert content["model_args"] == {"gamma": 0.4, "depth": 2, "embed_dim": 24, "num_heads": 2}
        assert (content["num_classes"], content["classes"]) == (3, ["0", "1", "2"])
        assert (content["in_chans"], content["img_size"]) == (3, 16)
        assert content["config"] == dataclasses.asdict(config)
        assert content["versions"] == {
            "infvit": infvit.__version__,
            "torch": torch.__version__,
            "timm": timm.__version__,
        }
    assert last.keys() - best.keys() == {"optimizer", "scaler"}
    top1 = [row["top1"] for row in rows(folder)]
    assert last["best"] == best["best"] == max(top1)
    assert best["update"] == 3 * (1 + top1.index(max(top1)))


@pytest.mark.parametrize("compiled", [False, True])
def test_plain_timm_reads_the_raw_weights(tiny: Config, load: Any, compiled: bool) -> None:
    config = tiny({"engine.compile_backend": "eager"}, compile=compiled, max_steps=4)
    train(config)
    path = folder_of(config) / "last.pt"
    content = load(path)
    model = timm.create_model(
        content["arch"], num_classes=3, img_size=16, **content["model_args"], checkpoint_path=str(path)
    )
    state = model.state_dict()
    assert state.keys() == content["state_dict"].keys()
    assert all(torch.equal(value, content["state_dict"][name]) for name, value in state.items())
    assert any(not torch.equal(value, content["ema_state_dict"][name]) for name, value in state.items())


# Dry run


def test_dry_run_prints_the_plan_and_writes_nothing(
    tiny: Config, tmp_path: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "infvit")
    config = tiny(
        {"data.name": "digits", "data.root": None, "data.img_size": 224, "model.name": "vit_4l", "model.args": {}},
        dry_run=True, batch_size=100, epochs=30, max_steps=77, run_dir=None,
    )  # fmt: skip
    result = train(config)
    assert result.folder is None
    assert result.metrics == {}
    text = capsys.readouterr().out
    assert "parameters     56,635,402\n" in text
    # Per token and layer: qkv, two projections, MLP; scores and mixing; patches and pooler once. 1 MAC = 2 FLOPs.
    tokens, width = 197, 1024
    layer = tokens * width * width * (3 + 2 + 8) + 2 * tokens * tokens * width
    flops = 2 * (4 * layer + 196 * 768 * width + width * width + 10 * width)
    assert f"FLOPs          {flops / 1e9:.3f} G" in text
    assert "22.4" in f"{flops / 1e9:.3f}"
    assert "updates        14 per epoch, 420 in all, stopped after 77\n" in text
    assert "data           train: 1437 images, 10 classes: '0', '1'" in text
    assert "data           val: first files: digits[val][0]" in text
    rates = {int(e): float(lr) for e, lr in re.findall(r"^ +(\d+)  (\d\.\d+e[+-]\d+)$", text, re.MULTILINE)}
    assert set(range(1, 11)) | {13, 28, 30} <= rates.keys()
    for epoch, rate in rates.items():
        assert rate == pytest.approx(1e-4 + 0.5 * (0.01 - 1e-4) * (1 + math.cos(math.pi * (epoch - 1) / 30)), rel=1e-3)
    assert float(re.findall(r"last +(\S+)", text)[0]) == pytest.approx(1e-4, rel=0.01)
    assert "model   vit_4l" in caplog.text
    assert list(tmp_path.iterdir()) == []
