"""The validation images in one flat folder, labelled by the files of the devkit or of Kaggle; damage; processes."""

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision.datasets.imagenet as theirs
from imagenet_trees import FILE, WNIDS, paint, score
from scipy.io import savemat
from timm.data import RealLabelsImagenet

from infvit.config import DataConfig
from infvit.data import build_source
from infvit.errors import DataError


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """Validation images without class folders; image i is of class (7 i) % 1000."""
    for i in range(1, 21):
        paint(tmp_path / "val" / FILE.format(i), 7 * i % 1000)
    return tmp_path


def write_devkit(folder: Path) -> None:
    """The devkit's numbers are those of a shuffled class list that also holds 3 inner nodes, as the real one does."""
    folder.mkdir(parents=True)
    order = np.random.default_rng(0).permutation(1000)
    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "O")]
    rows = [(n, WNIDS[i], "a, b", "c", 0) for n, i in enumerate(order, 1)]
    rows += [(1001 + n, f"n9999999{n}", "inner", "c", 2) for n in range(3)]
    savemat(folder / "meta.mat", {"synsets": np.array(rows, dtype=fields).reshape(-1, 1)})
    number = {i: n for n, i in enumerate(order, 1)}
    text = "".join(f"{number[7 * i % 1000]}\n" for i in range(1, 21))
    (folder / "ILSVRC2012_validation_ground_truth.txt").write_text(text)


def write_kaggle(folder: Path) -> None:
    rows = [f"ILSVRC2012_val_{i:08d},{WNIDS[7 * i % 1000]} 1 2 3 4 {WNIDS[0]} 5 6 7 8\n" for i in range(20, 0, -1)]
    (folder / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "".join(rows))


@pytest.mark.parametrize("place", [".", "val", "ILSVRC2012_devkit_t12/data"])
def test_flat_with_the_devkit(flat: Path, place: str) -> None:
    write_devkit(flat / "kit")
    for file in (flat / "kit").iterdir():
        (flat / place).mkdir(parents=True, exist_ok=True)
        file.rename(flat / place / file.name)
    row = score(flat, "imagenet", flat)["imagenet"]
    assert (row["images"], row["top1"]) == (20, 100.0)


def test_the_devkit_is_read_as_torchvision_reads_it(flat: Path) -> None:
    write_devkit(flat / "ILSVRC2012_devkit_t12/data")
    archive = flat / "ILSVRC2012_devkit_t12.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(flat / "ILSVRC2012_devkit_t12", "ILSVRC2012_devkit_t12")
    (flat / "read").mkdir()
    archive.rename(flat / "read" / archive.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs, "_verify_archive", lambda *_: None)
        theirs.parse_devkit_archive(flat / "read")
    _, expected = theirs.load_meta_file(flat / "read")
    source = build_source(DataConfig(name="imagenet", root=str(flat), val_split="val"), "val", WNIDS)
    labels = {Path(source.locate(i)).name: WNIDS[source.target(i)] for i in range(len(source))}
    assert labels == {FILE.format(i): wnid for i, wnid in enumerate(expected, 1)}


def test_flat_with_kaggles_file(flat: Path, tmp_path: Path) -> None:
    kaggle = tmp_path / "kaggle"
    (kaggle / "ILSVRC/Data/CLS-LOC").mkdir(parents=True)
    (flat / "val").rename(kaggle / "ILSVRC/Data/CLS-LOC/val")
    write_kaggle(kaggle)
    for root in (kaggle, kaggle / "ILSVRC/Data/CLS-LOC", kaggle / "ILSVRC/Data/CLS-LOC/val"):
        row = score(tmp_path, "imagenet", root)["imagenet"]
        assert (row["images"], row["top1"]) == (20, 100.0)


def test_flat_real_labels_and_tar(flat: Path) -> None:
    write_kaggle(flat)
    with tarfile.open(flat / "ILSVRC2012_img_val.tar", "w") as tar:
        for path in sorted((flat / "val").iterdir()):
            tar.add(path, path.name)
    (flat / "val").rename(flat / "moved")
    rows = score(flat, ["imagenet", "imagenet_real"], flat)
    assert (rows["imagenet"]["images"], rows["imagenet"]["top1"]) == (20, 100.0)
    real = RealLabelsImagenet(range(50_000)).real_labels
    kept = [i for i in range(1, 21) if real[FILE.format(i)]]
    assert rows["imagenet_real"]["images"] == len(kept)
    hits = [7 * i % 1000 in real[FILE.format(i)] for i in kept]
    assert rows["imagenet_real"]["top1"] == pytest.approx(100 * np.mean(hits))


def test_ground_truth_that_is_wrong(flat: Path) -> None:
    with pytest.raises(DataError, match=r"has no class folders \(found 20 images.*LOC_val_solution.csv"):
        score(flat, "imagenet", flat)
    paint(flat / "val" / "holiday.jpg", 0)
    write_kaggle(flat)
    with pytest.raises(DataError, match=r"holiday.jpg is not in the ground truth"):
        score(flat, "imagenet", flat)
    (flat / "LOC_val_solution.csv").write_text("ImageId,PredictionString\nILSVRC2012_val_00000001,cat 1 2 3 4\n")
    with pytest.raises(DataError, match=r"LOC_val_solution.csv has no WordNet id of ImageNet for .*0001"):
        score(flat, "imagenet", flat)
    (flat / "LOC_val_solution.csv").unlink()
    write_devkit(flat / "data")
    (flat / "data/meta.mat").rename(flat / "meta.mat")
    with pytest.raises(DataError, match=r"has no meta.mat beside it"):
        score(flat, "imagenet", flat)
    (flat / "data/meta.mat").write_bytes(b"no matrix")
    with pytest.raises(DataError, match="do not fit together or are damaged"):
        score(flat, "imagenet", flat)


def test_real_needs_the_names_of_the_files(tmp_path: Path) -> None:
    paint(tmp_path / "val" / WNIDS[0] / "x.JPEG", 0)
    with pytest.raises(DataError, match=r"x.JPEG: ReaL's labels go by file name"):
        score(tmp_path, "imagenet_real", tmp_path)


# Damage


def test_damaged_images(flat: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_kaggle(flat)
    for i, content in ((3, b""), (9, b"no picture")):
        (flat / "val" / FILE.format(i)).write_bytes(content)
    with pytest.raises(DataError, match=r"ILSVRC2012_val_0000000[39].JPEG: this image cannot be decoded"):
        score(flat, "imagenet", flat)
    row = score(flat, "imagenet", flat, on_damaged="exclude", batch_size=1)["imagenet"]
    assert (row["images"], row["top1"], row["damaged"]) == (18, 100.0, 2)
    assert "Left out: " in caplog.text
    assert FILE.format(9) in caplog.text
    for path in (flat / "val").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"all 20 images are damaged"):
        score(flat, "imagenet", flat, on_damaged="exclude")


@pytest.mark.parametrize("batch_size", [1, 3])
def test_several_processes_give_the_same(
    flat: Path, ranks: Callable[..., list[Any]], batch_size: int, tmp_path: Path
) -> None:
    """Damaged images too are left out once, whoever meets them; process 2 of 3 meets nothing else in batches of 1."""
    write_kaggle(flat)
    for i in (3, 9, 12):
        (flat / "val" / FILE.format(i)).write_bytes(b"")
    names = ["imagenet", "imagenet_real"]

    def work(folder: str) -> Callable[[int], Any]:
        return lambda rank: score(tmp_path / folder, names, flat, on_damaged="exclude", batch_size=batch_size)

    weights = tmp_path / "weights"
    alone = score(weights, names, flat, on_damaged="exclude")
    assert alone["imagenet"]["images"] == 17

    def without_checkpoint(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if k != "checkpoint"} for row in rows.values()]

    for world_size in (2, 3):
        folder = f"{world_size}"
        score(tmp_path / folder, "imagenet", flat, on_damaged="exclude")  # writes the weights
        for rows in ranks(world_size, work(folder)):
            assert isinstance(rows, dict), rows.message
            assert without_checkpoint(rows) == without_checkpoint(alone)
        for name in names:
            (ours,) = (weights / "out").glob(f"predictions_{name}_raw*.csv")
            (theirs,) = (tmp_path / folder / "out").glob(f"predictions_{name}_raw*.csv")
            said = [[line.split(",")[at] for line in path.read_text().split() for at in (0, 1, 2, 4, 5)]
                    for path in (ours, theirs)]  # fmt: skip
            assert said[0] == said[1]
            assert len(said[0]) > 5
