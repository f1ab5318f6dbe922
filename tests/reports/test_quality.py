"""The comparison of attention quality, and where else its figures stand: ablation table, card and page."""

import csv
import json
import os
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from infvit import report
from infvit.errors import UserError
from infvit.reports import formats
from infvit.reports.ablation import ablation_table
from infvit.reports.card import card_text
from infvit.reports.page import render
from infvit.reports.quality import write_quality
from infvit.reports.runs import find_runs, read_quality

Runs = Callable[..., Path]


def result(morf: float, **values: Any) -> dict[str, Any]:
    """What `eval=attention_quality` writes, with figures that tell the measures apart."""
    names = {"morf_aoc": morf, "lerf_auc": morf + 1, "roc_auc": morf + 2, "pr_auc": morf + 3,
             "random_aoc": 40.5, "random_auc": 59.5, "prevalence": 12.5, "energy": None}  # fmt: skip
    return {
        **names, **{f"{name}_sd": 5.5 for name in names}, "perturbation_images": 100, "localization_images": 90,
        "mechanism": "infsa_linear", "map": "weights", "layer": "blocks.3.attn", "data": "digit_scenes",
        "weights": "raw",
        "curves": {"removed": [0, 100], **{key: [1, morf / 100] for key in ("morf", "lerf", "random")}}, **values,
    }  # fmt: skip


def write(folder: Path, name: str, content: dict[str, Any], seconds: float = 0) -> None:
    path = folder / f"eval_attention_quality_{name}.json"
    path.write_text(json.dumps(content))
    os.utime(path, (1e9 + seconds, 1e9 + seconds))


@pytest.fixture
def sweep(tmp_path: Path, run_folder: Runs) -> Path:
    """Two models with two seeds, a third whose attention was not looked at, and a model of timm's beside them."""
    folder = tmp_path / "sweep"
    for model, start in (("vit_mini", 40.0), ("infvit_linear_mini", 60.0)):
        for seed in (0, 1):
            path = folder / f"model-{model}_seed-{seed}"
            run_folder(path, [f"model={model}", f"seed={seed}", "epochs=2"], [50.0, 60.0], model=model)
            write(path, "raw", result(start + 3 * seed))
    run_folder(folder / "model-infvit_pure_mini_seed-0", ["model=infvit_pure_mini", "seed=0", "epochs=2"], [1.0, 2.0],
               model="infvit_pure_mini")  # fmt: skip
    (tmp_path / "timm-vit_tiny").mkdir()
    write(tmp_path / "timm-vit_tiny", "raw", result(70.0, mechanism="softmax", map="class_token", data="imagenet"))
    return folder


def test_the_comparison(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Means over seeds against those computed here, published figures and chance beside them, in every format."""
    out = tmp_path / "out"
    assert report.main([str(sweep), str(tmp_path / "timm-vit_tiny"), "--quality", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.strip() == (out / "quality.md").read_text().strip()
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    rows = {line[0]: line[1:] for line in lines}
    columns = rows[""]
    assert sorted(columns) == ["model=infvit_linear_mini", "model=vit_mini", "timm-vit_tiny"]

    def cell(row: str, column: str) -> str:
        return rows[row][columns.index(column)]

    spread = statistics.stdev([0, 3])
    assert (cell("top-1 (%)", "model=vit_mini"), cell("top-1 (%)", "timm-vit_tiny")) == ("60.00 ± 0.00", "-")
    assert cell("MoRF-AOC (%)", "model=vit_mini") == f"41.5 ± {spread:.1f}"
    assert cell("LeRF-AUC (%)", "model=infvit_linear_mini") == f"62.5 ± {spread:.1f}"
    assert cell("ROC-AUC (%)", "timm-vit_tiny") == "72.0"
    assert cell("PR-AUC (%)", "model=vit_mini") == f"44.5 ± {spread:.1f}"
    published = [line[1:] for line in lines if line[0] == "published"]
    of = [dict(zip(columns, line, strict=True)) for line in published]
    assert [line["model=infvit_linear_mini"] for line in of] == ["76.0", "64.9", "75.9", "76.1"]
    assert [line["model=vit_mini"] for line in of] == ["42.6", "-", "53.8", "56.2"]
    assert {line["timm-vit_tiny"] for line in of} == {"-"}
    assert cell("prevalence of positives", "timm-vit_tiny") == "12.5"
    assert cell("images, MoRF and LeRF", "model=vit_mini") == "100"
    assert cell("runs", "model=vit_mini") == "2"
    assert "so no comparison" in text
    with (out / "quality.csv").open() as file:
        table = {(row["setting"], row["metric"]): row for row in csv.DictReader(file)}
    assert float(table["model=vit_mini", "morf"]["mean"]) == 41.5
    assert float(table["model=vit_mini", "morf_chance"]["mean"]) == 40.5
    assert r"41.5 $\pm$ 2.1" in (out / "quality.tex").read_text()
    for name in ("quality.png", "quality_curves.png"):
        assert f"({name})" in text
        assert np.asarray(Image.open(out / name).convert("L")).std() > 10


def test_curves_of_several_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each model and what chance gives, the mean over seeds; what was not measured has no line."""
    figures = []
    monkeypatch.setattr(formats, "_save", lambda figure, path: figures.append(figure))
    both = {"removed": [0, 50, 100], "random": [1, 0.5, 0], "rate": [0, 1]}
    seeds = [
        {
            "curves": {**both, "morf": [1, 0.2, 0], "lerf": [1, 0.9, 0], "roc": [0, 1], "pr": [1, 0.3]},
            "prevalence": 10.0,
        },
        {
            "curves": {**both, "morf": [1, 0.4, 0], "lerf": [1, 0.7, 0], "roc": [0.5, 1], "pr": [1, 0.1]},
            "prevalence": 14.0,
        },
    ]
    other = {"curves": {"removed": [0, 50, 100], "random": [1, 0.4, 0], "morf": [1, 0.6, 0], "lerf": [1, 0.5, 0]}}
    formats.draw_curves({"a": seeds, "b": [other], "c": [{}]}, tmp_path / "x.png")
    panels = [[line.get_ydata().tolist() for line in axes.lines] for axes in figures[0].axes]
    assert panels[0] == [pytest.approx(y) for y in ([1, 0.3, 0], [1, 0.5, 0], [1, 0.6, 0], [1, 0.4, 0])]
    assert panels[1] == [pytest.approx(y) for y in ([1, 0.8, 0], [1, 0.5, 0], [1, 0.5, 0], [1, 0.4, 0])]
    assert panels[2] == [pytest.approx([0.25, 1]), [0, 1]]
    assert panels[3] == [pytest.approx([1, 0.2]), pytest.approx([0.12, 0.12])]
    band = figures[0].axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert np.abs(band - 0.3).min() == pytest.approx(0.1 * 2**0.5), "0.3 and one standard deviation to either side"
    assert [len(axes.collections) for axes in figures[0].axes] == [1, 1, 1, 1]


def test_what_was_not_measured_alike_is_named(tmp_path: Path) -> None:
    """Else an experiment with another fill would stand beside the others as if it were the same measure."""
    for name, values in {"a": {}, "b": {}, "c": {"fill": "black", "checkpoint": "/runs/c/best.pt"}}.items():
        (tmp_path / name).mkdir()
        same = {"fill": "mean", "heads": "mean", "images_sha1": "1", "checkpoint": f"/runs/{name}/last.pt"}
        write(tmp_path / name, "raw", result(40.0, **{**same, **values}))
    text = write_quality([tmp_path / "a", tmp_path / "b"], tmp_path / "out").read_text()
    assert "alike" not in text
    assert "Measured on last.pt." in text
    text = write_quality([tmp_path], tmp_path / "out").read_text()
    assert "**Not measured alike:** fill (mean: a, b; black: c)." in text
    assert "Measured on best.pt, last.pt." in text


@pytest.mark.parametrize(("file", "models"), [
    ("/runs/{}/last.pt", "/runs/a, /runs/b"), ("timm/{}", "timm/a, timm/b"),
])  # fmt: skip
def test_results_of_several_models_in_one_folder_are_not_one_column(file: str, models: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path, name, result(40.0, checkpoint=file.format(name)))
    with pytest.raises(UserError, match=rf"several models \({models}\); give each an `output` of its own"):
        write_quality([tmp_path], tmp_path / "out")


def test_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert report.main([str(tmp_path), "--quality", str(tmp_path / "out")]) == 1
    assert "no result of eval=attention_quality" in capsys.readouterr().err


def test_of_several_results_the_newest_of_raw_weights_counts(tmp_path: Path) -> None:
    assert read_quality(tmp_path) == {}
    write(tmp_path, "1", result(1.0), seconds=1)
    write(tmp_path, "3", result(3.0), seconds=2)
    write(tmp_path, "2", result(2.0, weights="ema"), seconds=3)
    assert read_quality(tmp_path)["morf_aoc"] == 3.0
    (tmp_path / "eval_attention_quality_3.json").unlink()
    (tmp_path / "eval_attention_quality_1.json").unlink()
    assert read_quality(tmp_path)["morf_aoc"] == 2.0


def test_the_ablation_table_has_what_was_measured(sweep: Path) -> None:
    """What was not is pending, no dash and no zero."""
    table = ablation_table(find_runs(sweep), "sweep")
    rows = {row.metric: dict(zip(table.columns, row.cells, strict=True)) for row in table.rows}
    assert rows["morf"]["model=vit_mini"].mean == 41.5
    assert rows["lerf"]["model=infvit_linear_mini"].mean == 62.5
    assert rows["roc"]["model=vit_mini"].count == 2
    assert rows["roc"]["model=infvit_pure_mini"].text == "pending"
    assert rows["train_ms"]["model=vit_mini"].text == "pending"


def test_the_card_and_the_page(sweep: Path, tmp_path: Path, run_folder: Runs) -> None:
    text = card_text(sweep / "model-vit_mini_seed-1")
    assert "| morf | 43.0 | 5.5 | 40.5 | - |" in text
    assert "| pr | 46.0 | 5.5 | 12.5 | - |" in text
    published = run_folder(tmp_path / "published", [], [80.0, 84.0], None, model="infvit_pure_4l", data="imagenet")
    write(published, "raw", result(50.0))
    assert "| morf | 50.0 | 5.5 | 40.5 | 71.7 |" in card_text(published)
    config = yaml.safe_load((published / "config.yaml").read_text())
    for part, key, value in (("model", "gamma", 0.3), ("data", "classes", "imagenet100")):
        other = {**config, part: {**config[part], key: value}}
        (published / "config.yaml").write_text(yaml.safe_dump(other))
        assert "| morf | 50.0 | 5.5 | 40.5 | - |" in card_text(published)
    page = render(find_runs(sweep))
    for column in ("MoRF", "LeRF", "ROC", "PR"):
        assert f"<button>{column}</button>" in page
    row = next(line for line in page.splitlines() if "model-vit_mini_seed-1" in line and "<tr" in line)
    for value in ("43.0", "44.0", "45.0", "46.0"):
        assert f">{value}</td>" in row
    assert page.count(">pending<") == 0
    compared = page[page.index("<h2>Attention quality</h2>") : page.index("<h2>Figures</h2>")]
    lines = [re.findall(r"<t[hd]>(.*?)</t[hd]>", line) for line in compared.splitlines() if line.startswith("<tr>")]
    columns = lines[0]
    assert sorted(columns) == ["", "model=infvit_linear_mini", "model=vit_mini"], "those that were measured"
    at = columns.index("model=infvit_linear_mini")
    assert (lines[2][0], lines[2][at]) == ("MoRF-AOC (%)", f"61.5 ± {statistics.stdev([0, 3]):.1f}")
    assert (lines[3][0], lines[3][at]) == ("published", "76.0")
    assert "so no comparison" in compared
    assert "<h2>Attention quality</h2>" not in render([run for run in find_runs(sweep) if not run.quality])
