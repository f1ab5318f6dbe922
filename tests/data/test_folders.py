"""Class folders and tar files: labels that cannot be silently wrong, and one clear line for what is missing."""

import os
import shutil
import tarfile
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from timm.data.readers.reader_image_in_tar import ReaderImageInTar
from timm.utils.misc import natural_key as timm_natural_key

from infvit.config import DataConfig
from infvit.data import Preflight, Source, build_source, preflight
from infvit.data.source import class_order, natural_key
from infvit.errors import ConfigError, DataError

Write = Callable[..., Path]


def config(root: Path, **kwargs: object) -> DataConfig:
    return DataConfig(name=str(kwargs.pop("name", "folder")), root=str(root), **kwargs)  # type: ignore[arg-type]


def labels(source: Source) -> list[int]:
    return [source.target(i) for i in range(len(source))]


def names(source: Source) -> list[str]:
    return [os.path.basename(source.locate(i)) for i in range(len(source))]


def warned(check: Preflight, text: str) -> str:
    """Returns the one warning that holds the text."""
    (line,) = [line for line in check.warnings if text in line]
    return line


def refused(root: Path, *parts: str, batch_size: int | None = None, **kwargs: object) -> None:
    """Asserts that the preflight check raises one line that holds every part."""
    with pytest.raises(DataError) as caught:
        preflight(config(root, **kwargs), batch_size)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_plain_folders(folders: Path) -> None:
    check = preflight(config(folders), batch_size=6)
    assert check.classes == check.val.classes == ("a", "b", "c")
    assert labels(check.train) == [0, 0, 1, 1, 2, 2]
    assert labels(check.val) == [0, 1, 2]
    assert check.warnings == []
    assert check.train.native_size == 224
    assert check.train.image(0).size == (32, 24)
    first = ", ".join(str(folders / "train" / name) for name in ("a/0.jpg", "a/1.jpg", "b/0.jpg"))
    assert check.lines[0] == "train: 6 images, 3 classes: 'a', 'b', 'c'"
    assert check.lines[1] == f"train: first files: {first}"
    assert check.lines[2] == "val: 3 images, 3 classes: 'a', 'b', 'c'"


@pytest.mark.parametrize("name", ["validation", "val", "valid"])
def test_names_of_the_held_out_split(folders: Path, name: str) -> None:
    (folders / "val").rename(folders / name)
    assert len(build_source(config(folders), "val")) == 3
    (folders / name).rename(folders / "test")
    refused(folders, str(folders), "'validation'", "for the val split", "'test'", "data.val_split")
    assert len(build_source(config(folders, val_split="test"), "val")) == 3


def test_val_labels_come_from_the_training_classes(folders: Path) -> None:
    for path in (folders / "val/b").iterdir():
        path.unlink()
    check = preflight(config(folders))
    assert labels(check.val) == [0, 2]
    assert "val: 1 of 3 classes" in warned(check, "'b'")
    (folders / "val/b").rmdir()
    assert labels(build_source(config(folders), "val")) == [0, 2]
    assert labels(build_source(config(folders), "val", ["c", "b", "a"])) == [2, 0]


def test_empty_training_class_keeps_its_index(folders: Path) -> None:
    for path in (folders / "train/b").iterdir():
        path.unlink()
    check = preflight(config(folders))
    assert check.classes == ("a", "b", "c")
    assert labels(check.train) == [0, 0, 2, 2]
    assert "train: 1 of 3 classes" in warned(check, "'b'")


def test_unknown_val_class_is_named(folders: Path, image: Write) -> None:
    image("val/zebra/x.jpg")
    refused(folders, str(folders / "val"), "'zebra'", "'a', 'b', 'c'", "remove or rename")


def test_integer_names_are_ordered_by_value(tmp_path: Path, image: Write) -> None:
    for name in ("0", "1", "2", "10", "100"):
        image(f"train/{name}/x.jpg")
    for name in ("2", "100"):
        image(f"val/{name}/x.jpg")
    check = preflight(config(tmp_path))
    assert check.classes == ("0", "1", "2", "10", "100")
    assert labels(check.val) == [2, 4]
    assert class_order(["010", "9", "1"]) == ["1", "9", "010"]


def test_flat_val_folder(folders: Path, image: Write) -> None:
    for name in "abc":
        (folders / f"val/{name}/0.jpg").unlink()
        (folders / f"val/{name}").rmdir()
    image("val/ILSVRC2012_val_00000001.JPEG")
    image("val/ILSVRC2012_val_00000002.JPEG")
    refused(folders, str(folders / "val"), "no class folders", "found 2 images", "one folder per class")


def test_stray_and_hidden_files(folders: Path, image: Write) -> None:
    image("train/readme.png")
    image("train/.ipynb_checkpoints/x-checkpoint.jpg")
    image("train/__MACOSX/x.jpg")
    (folders / "train/a/.DS_Store").touch()
    (folders / "train/a/notes.txt").touch()
    (folders / "train/notes.txt").touch()
    check = preflight(config(folders))
    assert check.classes == ("a", "b", "c")
    assert labels(check.train) == [0, 0, 1, 1, 2, 2]
    assert "skipped 3 hidden" in warned(check, "skipped")
    assert "ignored 1 images" in warned(check, "outside")
    assert "ignored 1 files that are no images by name: 'notes.txt'" in warned(check, "by name")


def test_images_of_other_kinds_count(folders: Path) -> None:
    for suffix in (".webp", ".bmp", ".GIF", ".tif", ".tiff", ".ppm"):
        Image.new("RGB", (8, 8), (200, 10, 10)).save(folders / f"train/a/x{suffix}")
    check = preflight(config(folders))
    assert labels(check.train) == [0] * 8 + [1, 1, 2, 2]
    assert not check.warnings
    for i in range(8):
        assert check.train.image(i).getpixel((4, 4)) == pytest.approx((200, 10, 10), abs=4)


def test_links_loops_case_and_unicode(tmp_path: Path, image: Write) -> None:
    image("real/k1/UP.JPEG")
    image("real/k2/ü b.PnG")
    train = tmp_path / "train"
    train.mkdir()
    (train / "k1").symlink_to(tmp_path / "real/k1")
    (train / "k 2 é").symlink_to(tmp_path / "real/k2")
    (train / "loop").symlink_to(train)
    (train / "up").symlink_to(tmp_path)
    (tmp_path / "real/k1/inner").symlink_to(tmp_path / "real/k2")
    (tmp_path / "real/k1/inner_loop").symlink_to(tmp_path / "real/k1")
    (tmp_path / "val").symlink_to(train)
    check = preflight(config(tmp_path))
    assert check.classes == ("k1", "k 2 é")
    assert names(check.train) == ["UP.JPEG", "ü b.PnG"]
    assert labels(check.val) == [0, 1]
    for name in ("loop", "up", "inner", "inner_loop"):
        assert all(f"'{name}'" in line for line in check.warnings)
    assert len(check.warnings) == 2  # one a split
    assert check.train.image(0).size == (32, 24)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_class_that_is_a_link_to_another_is_refused(folders: Path, split: str) -> None:
    """Its images would have two labels."""
    shutil.rmtree(folders / split / "a")
    (folders / split / "a").symlink_to(folders / split / "b")
    with pytest.raises(DataError, match=rf"{split}/a is a link to the folder of another class, 'b'; remove it"):
        preflight(config(folders))


def test_accents_written_in_two_ways_are_one_class(folders: Path, image: Write) -> None:
    image("train/" + unicodedata.normalize("NFC", "é") + "/x.jpg")
    image("val/" + unicodedata.normalize("NFD", "é") + "/x.jpg")
    assert labels(build_source(config(folders), "val")) == [0, 1, 2, 3]


def test_images_below_a_class_folder_belong_to_it_in_natural_order(folders: Path, image: Write) -> None:
    for name in ("10", "9", "sub/1"):
        image(f"train/c/{name}.jpg")
    source = build_source(config(folders), "train")
    assert names(source) == ["0.jpg", "1.jpg", "0.jpg", "1.jpg", "0.jpg", "1.jpg", "9.jpg", "10.jpg", "1.jpg"]
    assert labels(source)[-5:] == [2] * 5
    words = ["b10", "B9", "b1", "a", "z²", "x01y2", "x1y10"]
    assert sorted(words, key=natural_key) == sorted([*words], key=lambda w: timm_natural_key(w.replace("²", "~")))


@pytest.mark.parametrize("missing", ["train", "val"])
def test_missing_split(folders: Path, missing: str) -> None:
    (folders / missing).rename(folders / "other")
    refused(folders, str(folders), f"for the {missing} split", "'other'", "data.root")


def test_missing_root(tmp_path: Path) -> None:
    refused(tmp_path / "absent", f"data.root={tmp_path / 'absent'} does not exist", "correct the path")
    with pytest.raises(ConfigError, match=r"data.root is missing.*data.root=PATH"):
        preflight(DataConfig(name="folder"))


def test_no_images_and_no_folders(tmp_path: Path, folders: Path) -> None:
    for path in folders.glob("train/*/*"):
        path.rename(path.with_suffix(".heic"))
    refused(folders, str(folders / "train"), "3 class folders but no images", ".jpeg")
    (tmp_path / "empty/train").mkdir(parents=True)
    refused(tmp_path / "empty", "no class folders", "found 0 images")


def test_batch_and_class_counts(folders: Path) -> None:
    refused(folders, "6 images", "batch_size=8", "at most 6", batch_size=8)
    refused(folders, "data.num_classes=5", "3 classes", "leave data.num_classes out", num_classes=5)
    assert preflight(config(folders, num_classes=3), batch_size=6).classes == ("a", "b", "c")


def test_one_class_is_suspicious(tmp_path: Path, image: Write) -> None:
    image("train/images/x.jpg")
    image("val/images/x.jpg")
    assert "data.root" in warned(preflight(config(tmp_path)), "only one class")


def test_unknown_data_set_offers_names() -> None:
    with pytest.raises(ConfigError, match=r"data=digit is unknown.*'digits'"):
        build_source(DataConfig(name="digit"), "train")


# ImageNet


def test_imagenet_labels_come_from_its_list(tmp_path: Path, image: Write) -> None:
    for wnid in ("n01443537", "n15075141"):  # goldfish is class 1, toilet tissue 999
        image(f"train/{wnid}/x.JPEG")
        image(f"val/{wnid}/x.JPEG")
    check = preflight(config(tmp_path, name="imagenet"))
    assert len(check.classes) == 1000
    assert labels(check.train) == labels(check.val) == [1, 999]
    assert "train: 998 of 1000" in warned(check, "train: 998")
    image("train/cats/x.JPEG")
    refused(tmp_path, "'cats'", "1000 known classes", name="imagenet")


# tar files


def pack(folder: Path, name: str, *, inner: str = "") -> Path:
    path = folder.parent / name
    with tarfile.open(path, "w") as tar:
        for file in sorted(folder.rglob("*.*")):
            tar.add(file, arcname=inner + str(file.relative_to(folder)))
    return path


@pytest.mark.parametrize("inner", ["", "./", "train/"])
def test_tar_per_split(folders: Path, inner: str) -> None:
    plain = build_source(config(folders), "train")
    pixels = [plain.image(i).tobytes() for i in range(6)]
    (folders / "train/a/.hidden.jpg").touch()
    for split in ("train", "val"):
        pack(folders / split, f"{split}.tar", inner=inner)
        (folders / split).rename(folders / f"{split}_unpacked")
    check = preflight(config(folders))
    assert check.classes == ("a", "b", "c")
    assert [check.train.image(i).tobytes() for i in range(6)] == pixels
    assert check.train.locate(0) == str(folders / "train.tar" / f"{inner.removeprefix('./')}a/0.jpg")
    assert "skipped 1 hidden" in warned(check, "skipped")


def test_tars_agree_with_timm(folders: Path, image: Write) -> None:
    """A tar of one tar per class, as ImageNet is distributed, and a folder of them."""
    for i in (9, 10):
        image(f"train/b/{i}.jpg", colour=(i, 0, 0))
    for name in "abc":
        pack(folders / "train" / name, f"{name}.tar")  # train/a.tar, ...
    outer = folders / "train.tar"
    with tarfile.open(outer, "w") as tar:
        for name in "abc":
            tar.add(folders / f"train/{name}.tar", arcname=f"{name}.tar")
    (folders / "split").mkdir()
    for name in "abc":
        (folders / f"train/{name}.tar").rename(folders / f"split/{name}.tar")
    (folders / "train").rename(folders / "unpacked")
    for root, split in ((outer, "train"), (folders / "split", "split")):
        theirs = ReaderImageInTar(str(root), cache_tarinfo=False)
        expected = sorted((int(theirs[i][1]), theirs[i][0].read()) for i in range(len(theirs)))
        ours = build_source(config(folders, train_split=split), "train")
        files = ours.files  # type: ignore[attr-defined]
        assert sorted((ours.target(i), files[i].read()) for i in range(len(ours))) == expected
        assert names(ours) == ["0.jpg", "1.jpg", "0.jpg", "1.jpg", "9.jpg", "10.jpg", "0.jpg", "1.jpg"]


def test_flat_and_unreadable_tars(folders: Path) -> None:
    (folders / "val").rename(folders / "old")
    path = pack(folders / "old/a", "val.tar").rename(folders / "val.tar")
    refused(folders, str(path), "no class folders", "found 1 images")
    path.write_bytes(b"not a tar file" * 100)
    refused(folders, str(path), "uncompressed tar", "repack")
