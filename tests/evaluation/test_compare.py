"""Two runs on the same images: against SciPy, and refused where the images are not the same."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom, binomtest, bootstrap

from infvit.config import EvalConfig
from infvit.errors import ConfigError, DataError
from infvit.evaluation import evaluate
from infvit.evaluation.scoring import COLUMNS
from infvit.metrics import compare_hits, wilson_interval


@pytest.mark.parametrize(("hits", "images"), [(0, 10), (10, 10), (1, 1), (37_650, 50_000), (3, 7)])
def test_wilson(hits: int, images: int) -> None:
    """The closed form, and the property that defines it: at its ends the score test is just at its limit."""
    low, high = wilson_interval(hits, images)
    z, p = 1.959963984540054, hits / images
    centre, half = p + z * z / (2 * images), z * math.sqrt(p * (1 - p) / images + z * z / (4 * images**2))
    expected = [100 * (centre + sign * half) / (1 + z * z / images) for sign in (-1, 1)]
    assert (low, high) == pytest.approx(expected, abs=1e-9)
    for end in (low / 100, high / 100):
        if 1e-9 < end < 1 - 1e-9:
            assert abs(p - end) / math.sqrt(end * (1 - end) / images) == pytest.approx(z, rel=1e-6)


@pytest.mark.parametrize(("gained", "lost", "both", "neither"), [(30, 12, 500, 200), (0, 6, 10, 0), (5, 5, 0, 40)])
def test_differences(gained: int, lost: int, both: int, neither: int) -> None:
    first = np.repeat([False, True, True, False], [gained, lost, both, neither])
    second = np.repeat([True, False, True, False], [gained, lost, both, neither])
    result = compare_hits(first, second)
    n = gained + lost + both + neither
    assert (result.images, result.only_first, result.only_second) == (n, lost, gained)
    assert result.first == pytest.approx(100 * (lost + both) / n)
    assert result.second == pytest.approx(100 * (gained + both) / n)
    assert result.difference == pytest.approx(100 * (gained - lost) / n)
    tail = 2 * binom.cdf(min(gained, lost), gained + lost, 0.5)
    assert result.p_value == pytest.approx(min(1.0, tail))
    theirs = bootstrap(
        (first.astype(float), second.astype(float)), lambda a, b, axis: (b - a).mean(axis), paired=True,
        method="percentile", n_resamples=20_000, random_state=0,
    ).confidence_interval  # fmt: skip
    step = 100 / n
    assert result.low == pytest.approx(100 * theirs.low, abs=0.03 * (result.high - result.low) + step)
    assert result.high == pytest.approx(100 * theirs.high, abs=0.03 * (result.high - result.low) + step)
    assert result.low < result.difference < result.high


def test_equal_models() -> None:
    same = np.array([True, False, True])
    result = compare_hits(same, same)
    assert (result.difference, result.low, result.high, result.p_value) == (0.0, 0.0, 0.0, 1.0)


def write(path: Path, rows: list[tuple[str, str, int]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(COLUMNS)
        out.writerows([(image, label, "x", 0.5, hit, 1, "x|y") for image, label, hit in rows])
    return path


def compare(first: Path, second: Path, **keys: object) -> dict:
    return evaluate(EvalConfig(eval="compare", runs=[str(first), str(second)], **keys))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs, with the images in another order: 3 of 4 and 1 of 4 right, 0 of 1 and 1 of 1."""
    rows = [("a", "p", 1), ("b", "p", 1), ("c", "q", 1), ("d", "q", 0)]
    other = [("d", "q", 1), ("c", "q", 0), ("b", "p", 0), ("a", "p", 0)]
    write(tmp_path / "one/predictions_imagenet_v2_threshold_raw_224px_abc123.csv", rows)
    write(tmp_path / "two/predictions_imagenet_v2_threshold_ema_160px_def456.csv", other)
    write(tmp_path / "one/predictions_imagenet_raw_224px_abc123.csv", [("a", "p", 0)])
    write(tmp_path / "two/predictions_imagenet_raw_160px_def456.csv", [("a", "p", 1)])
    write(tmp_path / "two/predictions_imagenet_a_raw_160px_def456.csv", [("a", "p", 1)])
    return tmp_path / "one", tmp_path / "two"


def test_runs_by_folder(folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    results = compare(*folders, output=str(tmp_path / "out"))
    assert set(results) == {"imagenet", "imagenet_v2_threshold"}
    row = results["imagenet_v2_threshold"]
    assert (row["first"], row["second"], row["difference"]) == (75.0, 25.0, -50.0)
    assert (row["only_first"], row["only_second"], row["p_value"]) == (3, 1, 0.625)
    assert json.loads((tmp_path / "out/compare.json").read_text()) == results
    shown = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert shown["imagenet_v2_threshold"][1:5] == ["4", "75.00", "25.00", "-50.00"]
    assert shown["imagenet_v2_threshold"][-1] == "0.625"


def test_runs_by_file(folders: tuple[Path, Path]) -> None:
    one = folders[0] / "predictions_imagenet_raw_224px_abc123.csv"
    two = folders[1] / "predictions_imagenet_raw_160px_def456.csv"
    assert compare(one, two)["predictions"]["difference"] == 100.0
    with pytest.raises(DataError, match="name one file of them"):
        compare(one, folders[1])


def test_the_layout_of_the_same_images_does_not_matter(tmp_path: Path) -> None:
    """From class folders, and from a tar file; not where two images have one name."""
    one = write(tmp_path / "x.csv", [("n1/a.jpg", "p", 1), ("n2/b.jpg", "q", 0)])
    two = write(tmp_path / "y.csv", [("/data/val.tar/b.jpg", "q", 1), ("/data/val.tar/a.jpg", "p", 1)])
    row = compare(one, two)["predictions"]
    assert (row["images"], row["only_first"], row["only_second"]) == (2, 0, 1)
    two = write(tmp_path / "y.csv", [("n1/a.jpg", "p", 1), ("n3/b.jpg", "q", 0), ("n4/b.jpg", "q", 0)])
    with pytest.raises(DataError, match="not of the same images"):
        compare(one, two)


def test_other_images_or_labels_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    one = write(tmp_path / "x.csv", [("a", "p", 1), ("b", "p", 1)])
    for rows, message in (
        ([("a", "p", 1)], "not of the same images: 1 are in one of them only, e.g. 'b'"),
        ([("a", "p", 1), ("b", "q", 1)], "different labels for 'b': p, q"),
        ([], "holds no predictions"),
    ):
        with pytest.raises(DataError, match=message):
            compare(one, write(tmp_path / "y.csv", rows))
    (tmp_path / "y.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="is no file of predictions"):
        compare(one, tmp_path / "y.csv")
    write(folders[0] / "predictions_imagenet_raw_160px_zzzzzz.csv", [("a", "p", 1)])
    with pytest.raises(DataError, match="several predictions for imagenet "):
        compare(*folders)
    with pytest.raises(DataError, match="no predictions in"):
        compare(tmp_path / "out", tmp_path / "out")
    write(tmp_path / "three/predictions_x_raw_1px_a.csv", [("a", "p", 1)])
    with pytest.raises(DataError, match="no set in common"):
        compare(tmp_path / "three", folders[1])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"eval": "compare", "runs": ["a"]}, "needs two runs"),
        ({"eval": ["compare", "imagenet"], "runs": ["a", "b"]}, "eval=compare stands alone"),
        ({"eval": "accuracy", "checkpoint": "x", "runs": ["a", "b"]}, "runs=... is for eval=compare"),
        ({"eval": "accuracy", "checkpoint": "x", "on_damaged": "skip"}, "on_damaged='skip' must be one of"),
        ({"eval": [], "checkpoint": "x"}, "names nothing"),
    ],
)
def test_keys_that_do_not_go_together(keys: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvalConfig(**keys)


def test_predictions_of_the_runs_own_data(run: Path, tmp_path: Path) -> None:
    """`eval=accuracy` saves them too: raw and averaged weights of one run, compared."""
    scores = {}
    for weights in ("raw", "ema"):
        keys = {"checkpoint": str(run), "device": "cpu", "weights": weights, "output": str(tmp_path / weights)}
        scores[weights] = evaluate(EvalConfig(**keys))["accuracy"]
    row = compare(tmp_path / "raw", tmp_path / "ema")["accuracy"]
    assert row["images"] == 360
    assert (row["first"], row["second"]) == pytest.approx((scores["raw"]["top1"], scores["ema"]["top1"]))
    assert 0 < row["only_first"] + row["only_second"] < 360
    assert row["p_value"] == pytest.approx(binomtest(row["only_first"], row["only_first"] + row["only_second"]).pvalue)
