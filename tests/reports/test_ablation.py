"""The ablation table of a sweep against means and deviations computed here, in every format."""

import csv
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from infvit import report
from infvit.engine.status import add_jobs
from infvit.reports.ablation import ablation_table, settings_of, write_ablation
from infvit.reports.published import ABLATION, AGF, IMAGENET
from infvit.reports.runs import find_runs, read_run

ROOT = Path(__file__).resolve().parents[2]
SCORES = {"0.3": [97.5, 96.9, 97.2], "0.7": [98.0, 98.6]}


@pytest.fixture
def sweep(tmp_path: Path, run_folder: Callable[..., Path]) -> Path:
    """0.3 with three seeds, 0.7 with two and a failed one, 0.5 running, 0.9 only planned; one seed typed twice."""
    folder = tmp_path / "ablation_gamma"
    planned = {}
    for gamma, scores in SCORES.items():
        for seed, score in enumerate(scores):
            typed = [f"model.gamma={gamma}", f"seed={seed}", "engine.device=cpu"]
            run_folder(folder / f"model.gamma-{gamma}_seed-{seed}", typed, [50.0, score])
    run_folder(folder / "model.gamma-0.3", ["model.gamma=0.3"], [50.0, 97.5])
    run_folder(folder / "model.gamma-0.7_seed-2", ["model.gamma=0.7", "seed=2"], [99.0], "failed", error="a|b broke")
    run_folder(folder / "model.gamma-0.5_seed-0", ["model.gamma=0.5", "seed=0"], [51.0], "running")
    planned[folder / "model.gamma-0.9_seed-0"] = ["model.gamma=0.9", "seed=0"]
    add_jobs(folder, planned)
    return folder


def cells(markdown: str) -> dict[str, list[list[str]]]:
    """Returns the rows of the Markdown table by their first cell."""
    rows: dict[str, list[list[str]]] = {}
    for line in markdown.splitlines():
        if line.startswith("| "):
            first, *rest = (cell.strip() for cell in line.strip("|").split(" | "))
            rows.setdefault(first.strip("| "), []).append([cell.strip(" |") for cell in rest])
    return rows


def test_the_table(sweep: Path) -> None:
    """A setting with numbers, one with a failed seed, one that runs, one that never began; what is to come is said."""
    rows = cells(write_ablation(sweep).read_text())
    labels = [f"model.gamma={gamma}" for gamma in (0.3, 0.5, 0.7, 0.9)]
    assert rows[""] == [labels]
    shown = [f"{statistics.mean(s):.2f} ± {np.std(s, ddof=1):.2f}" for s in SCORES.values()]
    assert rows["top-1 (%)"] == [[shown[0], "running", shown[1], "missing"]]
    assert rows["published"][0] == ["84.2", "84.3", "84.7", "83.5"]
    assert rows["published"][1:] == [
        ["72.5", "74.7", "76.0", "75.8"], ["62.1", "63.4", "64.9", "65.3"], ["75.1", "75.4", "76.0", "76.2"],
        ["36", "35", "36", "37"], ["11", "12", "11", "12"],
    ]  # fmt: skip
    for label in ("MoRF-AOC (%)", "LeRF-AUC (%)", "ROC-AUC (%)", "latency, training (ms)", "latency, inference (ms)"):
        assert rows[label] == [["pending"] * 4]
    assert rows["runs"] == [["3 done", "1 running", "2 done, 1 failed", "1 missing"]]
    text = (sweep / "report.md").read_text()
    assert "so no comparison" in text
    assert "model.gamma-0.7_seed-2: a\\|b broke" in text


def test_csv_has_all_digits(sweep: Path) -> None:
    write_ablation(sweep)
    with open(sweep / "report.csv", newline="") as file:
        lines = {(line["setting"], line["metric"]): line for line in csv.DictReader(file)}
    line = lines["model.gamma=0.3", "top1"]
    assert float(line["mean"]) == pytest.approx(np.mean(SCORES["0.3"]), abs=1e-12)
    assert float(line["sd"]) == pytest.approx(np.std(SCORES["0.3"], ddof=1), abs=1e-12)
    assert line["count"] == "3"
    assert lines["model.gamma=0.9", "top1"]["text"] == "missing"
    assert lines["model.gamma=0.7", "top1"]["runs"] == "2 done, 1 failed"
    assert lines["model.gamma=0.5", "top1_published"]["mean"] == "84.3"


def test_latex_is_balanced_and_escaped(sweep: Path) -> None:
    write_ablation(sweep)
    text = (sweep / "report.tex").read_text()
    rows = [line for line in text.splitlines() if line.endswith("\\\\")]
    assert len(rows) == len([line for line in (sweep / "report.md").read_text().splitlines() if line[:2] == "| "])
    assert {line.count(" & ") for line in rows} == {4}
    assert "\\begin{tabular}{lcccc}" in text
    assert text.rstrip().endswith("\\end{tabular}")
    assert "97.20 $\\pm$ 0.30" in text
    code = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    assert not re.search(r"(?<!\\)[%_#]", code)


def test_the_figure_shows_the_numbers(sweep: Path, tmp_path: Path, run_folder: Callable[..., Path]) -> None:
    write_ablation(sweep)
    before = np.asarray(Image.open(sweep / "report.png").convert("RGB"))
    blue = (before[..., 2].astype(int) - before[..., 0] > 60).sum()
    assert blue > 100, "points and their axis"
    run_folder(sweep / "model.gamma-0.9_seed-0", ["model.gamma=0.9", "seed=0"], [50.0, 90.0])
    write_ablation(sweep)
    after = np.asarray(Image.open(sweep / "report.png").convert("RGB"))
    assert before.shape != after.shape or (before != after).any()


def test_seeds_of_one_setting_come_together_whatever_else_was_typed(sweep: Path) -> None:
    settings = {setting.label: setting for setting in settings_of(find_runs(sweep))}
    assert [run.seed for run in settings["model.gamma=0.3"].runs] == [0, 1, 2]
    assert settings["model.gamma=0.7"].scores("top1") == SCORES["0.7"]


def test_published_figures_are_comparable_only_with_the_same(tmp_path: Path, run_folder: Callable[..., Path]) -> None:
    run_folder(tmp_path / "a", ["model.activation=gelu"], [1.0, 2.0], model="infvit_linear_4l", data="imagenet")
    table = ablation_table(find_runs(tmp_path), "t")
    assert "no comparison" not in table.note
    rows = {row.metric: row for row in table.rows}
    assert rows["top1_published"].cells[0].mean == 83.5
    assert rows["top1"].cells[0].show(2) == "2.00", "one seed has no deviation"


def test_an_unpublished_setting_has_no_published_figure(tmp_path: Path, run_folder: Callable[..., Path]) -> None:
    for model in ("vit_mini", "infvit_pure_mini"):
        run_folder(tmp_path / model, [f"model={model}"], [1.0, 2.0], model=model)
    table = ablation_table(find_runs(tmp_path), "t")
    assert "Published" not in table.note
    assert table.columns == ("model=infvit_pure_mini", "model=vit_mini")
    assert not [row for row in table.rows if row.metric.endswith("published")]


def test_published_figures_of_models_stand_beside_the_same_models(
    tmp_path: Path, run_folder: Callable[..., Path]
) -> None:
    for model in ("deit_small_patch16_224", "deit_small_agf", "infvit_pure_4l", "infvit_linear_mini"):
        run_folder(tmp_path / model, [f"model={model}"], [1.0, 2.0], model=model, data="imagenet")
    table = ablation_table(find_runs(tmp_path), "t")
    rows = {row.metric: dict(zip(table.columns, row.cells, strict=True)) for row in table.rows}
    assert {label: cell.mean for label, cell in rows["top1_published"].items()} == {
        "model=deit_small_patch16_224": 79.8, "model=deit_small_agf": 80.3, "model=infvit_pure_4l": 85.1,
        "model=infvit_linear_mini": None,
    }  # fmt: skip
    assert "Published: arXiv 2505.08516, arXiv 2603.00175." in table.note
    assert "no comparison" not in table.note


def test_an_ablation_of_agf_names_what_is_published(tmp_path: Path, run_folder: Callable[..., Path]) -> None:
    for order in (3, 4):
        run_folder(tmp_path / str(order), [f"model.args.order={order}"], [1.0, 2.0], model="agf_mini")
    table = ablation_table(find_runs(tmp_path), "t")
    assert not [row for row in table.rows if row.metric.endswith("published")]
    assert "DeiT-S 79.8 %, with AGF 80.3 % on ImageNet-1K, 80.6 % and 81.3 % on ImageNet-100" in table.note


def test_the_three_ablations_of_agf_make_one_table(tmp_path: Path, run_folder: Callable[..., Path]) -> None:
    """The folder above the sweeps is given; seeds are taken together in each."""
    for key, values in (("order", (3, 10)), ("orthogonality", (0.0, 0.5)), ("form", ("uv", "filter"))):
        for value, seed in product(values, (1, 2)):
            overrides = [f"model.args.{key}={value}", f"seed={seed}"]
            run_folder(tmp_path / key / f"{value}-{seed}", overrides, [50.0, 60.0 + seed], model="agf_mini")
    rows = cells(write_ablation(tmp_path).read_text())
    assert [label.removeprefix("model.args.") for label in rows[""][0]] == [
        *("form=filter", "form=uv", "order=3", "order=10", "orthogonality=0.0", "orthogonality=0.5"),
    ]
    assert rows["top-1 (%)"] == [["61.50 ± 0.71"] * 6]


def test_published_figures_are_those_of_the_specification() -> None:
    """Typed a second time, from Table 4 and the list of results."""
    assert [ABLATION["model.gamma", g]["top1"] for g in ("0.3", "0.5", "0.7", "0.9")] == [84.2, 84.3, 84.7, 83.5]
    assert [ABLATION["model.gamma", g]["lerf"] for g in ("0.3", "0.5", "0.7", "0.9")] == [62.1, 63.4, 64.9, 65.3]
    kinds = ("relu", "gelu", "abs")
    for metric, figures in {"top1": [84.7, 83.5, 82.8], "morf": [76.0, 73.2, 75.0], "lerf": [64.0, 62.8, 65.5],
                            "roc": [76.6, 74.8, 77.2]}.items():  # fmt: skip
        assert [ABLATION["model.activation", kind][metric] for kind in kinds] == figures
    assert IMAGENET["infvit_pure_24l"] == (85.4, 79.8)
    assert list(AGF.values()) == [79.8, 80.3, 80.6, 81.3]


# Finding runs


def test_what_a_folder_holds(tmp_path: Path, sweep: Path, run_folder: Callable[..., Path]) -> None:
    """W&B's copies and what was moved aside are no runs; a run below two names is one."""
    run_folder(tmp_path / "single", [], [1.0, 2.0], None)
    run_folder(tmp_path / "stopped", [], [1.0], None)
    run_folder(tmp_path / "single" / "wandb" / "files", [], [1.0], None)
    run_folder(tmp_path / "single.old-20260101-000000", [], [1.0], None)
    found = {run.name: run for run in find_runs(tmp_path, tmp_path / "single")}
    assert len(found) == len(find_runs(tmp_path)) == 11
    assert (found["single"].state, found["stopped"].state) == ("done", "stopped")
    assert found["model.gamma-0.9_seed-0"].state == "missing"
    assert not {"files", "single.old-20260101-000000"} & found.keys()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", '{"epoch": 1, "top1": 98.0}\n{"epoch": 2, "to', "metrics.jsonl, line 2 is damaged"),
        ("metrics.jsonl", '{"epoch": 1, "top1": NaN}\n', "metrics.jsonl, line 1 is damaged"),
        ("metrics.jsonl", "", "is done, but metrics.jsonl is gone"),
        ("config.yaml", "a: [", "config.yaml is damaged"),
        ("status.json", "{nope", "status.json is damaged"),
        ("status.json", "[]", "status.json is damaged"),
    ],
)
def test_a_damaged_job_hides_neither_itself_nor_the_others(sweep: Path, name: str, content: str, message: str) -> None:
    job = sweep / "model.gamma-0.3_seed-1"
    add_jobs(sweep, {job: read_run(job).overrides})
    (job / name).write_text(content)
    table = ablation_table(find_runs(sweep), "sweep")
    place = next(i for i, label in enumerate(table.columns) if "0.3" in label)
    assert table.progress[place] == "2 done, 1 damaged"
    top1 = next(row for row in table.rows if row.metric == "top1")
    left = [SCORES["0.3"][0], SCORES["0.3"][2]]
    assert (top1.cells[place].mean, top1.cells[place].count) == (pytest.approx(statistics.mean(left)), 2)
    assert any(line.startswith("model.gamma-0.3_seed-1: ") and message in line for line in table.errors)


def test_a_run_is_over_after_its_last_update_too(tmp_path: Path, run_folder: Callable[..., Path]) -> None:
    folder = run_folder(tmp_path / "run", [], [1.0], None)
    assert read_run(folder).state == "stopped"
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("max_steps: null", "max_steps: 10"))
    assert read_run(folder).state == "done"


# The command


def test_the_command(sweep: Path, capsys: pytest.CaptureFixture) -> None:
    assert report.main([str(sweep)]) == 0
    out = capsys.readouterr().out
    assert "97.20 ± 0.30" in out
    assert str(sweep / "report.md") in out


@pytest.mark.slow
def test_what_nobody_reads_to_the_end(sweep: Path) -> None:
    """`python -m infvit.report SWEEP | head -1`: the report is written, and there is no traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "infvit.report", str(sweep)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=buffered)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    assert (sweep / "report.md").stat().st_size


@pytest.mark.parametrize(("name", "message"), [("no/such", "there is no folder"), ("", "there is no run in")])
def test_what_is_no_sweep_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture, name: str, message: str) -> None:
    assert report.main([str(tmp_path / name)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_columns_stand_in_the_order_of_their_numbers(tmp_path: Path, run_folder: Callable[..., Path]) -> None:
    values = ("-1", "1e-3", "0.02", "3", "10")
    for value in reversed(values):
        run_folder(tmp_path / f"x-{value}", [f"x={value}"], [50.0])
    assert [setting.label for setting in settings_of(find_runs(tmp_path))] == [f"x={value}" for value in values]
