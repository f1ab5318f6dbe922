"""What a run leaves behind: rows, tables, picture, record, checkpoints; and what it shows while it goes on."""

import csv
import dataclasses
import importlib.metadata
import json
import logging
import math
import re
import sys
import types
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
from infvit.config import LoggerConfig, TrainConfig
from infvit.engine import loop, train
from infvit.engine import progress as progress_module
from infvit.engine.folder import git_state
from infvit.engine.progress import Progress
from infvit.engine.record import build_logger, write_history
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
    ]  # fmt: skip
    assert found[1]["images"] == 11
    assert 0 <= found[1]["data_wait"] <= 1
    assert found[1]["images_per_second"] == pytest.approx(24 / found[1]["train_seconds"], rel=0.2)
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
        assert content["format"] == 1
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


# Progress


class Clock:
    """Time that passes only when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress_module.time, "perf_counter", lambda: self.now)


def test_progress_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """10 updates of which 4 were done before; 2 s each, 0.5 of them waiting for the data."""
    caplog.set_level(logging.INFO, "infvit")
    clock = Clock(monkeypatch)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)

    def batches() -> Any:
        while True:
            clock.now += 0.5
            yield "batch"

    source = batches()
    with Progress(epoch=1, epochs=3, updates=10, done=4, seconds=3.0) as progress:
        for _ in range(6):
            for _ in progress.timed(source, 1):
                clock.now += 1.5
            progress.step(0.25, 0.003, 8)
    assert [record.getMessage() for record in caplog.records] == [
        "epoch 2/3  update 6/10  loss 0.2500  lr 3.00e-03  4 images/s  data wait 25%  ETA 8 s",
        "epoch 2/3  update 8/10  loss 0.2500  lr 3.00e-03  4 images/s  data wait 25%  ETA 4 s",
    ]
    assert progress.elapsed == 12.0


def test_progress_lines_of_a_run(tiny: Config, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "infvit")
    train(tiny({"engine.log_seconds": 0.0}, epochs=1))
    pattern = r"epoch 1/1  update \d/3  loss \d\.\d{4}  lr \d\.\d\de-\d\d  [\d,]+ images/s  data wait \d+%  ETA \d+ s"
    assert len([r for r in caplog.records if re.fullmatch(pattern, r.getMessage())]) == 2
    caplog.clear()
    train(tiny({"engine.log_seconds": 60.0}, epochs=1, run="quiet"))
    assert not [r for r in caplog.records if "ETA" in r.getMessage()]


def test_progress_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(epoch=0, epochs=2, updates=3, done=1, seconds=0.0) as progress:
        assert progress.bar is not None
        monkeypatch.setattr(progress.bar, "mininterval", 0)
        progress.step(0.5, 0.01, 8)
        progress.step(0.25, 0.01, 8)
    shown = capsys.readouterr().err
    assert "epoch 1/2" in shown
    assert "3/3" in shown
    assert "loss 0.2500  lr 1.00e-02" in shown
    assert progress.bar.disable  # closed


def test_epoch_line_and_data_wait(tiny: Config, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "infvit")
    metrics = train(tiny()).metrics
    assert (
        f"epoch 2/2  train loss {metrics['train_loss']:.4f}  held-out loss {metrics['loss']:.4f}  "
        f"top-1 {metrics['top1']:.2f} %  top-5 100.00 %  EMA top-1 {metrics['ema_top1']:.2f} %"
    ) in caplog.text


# Profile


def test_profile_leaves_a_trace_and_a_table(tiny: Config, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "infvit")
    train(tiny(profile=True, epochs=2, batch_size=4))
    folder = folder_of(tiny())
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert any("aten::" in str(event.get("name")) for event in events)
    table = (folder / "profile.txt").read_text()
    assert "Self CPU" in table
    assert 10 <= len([line for line in table.splitlines() if re.search(r"\d+\.\d+%", line)]) <= 12
    assert "Profile in" in caplog.text
    train(tiny(run="off", max_steps=1))
    assert not (folder_of(tiny(run="off")) / "trace.json").exists()


def test_a_continued_run_is_profiled_too(tiny: Config) -> None:
    train(tiny(batch_size=4, epochs=2, max_steps=6, run="whole", profile=True))
    assert (folder_of(tiny(run="whole")) / "trace.json").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "evaluate", lambda run: (_ for _ in ()).throw(RuntimeError("stop")))
        with pytest.raises(RuntimeError, match="stop"):
            train(tiny({"engine.checkpoint_minutes": 0.0}, batch_size=4))
    train(tiny(batch_size=4, profile=True))
    assert (folder_of(tiny()) / "trace.json").exists()


# Damaged images


@pytest.fixture
def damaged(tiny: Config, digit_folders: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Two training images of the data set are cut in half; links to the others."""
    root = tmp_path / "damaged"
    for path in sorted(digit_folders.rglob("*.png")):
        target = root / path.relative_to(digit_folders)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path)
    for path in sorted((root / "train").rglob("*.png"))[:2]:
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[: len(content) // 2])

    def build(changes: dict[str, Any] | None = None, **top: Any) -> TrainConfig:
        return tiny({"data.root": str(root), **(changes or {})}, **top)

    return build


@pytest.mark.parametrize("mixup", [0.0, 0.8])
def test_damaged_images_are_named_once_and_left_out(
    damaged: Config, mixup: float, rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    train(damaged({"recipe.mixup": mixup, "data.micro_batch_size": 4}, epochs=3, batch_size=26))
    named = [r.getMessage() for r in caplog.records if "Skipped: " in r.getMessage()]
    assert len(named) == len(set(named)) == 2
    assert all("cannot be decoded" in message for message in named)
    assert len(rows(folder_of(damaged()))) == 3


def test_too_many_damaged_images_end_the_run(damaged: Config) -> None:
    from infvit.errors import DataError

    with pytest.raises(DataError, match=r"2 images cannot be decoded, more than data.max_damaged=1"):
        train(damaged({"data.max_damaged": 1}, batch_size=26))


def test_an_update_whose_images_are_all_damaged_does_nothing(tiny: Config, built: Any) -> None:
    from infvit.data import Batch

    run = built(tiny())
    before = {name: value.clone() for name, value in run.state.model.state_dict().items()}
    empty = Batch(torch.empty(0), torch.empty(0, dtype=torch.int64), ["a.png: damaged"])
    assert loop.train_update(run, iter([empty, empty])) == (0.0, 0.0, 0, True)
    assert all(torch.equal(value, before[name]) for name, value in run.state.model.state_dict().items())


# Weights & Biases


OFFLINE = {"logger.wandb": True, "logger.wandb_mode": "offline"}


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials and no network."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")


class FakeRun:
    """A W&B run that remembers what it was told."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.rows, self.exit_code = arguments, [], None

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        assert (args, kwargs) == (("*",), {"step_metric": "epoch"})

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stands for the package; `runs` are the runs it started, `key` whether there is one."""
    fake = types.SimpleNamespace(runs=[], key=True, Settings=dict)

    def init(**arguments: Any) -> FakeRun:
        fake.runs.append(FakeRun(**arguments))
        return fake.runs[-1]

    fake.init = init
    fake.login = lambda prompt, verify: fake.key and not prompt and not verify
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_wandb_gets_every_row_and_the_exit_code(tiny: Config, fake_wandb: Any, rows: Any, caplog: Any) -> None:
    config = tiny({"logger.wandb": True, "logger.project": "p", "logger.tags": ["t"]})
    train(config)
    (run,) = fake_wandb.runs
    assert (run.arguments["mode"], run.arguments["resume"], run.arguments["project"]) == ("online", "allow", "p")
    assert run.arguments["config"]["recipe"]["lr"] == 0.01
    assert run.arguments["name"] == "run"
    assert run.exit_code == 0
    expected = [{**row, "gamma/0": row["gamma"][0]} for row in rows(folder_of(config))]
    assert run.rows == [{k: v for k, v in row.items() if k != "gamma"} for row in expected]
    assert warnings_of(caplog) == []
    train(config)  # finished: nothing to log
    assert len(fake_wandb.runs) == 1


def test_a_continued_run_is_the_same_wandb_run(tiny: Config, fake_wandb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    from infvit.engine.signals import Interrupted

    config = tiny({"logger.wandb": True})
    original = loop.validate
    monkeypatch.setattr(loop, "validate", lambda *a: (signal.raise_signal(signal.SIGTERM), original(*a))[1])
    with pytest.raises(Interrupted):
        train(config)
    monkeypatch.setattr(loop, "validate", original)
    train(config)
    first, second = fake_wandb.runs
    assert first.arguments["id"] == second.arguments["id"]
    assert (first.exit_code, second.exit_code) == (143, 0)
    assert [row["epoch"] for run in fake_wandb.runs for row in run.rows] == [1, 2]
    train(tiny({"logger.wandb": True}, run="other", max_steps=1))
    assert fake_wandb.runs[2].arguments["id"] != first.arguments["id"]


def test_without_a_key_wandb_goes_offline(tiny: Config, fake_wandb: Any, caplog: pytest.LogCaptureFixture) -> None:
    fake_wandb.key = False
    train(tiny({"logger.wandb": True}, max_steps=1))
    assert [run.arguments["mode"] for run in fake_wandb.runs] == ["offline"]
    (warning,) = warnings_of(caplog)
    assert "online mode failed (no API key); logging offline, upload later with: wandb sync" in warning


@pytest.mark.parametrize("where", ["init", "log", "finish", "login"])
def test_a_failing_wandb_never_stops_training(
    tiny: Config, fake_wandb: Any, rows: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any, where: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr(fake_wandb if where in ("init", "login") else FakeRun, where, fail)
    train(tiny({"logger.wandb": True}))
    assert len(rows(folder_of(tiny()))) == 2
    assert any("no such thing" in message for message in warnings_of(caplog))


def test_wandb_hears_of_a_failed_run(tiny: Config, fake_wandb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "training_loss", lambda logits, *rest: logits.sum() * math.nan)
    with pytest.raises(Exception, match="not finite"):
        train(tiny({"logger.wandb": True}))
    assert fake_wandb.runs[0].exit_code == 1


def test_wandb_that_is_not_installed(tiny: Config, monkeypatch: pytest.MonkeyPatch, caplog: Any, rows: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    train(tiny({"logger.wandb": True}, max_steps=1))
    (warning,) = warnings_of(caplog)
    assert "pip install 'infvit[wandb]'" in warning
    assert len(rows(folder_of(tiny()))) == 1


def test_wandb_is_off_by_default(tmp_path: Path) -> None:
    assert build_logger(LoggerConfig(), tmp_path, {}, None) is None


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["offline", "online"])
def test_the_real_wandb_writes_an_offline_run(
    tiny: Config, no_key: None, rows: Any, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """The package itself, without key and network."""
    pytest.importorskip("wandb")
    train(tiny({"logger.wandb": True, "logger.wandb_mode": mode}))
    folder = folder_of(tiny())
    (offline,) = (folder / "wandb").glob("offline-run-*")
    (file,) = offline.glob("*.wandb")
    assert b"ema_top1" in file.read_bytes()
    assert len(rows(folder)) == 2
    assert len(warnings_of(caplog)) == (mode == "online")
