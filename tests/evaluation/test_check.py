"""`eval=check`: counts of what is there, and what exactly is missing."""

import shutil
from pathlib import Path

import pytest
from imagenet_trees import WNIDS, paint

from infvit.config import EvalConfig
from infvit.data.ground_truth import imagenet_classes
from infvit.data.imagenet_sets import SETS
from infvit.errors import ConfigError, DataError
from infvit.evaluation import evaluate
from infvit.evaluation.check import check


def run_check(root: Path | None, **keys: dict) -> dict:
    data = {"root": str(root)} if root else {}
    return evaluate(EvalConfig(eval="check", **{"data": data, **keys}))


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ImageNet-A and the variant of V2, whole if they have an image a class."""
    for name, images in (("imagenet_a", 200), ("imagenet_v2_threshold", 1000)):
        spec = SETS[name]
        monkeypatch.setitem(SETS, name, type(spec)(**{**vars(spec), "images": images}))
    for wnid in imagenet_classes("imagenet_a"):
        paint(tmp_path / "imagenet-a" / wnid / "x.jpg", 0)
    for i in range(1000):
        paint(tmp_path / "imagenetv2-threshold0.7-format-val" / str(i) / "x.jpg", 0)
    return tmp_path


def test_whole_sets(whole: Path, capsys: pytest.CaptureFixture) -> None:
    found = run_check(whole)
    assert found["imagenet_a"] == {"path": str(whole / "imagenet-a"), "classes": 200, "images": 200, "wrong": []}
    assert found["imagenet_v2_threshold"]["classes"] == 1000
    assert found["imagenet"]["path"] is None
    shown = {line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines()}
    assert shown["imagenet_a"] == f"200 of 200 200 of 200 {whole / 'imagenet-a'}"
    assert shown["imagenet_sketch"].startswith("- - not found (looked for sketch, imagenet-sketch")
    assert {"imagenet_train", "imagenet_real", "imagenet_c"} <= shown.keys()


def test_what_is_missing(whole: Path, capsys: pytest.CaptureFixture) -> None:
    wnids = imagenet_classes("imagenet_a")
    shutil.rmtree(whole / "imagenet-a" / wnids[7])
    (whole / "imagenet-a" / wnids[8] / "x.jpg").unlink()
    paint(whole / "imagenetv2-threshold0.7-format-val/5/more.jpg", 0)
    with pytest.raises(DataError, match="2 of 2 sets are not whole: imagenet_v2_threshold, imagenet_a"):
        run_check(whole)
    shown = capsys.readouterr().out
    assert "198 of 200" in shown
    assert f"1 of 200 classes are absent: '{wnids[7]}'" in shown
    assert f"1 class folders are empty: '{wnids[8]}'" in shown
    assert "2 images are missing" in shown
    assert "1 images too many" in shown


def test_wrong_folders_and_a_flat_val(whole: Path, capsys: pytest.CaptureFixture) -> None:
    paint(whole / "imagenet-a" / "cat" / "x.jpg", 0)
    paint(whole / "val" / "ILSVRC2012_val_00000001.JPEG", 0)
    with pytest.raises(DataError, match="3 of 4 sets are not whole: imagenet, imagenet_real, imagenet_a"):
        run_check(whole)
    shown = capsys.readouterr().out
    assert "'cat' not among the 200 known classes" in shown
    assert "found 1 images directly in it" in shown


def test_real_counts_labelled_images(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Of the first two validation images ReaL labels the second only."""
    for i in (1, 2):
        paint(tmp_path / "val" / WNIDS[0] / f"ILSVRC2012_val_{i:08d}.JPEG", 0)
    paint(tmp_path / "val" / WNIDS[1] / "x.JPEG", 0)
    with pytest.raises(DataError, match="not whole"):
        run_check(tmp_path)
    shown = capsys.readouterr().out
    assert "1 of 46837" in shown
    assert "3 of 50000" in shown
    assert "1 files have not the names that ReaL's labels go by: 'x'" in shown


def test_corruptions(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for severity in (1, 2, 3, 5):
        paint(tmp_path / "imagenet-c/blur/fog" / str(severity) / WNIDS[0] / "x.jpg", 0)
    with pytest.raises(DataError, match="1 of 1 sets are not whole: imagenet_c"):
        run_check(tmp_path)
    shown = capsys.readouterr().out
    assert "4 of 50000 each" in shown
    assert "1 severities are absent: 'imagenet_c/fog/4'" in shown
    assert "imagenet_c/fog/1: 49999 images are missing" in shown


def test_own_roots(whole: Path, tmp_path: Path) -> None:
    found = run_check(None, roots={"imagenet_a": str(whole / "imagenet-a")})
    assert [name for name, finding in found.items() if finding["path"]] == ["imagenet_a"]


def test_refusals(tmp_path: Path) -> None:
    for keys, error, message in (
        ({"data": {}}, ConfigError, "data.root is missing"),
        ({"data": {"root": "/nowhere"}}, DataError, "data.root=/nowhere does not exist"),
        ({"data": {"root": str(tmp_path)}}, DataError, "has none of the sets"),
        ({"data": {"root": str(tmp_path), "img_size": 5}}, ConfigError, "data.img_size has no effect"),
        ({"roots": {"imagenet_z": "x"}}, ConfigError, "unknown key 'roots.imagenet_z'. Did you mean"),
    ):
        with pytest.raises(error, match=message):
            check(EvalConfig(eval="check", **keys))
