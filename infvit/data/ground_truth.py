"""ImageNet's fixed facts: its classes, and the labels of its validation images where no class folder tells them."""

import csv
import pkgutil
from functools import cache
from pathlib import Path

from timm.data import ImageNetInfo, RealLabelsImagenet

from infvit.errors import DataError

DEVKIT = "ILSVRC2012_validation_ground_truth.txt"
KAGGLE = "LOC_val_solution.csv"
GROUND_TRUTH = f"{KAGGLE}, or {DEVKIT} and meta.mat of the devkit, beside or above them"
_PLACES = (".", "data", "ILSVRC2012_devkit_t12/data", "ILSVRC2012_devkit_t12")


@cache
def imagenet_classes(subset: str = "imagenet") -> tuple[str, ...]:
    """Returns the WordNet ids, in index order, of ImageNet-1K (`imagenet`), `imagenet_a` or `imagenet_r`."""
    if subset == "imagenet":
        return tuple(ImageNetInfo("imagenet-1k").label_names())
    listed = pkgutil.get_data("timm.data", f"_info/{subset}_synsets.txt")
    assert listed is not None  # it is in every version of timm that we allow
    return tuple(listed.decode().split())


@cache
def real_labels() -> dict[str, list[int]]:
    """Returns the reassessed labels (ReaL) of the 50,000 validation images by file stem; some have none."""
    labels: dict[str, list[int]] = RealLabelsImagenet(range(50_000)).real_labels
    return {Path(name).stem: indices for name, indices in labels.items()}


def ground_truth(images: Path) -> dict[str, str] | None:
    """Finds and reads the labels of the validation images.

    Args:
        images: Folder or tar file with the images. Kaggle's `LOC_val_solution.csv`, or the devkit's two files (also
            below `ILSVRC2012_devkit_t12/`), lie in it or in one of the four folders above.

    Returns:
        WordNet ids by file stem; None where there is no such file.

    Raises:
        DataError: A file is there that cannot be read as what its name says.
    """
    folders = ([images] if images.is_dir() else []) + list(images.resolve().parents)[:4]
    for folder in (folder / place for folder in folders for place in _PLACES):
        if (folder / KAGGLE).is_file():
            return _kaggle(folder / KAGGLE)
        if (folder / DEVKIT).is_file():
            return _devkit(folder / DEVKIT, folder / "meta.mat")
    return None


def _kaggle(path: Path) -> dict[str, str]:
    """Reads rows `ILSVRC2012_val_00048981,n03995372 85 1 499 272 ...`: the first word is the label."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    known = set(imagenet_classes())
    labels = {row.get("ImageId") or "": (row.get("PredictionString") or "-").split()[0] for row in rows}
    wrong = [name for name, label in labels.items() if label not in known]
    if wrong or not labels:
        raise DataError(f"{path} has no WordNet id of ImageNet for {wrong[:1] or 'any image'}; fetch it again.")
    return labels


def _devkit(path: Path, meta: Path) -> dict[str, str]:
    """Reads a number from 1 to 1000 per image; they are those of `meta.mat`, not the usual class indices."""
    from scipy.io import loadmat

    if not meta.is_file():
        raise DataError(f"{path} has no meta.mat beside it, without which its numbers mean nothing; copy it there.")
    try:
        synsets = loadmat(str(meta), squeeze_me=True)["synsets"]
        wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets if int(row["num_children"]) == 0}
        numbers = [int(line) for line in path.read_text().split()]
        labels = {f"ILSVRC2012_val_{i:08d}": wnids[number] for i, number in enumerate(numbers, 1)}
    except Exception as error:  # on damaged bytes SciPy raises nearly anything
        raise DataError(f"{path} and {meta} do not fit together or are damaged ({error}); fetch both again.") from error
    if set(wnids.values()) - set(imagenet_classes()):
        raise DataError(f"{meta} names classes that ImageNet-1K does not have; take it from ILSVRC2012_devkit_t12.")
    return labels
