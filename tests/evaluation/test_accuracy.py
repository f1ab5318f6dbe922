"""`eval.py`'s work: the scores of an independent loop, whatever the batch size, and refusals that name the reason."""

import csv
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.metrics import accuracy_score, log_loss, top_k_accuracy_score
from torch import Tensor, nn

from infvit.config import EvalConfig
from infvit.data.digits import digit_arrays
from infvit.errors import CheckpointError, ConfigError, DataError
from infvit.evaluation import EVALUATIONS, evaluate
from infvit.evaluation.rebuild import rebuild
from infvit.models import InfViT


def written_to(folder: Path, stem: str) -> Path:
    """Returns the one result file whose name begins like this; it goes on with a hash of the settings."""
    (path,) = folder.glob(f"{stem}_*.json")
    return path


@pytest.fixture
def score(run: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Evaluates the shared run; the result files go to `tmp_path`."""

    def call(checkpoint: Path | None = None, **keys: Any) -> dict[str, Any]:
        places = {"checkpoint": str(checkpoint or run), "output": str(tmp_path), "device": "cpu", "precision": "fp32"}
        return evaluate(EvalConfig(**{**places, **keys}))["accuracy"]

    return call


@pytest.fixture
def content(run: Path) -> dict[str, Any]:
    return torch.load(run / "best.pt", weights_only=True)


@pytest.fixture
def changed(content: dict[str, Any], tmp_path: Path) -> Callable[..., Path]:
    """Writes the checkpoint with some entries replaced, or left out where the value is `...`."""

    def write(**entries: Any) -> Path:
        new = {name: value for name, value in {**content, **entries}.items() if value is not ...}
        torch.save(new, tmp_path / "changed.pt")
        return tmp_path / "changed.pt"

    return write


def predicted(model: nn.Module, size: int, crop_pct: float) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and labels of the held-out digits, one by one, with none of our loading or scoring."""
    images, labels = digit_arrays("val")
    rows = []
    for pixels in images:
        image = Image.fromarray(np.round(pixels * 255).astype(np.uint8)).convert("RGB")
        larger = int(np.floor(size / crop_pct))
        image = image.resize((larger, larger), Image.Resampling.BICUBIC)
        at = round((larger - size) / 2)
        image = image.crop((at, at, at + size, at + size))
        x = (torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255 - 0.5) / 0.5
        with torch.no_grad():
            rows.append(model(x[None]).double().softmax(1)[0].numpy())
    return np.stack(rows), labels


def plain_model(state: dict[str, Tensor]) -> nn.Module:
    model = timm.create_model("infvit_linear_mini", num_classes=10, img_size=16, depth=1, embed_dim=24, num_heads=2)
    model.load_state_dict(state)
    return model.eval()


@pytest.mark.parametrize(("weights", "entry"), [("raw", "state_dict"), ("ema", "ema_state_dict")])
def test_equal_to_an_independent_loop(score: Any, content: dict[str, Any], weights: str, entry: str) -> None:
    result = score(weights=weights)
    probabilities, labels = predicted(plain_model(content[entry]), 16, 0.9)
    assert result["images"] == len(labels) == 360
    assert result["top1"] == pytest.approx(100 * accuracy_score(labels, probabilities.argmax(1)))
    assert result["top5"] == pytest.approx(100 * top_k_accuracy_score(labels, probabilities, k=5))
    assert result["loss"] == pytest.approx(log_loss(labels, probabilities), rel=1e-5)
    assert 15 < result["top1"] < 100  # the run has learned something: chance is 10 +- 1.6
    assert result["top1"] < result["top5"] < 100


def test_the_result_of_the_run_itself(score: Any, run: Path) -> None:
    """The best epoch's row, raw and averaged."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = max(rows, key=lambda row: row["top1"])
    raw, average = score(weights="raw"), score(weights="ema")
    for name in ("top1", "top5", "loss"):
        assert raw[name] == pytest.approx(best[name], rel=1e-6)
        assert average[name] == pytest.approx(best[f"ema_{name}"], rel=1e-6)
    assert raw["top1"] != average["top1"]
    last = score(run / "last.pt")
    assert last["loss"] == pytest.approx(rows[-1]["loss"], rel=1e-6)


def test_the_batch_size_has_no_influence(score: Any) -> None:
    results = [score(batch_size=size) for size in (1, 7, 64, 359, 360, 1000)]
    for result in results:
        assert {k: v for k, v in result.items() if k != "loss"} == {k: v for k, v in results[0].items() if k != "loss"}
        assert result["loss"] == pytest.approx(results[0]["loss"], rel=1e-6)


def test_workers_have_no_influence(score: Any) -> None:
    assert score(data={"num_workers": 2}) == score()


def test_the_file_says_what_was_scored(score: Any, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    result = score()
    written = json.loads(written_to(tmp_path, "eval_accuracy_raw_16px").read_text())
    assert written == result
    assert {k: v for k, v in result.items() if k not in ("top1", "top5", "loss")} == {
        "images": 360,
        "data": "digits",
        "root": None,
        "split": "validation",
        "classes": 10,
        "resolution": 16,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "weights": "raw",
        "precision": "float32",
        "checkpoint": str(run / "best.pt"),
    }
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown.keys() == result.keys()
    assert (shown["images"], shown["weights"], shown["resolution"]) == ("360", "raw", "16")
    assert float(shown["top1"]) == pytest.approx(result["top1"], rel=1e-5)


def test_results_go_to_the_run_folder_by_default(changed: Any, tmp_path: Path) -> None:
    evaluate(EvalConfig(checkpoint=str(changed()), device="cpu"))
    assert written_to(tmp_path, "eval_accuracy_raw_16px").exists()


def test_another_resolution(score: Any, run: Path, content: dict[str, Any], tmp_path: Path) -> None:
    """The position embedding is resized, as timm does it."""
    result = score(data={"img_size": 32})
    assert result["resolution"] == 32
    assert written_to(tmp_path, "eval_accuracy_raw_32px").exists()
    model = plain_model(content["state_dict"])
    model.set_input_size(img_size=32)
    probabilities, labels = predicted(model, 32, 0.9)
    assert result["top1"] == pytest.approx(100 * accuracy_score(labels, probabilities.argmax(1)))
    assert result["loss"] == pytest.approx(log_loss(labels, probabilities), rel=1e-4)
    (note,) = rebuild(str(run), "raw", {"img_size": 32}).notes
    assert note == "pos_embed resized from (1, 17, 24) to (1, 65, 24)"
    with pytest.raises(ConfigError, match=r"18.*not divisible|18.*patch"):
        score(data={"img_size": 18})


def test_crop_and_interpolation_can_be_replaced(score: Any, content: dict[str, Any]) -> None:
    result = score(crop_pct=0.8, interpolation="nearest")
    assert (result["crop_pct"], result["interpolation"]) == (0.8, "nearest")
    assert result["loss"] != score()["loss"]
    probabilities, labels = predicted(plain_model(content["state_dict"]), 16, 0.8)
    assert score(crop_pct=0.8)["loss"] == pytest.approx(log_loss(labels, probabilities), rel=1e-5)
    with pytest.raises(ConfigError, match="interpolation='bicubik' is unknown"):
        score(interpolation="bicubik")


def test_half_precision(score: Any) -> None:
    result = score(precision="bf16")
    assert result["precision"] == "bfloat16"
    assert result["loss"] == pytest.approx(score()["loss"], rel=0.05)
    assert result["loss"] != score()["loss"]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_wrappers_are_stripped(score: Any, changed: Any, content: dict[str, Any], prefix: str) -> None:
    wrapped = {f"{prefix}{name}": value for name, value in content["state_dict"].items()}
    assert score(changed(state_dict=wrapped))["loss"] == score()["loss"]


def test_a_diverged_model_is_scored_as_wrong(score: Any, changed: Any, content: dict[str, Any], tmp_path: Path) -> None:
    """And its file is JSON."""
    state = {**content["state_dict"], "head.bias": torch.full((10,), torch.nan)}
    result = score(changed(state_dict=state))
    assert (result["top1"], result["top5"], result["loss"]) == (0.0, 0.0, None)
    assert "NaN" not in written_to(tmp_path, "eval_accuracy_raw_16px").read_text()


# What is refused


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"ema_state_dict": None}, "holds no EMA weights"),
        ({"config": ...}, "is not a checkpoint of train.py: it lacks config"),
        ({"classes": ..., "num_classes": ...}, "it lacks num_classes, classes"),
        ({"state_dict": ...}, "it lacks state_dict"),
    ],
)
def test_what_a_checkpoint_must_hold(score: Any, changed: Any, entries: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as info:
        score(changed(**entries), weights="ema")
    assert "\n" not in str(info.value)


def test_a_foreign_checkpoint(score: Any, tmp_path: Path) -> None:
    for value, message in (
        ({"weight": torch.zeros(1)}, "is not a checkpoint of train.py"),
        ([1, 2], "holds a list, not a dictionary"),
    ):
        torch.save(value, tmp_path / "foreign.pt")
        with pytest.raises(CheckpointError, match=message):
            score(tmp_path / "foreign.pt")
    torch.save({"path": Path("x")}, tmp_path / "foreign.pt")
    with pytest.raises(CheckpointError, match="damaged, or holds more than tensors and plain types"):
        score(tmp_path / "foreign.pt")
    (tmp_path / "foreign.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged, or holds more than tensors and plain types"):
        score(tmp_path / "foreign.pt")


def test_weights_that_do_not_fit(score: Any, changed: Any, content: dict[str, Any]) -> None:
    """Less than the whole model is never scored."""
    lacking = {name: value for name, value in content["state_dict"].items() if "mlp" not in name}
    with pytest.raises(CheckpointError, match=r"4 missing: blocks.0.mlp.fc1.bias"):
        score(changed(state_dict=lacking))
    with pytest.raises(CheckpointError, match=r"does not fit the model .*head.weight \(10, 24\) instead of \(7, 24\)"):
        score(changed(num_classes=7))


def test_missing_places(score: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no run folder or checkpoint at"):
        score(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        score(tmp_path / "empty")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"img_sise": 32}, "unknown key 'data.img_sise'. Did you mean 'img_size'"),
        ({"num_classes": 12}, "data.num_classes=12, but the checkpoint's model has 10"),
        ({"in_chans": 1}, "data.in_chans=1, but the checkpoint's model has 3"),
        ({"num_workers": "two"}, "data.num_workers: "),
        ({"img_size": -1}, "data.img_size=-1 must be at least 1"),
        ({"name": "didgits"}, "data=didgits is unknown. Did you mean 'digits'"),
    ],
)
def test_data_keys_are_checked(score: Any, data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as info:
        score(data=data)
    assert "\n" not in str(info.value)


def test_keys_that_agree_are_no_error(score: Any) -> None:
    assert score(data={"num_classes": 10, "in_chans": 3, "img_size": None}) == score()


def test_another_setting_gets_another_file(score: Any, tmp_path: Path) -> None:
    """What the score depends on keeps a result from overwriting another; the rest makes no new file."""
    for keys in ({}, {"crop_pct": 0.8}, {"interpolation": "bilinear"}, {"precision": "bf16"}):
        score(**keys)
    score(batch_size=7, data={"num_workers": 0})
    assert len(list(tmp_path.glob("eval_accuracy_raw_16px_*.json"))) == 4


def test_keys_that_the_data_set_does_not_use_are_refused(score: Any) -> None:
    with pytest.raises(ConfigError, match=r"data.root has no effect: data=digits does not use it"):
        score(data={"root": "/somewhere"})


def test_imports_of_the_run_are_imported_again(
    score: Any, changed: Any, content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_the_run.py").write_text("SEEN = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    score(changed(config={**content["config"], "imports": ["of_the_run"]}))
    assert sys.modules.pop("of_the_run").SEEN


def test_unknown_evaluations(score: Any) -> None:
    with pytest.raises(ConfigError, match=r"unknown eval=acuracy. Did you mean 'accuracy'"):
        score(eval=["accuracy", "acuracy"])


def test_each_evaluation_gets_its_own_file(score: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EVALUATIONS, "count", lambda config, rebuilt, processes: {"parameters": 5, "share": 1 / 3})
    score(eval=["accuracy", "count"])
    assert json.loads(written_to(tmp_path, "eval_count_raw_16px").read_text()) == {"parameters": 5, "share": 1 / 3}


# Class folders


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Class folders `0`, `1`, `2` to train on; the held-out split lacks `0`."""
    root = tmp_path / "folders"
    for split, name in (("train", "train"), ("val", "val")):
        images, labels = digit_arrays(split)
        for i in [i for i, label in enumerate(labels) if label < 3][:30]:
            if (split, labels[i]) != ("val", 0):
                folder = root / name / str(labels[i])
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray((images[i] * 255).astype("uint8")).save(folder / f"{i:04}.png")
    return root


def test_labels_are_those_of_the_checkpoint(score: Any, changed: Any, content: dict[str, Any], folders: Path) -> None:
    """A class that is lacking in the held-out split shifts no other; one that is unknown is an error. No training
    image is needed."""
    shutil.rmtree(folders / "train")
    state = content["state_dict"]
    three = {**state, "head.weight": state["head.weight"][:3], "head.bias": torch.tensor([0.0, 0.0, 100.0])}
    stored = {**content["config"], "data": {**content["config"]["data"], "name": "folder", "root": str(folders)}}
    checkpoint = changed(state_dict=three, num_classes=3, classes=["0", "1", "2"], config=stored)
    result = score(checkpoint)
    twos = len(list((folders / "val" / "2").iterdir()))
    assert result["images"] == twos + len(list((folders / "val" / "1").iterdir()))
    assert result["top1"] == pytest.approx(100 * twos / result["images"])  # it always says "2"
    (folders / "val" / "7").mkdir()
    Image.new("L", (8, 8)).save(folders / "val" / "7" / "x.png")
    with pytest.raises(DataError, match=r"'7' not among the 3 known classes"):
        score(checkpoint)


def test_a_damaged_image_is_an_error_with_its_path(score: Any, folders: Path) -> None:
    path = sorted((folders / "val").rglob("*.png"))[0]
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(DataError, match=f"{path}: this image cannot be decoded"):
        score(data={"name": "folder", "root": str(folders)})


def test_other_data_with_the_classes_of_the_checkpoint(score: Any, folders: Path) -> None:
    result = score(data={"name": "folder", "root": str(folders)})
    assert (result["data"], result["classes"]) == ("folder", 10)
    with pytest.raises(DataError, match="does not exist"):
        score(data={"name": "folder", "root": "/no/such/place"})


def test_a_place_that_cannot_be_written_is_found_first(score: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"results cannot be written to .*file/out: Not a directory. Choose output="):
        score(output=str(tmp_path / "file" / "out"))


def test_the_form_for_inference_answers_as_the_trained_model(
    score: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what is evaluated, and says so; image by image nothing changes but the last digits of a probability."""
    short, batches = InfViT._class_token, []
    monkeypatch.setattr(InfViT, "_class_token", lambda *args: batches.append(1) or short(*args))
    rows = {}
    for inference in (True, False):
        folder = tmp_path / str(inference)
        caplog.clear()
        with caplog.at_level("INFO"):
            score(output=str(folder), **({} if inference else {"reparameterize": False}))
        assert ("inference form" in caplog.text) is inference
        assert bool(batches) is inference
        batches.clear()
        (path,) = folder.glob("predictions*.csv")
        rows[inference] = list(csv.DictReader(path.open()))
    assert len(rows[True]) == 360
    for ours, theirs in zip(rows[True], rows[False], strict=True):
        assert float(ours.pop("probability")) == pytest.approx(float(theirs.pop("probability")), abs=1e-5)
        assert ours == theirs
