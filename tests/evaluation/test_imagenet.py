"""ImageNet and its relatives: a model that is right on every image exactly if every label is right."""

import csv
import io
import json
import logging
import tarfile
from pathlib import Path

import numpy as np
import pytest
from imagenet_trees import FILE, WNIDS, colour, paint, score
from PIL import Image
from scipy.stats import binomtest
from timm.data import ImageNetInfo, RealLabelsImagenet

from infvit.data.ground_truth import imagenet_classes
from infvit.data.imagenet_sets import NAMES, SETS
from infvit.data.source import FileSource
from infvit.errors import CheckpointError, ConfigError, DataError
from infvit.evaluation import EVALUATIONS

V2 = {
    "imagenet_v2_matched_frequency": "imagenetv2-matched-frequency-format-val",
    "imagenet_v2_threshold": "imagenetv2-threshold0.7-format-val",
    "imagenet_v2_top_images": "imagenetv2-top-images-format-val",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One image of every class in every set. In val, the one of class 3 has the colour of class 4."""
    root = tmp_path_factory.mktemp("imagenet")
    for i, wnid in enumerate(WNIDS):
        paint(root / "val" / wnid / FILE.format(i + 1), 4 if i == 3 else i)
        paint(root / "sketch" / wnid / f"sketch_{i}.JPEG", i)
        for folder in V2.values():
            paint(root / folder / str(i) / "0.jpeg", i)
    for name in ("a", "r"):
        for wnid in imagenet_classes(f"imagenet_{name}"):
            paint(root / f"imagenet-{name}" / wnid / "x.jpg", WNIDS.index(wnid))
    return root


def test_one_table(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    names = ["imagenet", "imagenet_v2", "imagenet_real", "imagenet_a", "imagenet_r", "imagenet_sketch"]
    rows = score(tmp_path, names, root)
    assert list(rows) == ["imagenet", *V2, "imagenet_real", "imagenet_a", "imagenet_r", "imagenet_sketch"]
    real = {i: labels for i, labels in enumerate(RealLabelsImagenet(range(50_000)).real_labels.values()) if i < 1000}
    images = {
        "imagenet": 1000,
        "imagenet_a": 200,
        "imagenet_r": 200,
        "imagenet_sketch": 1000,
        **dict.fromkeys(V2, 1000),
    }
    for name, count in images.items():
        row = rows[name]
        assert (row["images"], row["top5"]) == (count, 100.0), name
        assert row["top1"] == pytest.approx(99.9 if name == "imagenet" else 100.0), name
        assert (row["unlabelled"], row["outside"], row["damaged"]) == (0, 0, 0)
        assert row["expected"] == SETS[name].images
        interval = binomtest(round(row["top1"] * count / 100), count).proportion_ci(0.95, "wilson")
        assert (row["top1_low"], row["top1_high"]) == pytest.approx((100 * interval.low, 100 * interval.high))
    said = [4 if i == 3 else i for i in range(1000)]
    kept = [i for i in range(1000) if real[i]]
    assert 0 < len(kept) < 1000
    assert rows["imagenet_real"]["images"] == len(kept)
    assert rows["imagenet_real"]["unlabelled"] == 1000 - len(kept)
    assert rows["imagenet_real"]["top1"] == pytest.approx(100 * np.mean([said[i] in real[i] for i in kept]))
    assert [rows[f"imagenet{name}"]["classes"] for name in ("", "_a", "_r")] == [1000, 200, 200]

    (table,), (sheet,) = (list((tmp_path / "out").glob(f"table_imagenet_*.{kind}")) for kind in ("json", "csv"))
    assert json.loads(table.read_text()) == list(rows.values())
    with sheet.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [row["set"] for row in read] == list(rows)
    assert [float(row["top1"]) for row in read] == [row["top1"] for row in rows.values()]
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 1 + len(rows)
    assert shown[1].split()[:3] == ["imagenet", "99.90", "100.00"]
    assert f"{1000 - len(kept)} unlabelled" in shown[5]


def test_predictions_are_saved_image_by_image(root: Path, tmp_path: Path) -> None:
    score(tmp_path, "imagenet", root)
    (path,) = (tmp_path / "out").glob("predictions_imagenet_*.csv")
    with path.open(newline="") as file:
        rows = {row["image"]: row for row in csv.DictReader(file)}
    assert len(rows) == 1000
    row = rows[f"{WNIDS[3]}/{FILE.format(4)}"]
    assert (row["label"], row["prediction"], row["top1"], row["top5"]) == (WNIDS[3], WNIDS[4], "0", "1")
    assert row["top5_classes"].split("|")[0] == WNIDS[4]
    assert len(set(row["top5_classes"].split("|"))) == 5
    assert 0 < float(row["probability"]) <= 1
    assert sum(int(row["top1"]) for row in rows.values()) == 999


def test_logits_are_restricted_to_the_classes_of_the_set(root: Path, tmp_path: Path) -> None:
    """Images painted as a class that ImageNet-A lacks, next to its own colour, still go to one of the 200."""
    wnids = imagenet_classes("imagenet_a")
    lacking = [i for i in range(1000) if WNIDS[i] not in wnids and i % 10 and WNIDS[i - 1] in wnids]
    for i in lacking[:5]:
        paint(tmp_path / "imagenet-a" / WNIDS[i - 1] / "x.jpg", i)
    assert score(tmp_path, "imagenet_a", tmp_path)["imagenet_a"]["images"] == 5
    painted = {WNIDS[i - 1]: np.array(colour(i)) for i in lacking[:5]}
    (path,) = (tmp_path / "out").glob("predictions_imagenet_a_*.csv")
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            assert set(row["top5_classes"].split("|")) <= set(wnids)
            far = {wnid: np.square(colour(WNIDS.index(wnid)) - painted[row["label"]]).sum() for wnid in wnids}
            assert far[row["prediction"]] == min(far.values())


def test_any_of_the_real_labels_is_right(tmp_path: Path) -> None:
    """ReaL has 970 and 795 for the second validation image."""
    for said, right in ((970, 100.0), (795, 100.0), (796, 0.0)):
        paint(tmp_path / "val" / WNIDS[970] / FILE.format(2), said)
        assert score(tmp_path, "imagenet_real", tmp_path)["imagenet_real"]["top1"] == right


@pytest.mark.parametrize("kind", ["integers", "wnids"])
def test_v2_with_few_folders(tmp_path: Path, kind: str) -> None:
    """Neither their order as text nor the absence of others moves a label (field notes A1)."""
    for i in (0, 1, 2, 10, 100, 999):
        paint(tmp_path / V2["imagenet_v2_threshold"] / (str(i) if kind == "integers" else WNIDS[i]) / "0.jpeg", i)
    rows = score(tmp_path, "imagenet_v2", tmp_path)
    assert [(name, row["images"], row["top1"]) for name, row in rows.items()] == [("imagenet_v2_threshold", 6, 100.0)]


@pytest.mark.parametrize("extra", ["1000", "n01440764", "007", "-1", "cat"])
def test_v2_folders_that_are_no_index(tmp_path: Path, extra: str) -> None:
    folder = tmp_path / V2["imagenet_v2_top_images"]
    for name in ("0", "7", extra):
        paint(folder / name / "0.jpeg", 0)
    with pytest.raises(DataError, match=rf"{folder}, class folders of imagenet_v2_top_images: .*not among the 1000"):
        score(tmp_path, "imagenet_v2", tmp_path)


@pytest.mark.parametrize("name", ["imagenet", "imagenet_a", "imagenet_r", "imagenet_sketch"])
@pytest.mark.parametrize("extra", ["0", "n00000000", "cat", "n01440765"])
def test_folders_that_are_no_class(tmp_path: Path, name: str, extra: str) -> None:
    folder = tmp_path / SETS[name].folders[0]
    for wnid in (SETS[name].classes[5], extra):
        paint(folder / wnid / "x.jpg", 0)
    with pytest.raises(DataError, match=f"'{extra}' not among the {len(SETS[name].classes)} known classes"):
        score(tmp_path, name, tmp_path)


def test_absent_empty_hidden_and_linked_folders(tmp_path: Path) -> None:
    val = tmp_path / "val"
    for i in (2, 500, 999):
        paint(val / WNIDS[i] / "x.JPEG", i)
    (val / WNIDS[1]).mkdir()
    paint(val / ".cache" / "x.JPEG", 0)
    paint(tmp_path / "elsewhere" / "x.JPEG", 700)
    (val / WNIDS[700]).symlink_to(tmp_path / "elsewhere")
    (val / WNIDS[701]).symlink_to(val)
    row = score(tmp_path, "imagenet", tmp_path)["imagenet"]
    assert (row["images"], row["top1"], row["classes"], row["classes_with_images"]) == (4, 100.0, 1000, 4)


def test_an_incomplete_set_is_said_to_be_one(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        score(tmp_path, "imagenet_a", root)
    assert "imagenet_a: 200 images scored; the whole set has 7500" in caplog.text


# Where the sets are


def test_the_root_may_be_the_one_set(root: Path, tmp_path: Path) -> None:
    assert score(tmp_path, "imagenet", root / "val")["imagenet"]["images"] == 1000
    assert score(tmp_path, "imagenet_r", root / "imagenet-r")["imagenet_r"]["top1"] == 100.0
    variant = "imagenet_v2_threshold"
    assert score(tmp_path, variant, root / V2[variant])[variant]["top1"] == 100.0
    with pytest.raises(DataError, match="has no imagenet_a "):
        score(tmp_path, ["imagenet_a", "imagenet"], root / "imagenet-a")


def test_a_set_may_have_its_own_root(root: Path, tmp_path: Path) -> None:
    for place in (root, root / "imagenet-a"):
        rows = score(tmp_path, ["imagenet", "imagenet_a"], root / "val/..", roots={"imagenet_a": str(place)})
        assert (rows["imagenet"]["images"], rows["imagenet_a"]["images"]) == (1000, 200)
    with pytest.raises(ConfigError, match=r"roots.imagenet_b has no effect.* Did you mean 'imagenet'"):
        score(tmp_path, "imagenet", root, roots={"imagenet_b": "x"})
    with pytest.raises(DataError, match=r"roots.imagenet=/nowhere does not exist"):
        score(tmp_path, "imagenet", None, roots={"imagenet": "/nowhere"})


def test_what_is_missing_is_found_before_anything_is_scored(root: Path, tmp_path: Path) -> None:
    (tmp_path / "val").symlink_to(root / "val")
    for names in (["imagenet", "imagenet_a"], ["imagenet", "imagenet_v2"], ["imagenet", "imagenet_c"]):
        with pytest.raises(
            DataError, match=rf"data.root={tmp_path} has no {names[1]} \(looked for .*set roots\."
        ) as info:
            score(tmp_path, names, tmp_path)
        assert "\n" not in str(info.value)
    assert not list(tmp_path.rglob("*.csv"))
    with pytest.raises(ConfigError, match=r"data.root is missing"):
        score(tmp_path, "imagenet", None)
    with pytest.raises(ConfigError, match=r"unknown eval=imagenet_w2. Did you mean 'imagenet_v2'"):
        score(tmp_path, "imagenet_w2", root)


# ImageNet-C


def test_corruptions_by_severity(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Of ten images, as many are wrong as the severity says. Only whole corruptions have a mean, and extra ones do not
    enter that of all."""
    for group, name in (("blur/", "fog"), ("", "snow"), ("extra/", "spatter"), ("", "jpeg_compression")):
        for severity in range(1, 4 if name == "snow" else 6):
            for i in range(10):
                said = i + 500 if i < severity - (name == "jpeg_compression") else i
                paint(tmp_path / "imagenet-c" / f"{group}{name}" / str(severity) / WNIDS[i] / "x.jpg", said)
    rows = score(tmp_path, "imagenet_c", tmp_path)
    expected = {f"imagenet_c/fog/{s}": 100.0 - 10 * s for s in range(1, 6)}
    expected |= {f"imagenet_c/snow/{s}": 100.0 - 10 * s for s in range(1, 4)}
    expected |= {f"imagenet_c/spatter/{s}": 100.0 - 10 * s for s in range(1, 6)}
    expected |= {f"imagenet_c/jpeg_compression/{s}": 110.0 - 10 * s for s in range(1, 6)}
    assert {name: row["top1"] for name, row in rows.items()} == pytest.approx(expected)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown[1] == ["fog", "90.00", "80.00", "70.00", "60.00", "50.00", "70.00"]
    assert shown[2] == ["jpeg_compression", "100.00", "90.00", "80.00", "70.00", "60.00", "80.00"]
    assert shown[3] == ["snow", "90.00", "80.00", "70.00", "-", "-", "-"]
    assert shown[4] == ["spatter", "(extra)", "90.00", "80.00", "70.00", "60.00", "50.00", "70.00"]
    assert " ".join(shown[5]) == "mean of 2 of the 15 corruptions, extra ones apart 75.00"
    assert {row["crop_pct"] for row in rows.values()} == {1.0}  # they are cropped already
    assert score(tmp_path, "imagenet_c", tmp_path / "imagenet-c") == rows


# Other models and classes


def test_every_name_is_known() -> None:
    assert not set(EVALUATIONS) & set(NAMES)


def test_a_class_list(root: Path, tmp_path: Path) -> None:
    """Only its classes are scored, and only among themselves."""
    chosen = [WNIDS[i] for i in (3, 4, 5, 900)]
    (tmp_path / "few.txt").write_text("# four\n" + "\n".join(reversed(chosen)) + "\n\n")
    rows = score(tmp_path, ["imagenet", "imagenet_sketch"], root, data={"classes": str(tmp_path / "few.txt")})
    row = rows["imagenet"]
    assert (row["images"], row["classes"], row["outside"], row["expected"]) == (4, 4, 996, None)
    assert row["top1"] == 75.0
    assert rows["imagenet_sketch"]["top1"] == 100.0
    (path,) = (tmp_path / "out").glob("predictions_imagenet_raw*.csv")
    with path.open(newline="") as file:
        assert {name for row in csv.DictReader(file) for name in row["top5_classes"].split("|")} == set(chosen)


def test_class_lists_that_are_wrong(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "few.txt"
    for text, message in (
        (f"{WNIDS[0]}\nn01440765\n", r"line 2: 'n01440765' is not among the 1000 classes.*Did you mean .*'n01440764'"),
        (f"{WNIDS[0]}\n\n{WNIDS[0]}\n", r"line 3: 'n01440764' stands in line 1 already"),
        ("# nothing\n", "lists no class"),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=message):
            score(tmp_path, "imagenet", root, data={"classes": str(file)})
    with pytest.raises(DataError, match="cannot be read"):
        score(tmp_path, "imagenet", root, data={"classes": str(tmp_path / "none.txt")})


def test_ema_and_foreign_weights_are_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"weights=ema: only runs of train.py"):
        score(tmp_path, "imagenet", root, weights="ema")


def test_wrong_pixels_are_seen(root: Path, tmp_path: Path) -> None:
    """The colours of neighbouring classes differ by 20 grey levels, so that the tests above see a shift by one."""
    image = Image.open(root / "val" / WNIDS[10] / FILE.format(11))
    assert image.getpixel((0, 0)) == (20, 40, 20)


# Archives and readers


def shard(path: Path, indices: list[int], image: Path, folders: bool = False) -> None:
    """Writes a WebDataset shard, or class folders in a tar file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for i in indices:
            paint(image, i)
            content = {f"{WNIDS[i]}/x.JPEG" if folders else f"ILSVRC2012_val_{i + 1:08d}.png": image.read_bytes()}
            if not folders:
                content[f"ILSVRC2012_val_{i + 1:08d}.cls"] = str(i).encode()
            for name, data in content.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def test_class_folders_in_a_tar_file(tmp_path: Path) -> None:
    shard(tmp_path / "val.tar", [0, 3, 999], tmp_path / "x.png", folders=True)
    shard(tmp_path / "sketch.tar", [5, 7], tmp_path / "x.png", folders=True)
    rows = score(tmp_path, ["imagenet", "imagenet_sketch"], tmp_path)
    assert [(row["images"], row["top1"]) for row in rows.values()] == [(3, 100.0), (2, 100.0)]


def test_webdataset_shards(tmp_path: Path) -> None:
    """Integer labels are class indices, whichever of them there are; ReaL goes by the names of the members."""
    shard(tmp_path / "val/0.tar", [1, 3, 900], tmp_path / "out/x.png")
    data = {"reader": "wds/*.tar", "val_split": "val"}
    rows = score(tmp_path, ["imagenet", "imagenet_real"], tmp_path, data=data)
    assert (rows["imagenet"]["images"], rows["imagenet"]["top1"]) == (3, 100.0)
    real = list(RealLabelsImagenet(range(50_000)).real_labels.values())
    kept = [i for i in (1, 3, 900) if real[i]]
    assert rows["imagenet_real"]["images"] == len(kept)
    with pytest.raises(DataError, match="has no imagenet_a"):
        score(tmp_path, "imagenet_a", tmp_path, data=data)


@pytest.mark.parametrize("order", ["right", "reversed", "others"])
def test_class_names_of_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """Hugging Face's data set names its classes in words: they are taken by place only if the places agree."""
    names = [text.replace(",", " ,", 1) for text in ImageNetInfo().label_descriptions()]
    names = {"right": names, "reversed": names[::-1], "others": [f"class {i}" for i in range(1000)]}[order]
    files = [str(paint(tmp_path / f"{i}.png", i)) for i in (4, 134, 517)]
    source = FileSource(files, [4, 134, 517], names, 3)
    monkeypatch.setattr("infvit.data.imagenet_sets.timm_source", lambda data, split, classes: source)
    data = {"reader": "hfds/imagenet-1k"}
    if order == "right":
        assert score(tmp_path, "imagenet", None, data=data)["imagenet"]["top1"] == 100.0
        with pytest.raises(DataError, match="ReaL's labels go by file name"):
            score(tmp_path, "imagenet_real", None, data=data)
    else:
        with pytest.raises(DataError, match="are not those of ImageNet-1K, or in another order"):
            score(tmp_path, "imagenet", None, data=data)
