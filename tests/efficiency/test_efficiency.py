"""`eval=efficiency`: what is asked of the machine, what of the answers becomes a ratio, and what the user reads."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from efficiency_doubles import MODELS, Machine, cells_of, measure, row_of

from infvit import report
from infvit.config import (
    DataConfig,
    EfficiencyConfig,
    EngineConfig,
    EvalConfig,
    ModelConfig,
    RecipeConfig,
    TrainConfig,
)
from infvit.engine import train
from infvit.engine.processes import Processes
from infvit.errors import ConfigError, UserError
from infvit.evaluation.efficiency import run, subject
from infvit.evaluation.efficiency.cells import Cell, Task
from infvit.evaluation.efficiency.cost import cost
from infvit.reports.ablation import write_ablation
from infvit.reports.efficiency import write_efficiency
from infvit.reports.runs import find_runs

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("growth")


# What is asked


def test_memory_alone_latency_together_checks_at_batch_1(tmp_path: Path, machine: Machine) -> None:
    measure(tmp_path, machine, sizes=(32, 64), modes=["inference", "training"], batch_sizes=[2])
    asked = [(task.kind, [cell.model for cell in task.cells]) for task in machine.asked]
    group = [*(("memory", [model]) for model in MODELS), ("latency", MODELS), ("check", MODELS)]
    assert asked == group * 4
    assert {task.cells[0].batch for task in machine.asked if task.kind == "check"} == {1}
    assert {task.cells[0].batch for task in machine.asked if task.kind != "check"} == {2}


def test_a_fresh_process_for_each_size_of_the_search(tmp_path: Path, machine: Machine) -> None:
    machine.failures = {("memory", "vit_mini", size): "out of memory" for size in range(96, 999)}
    result = measure(tmp_path, machine, highest=256, highest_step=32)
    sizes = [t.cells[0].resolution for t in machine.asked[5:] if t.cells[0].model == "vit_mini"]
    assert sizes == [32, 64, 128, 96]
    assert all(len(task.cells) == 1 for task in machine.asked[5:])
    found = {h["model"]: (h["resolution"], h["reason"]) for h in result["highest"]}
    assert found["vit_mini"] == (64, "out of memory at 96 px")
    assert found["infvit_linear_mini"] == (256, "efficiency.highest=256")


# What becomes of the answers


def test_numbers_of_a_row(tmp_path: Path, machine: Machine) -> None:
    machine.milliseconds = lambda cell: {"vit_mini": 40.0, "infvit_pure_mini": 80.0, "infvit_linear_mini": 10.0}[
        cell.model
    ]
    result = measure(tmp_path, machine, batch_sizes=[4], modes=["inference", "training"], baselines=MODELS[:2])
    row = row_of(result, "infvit_linear_mini", mode="inference")
    assert (row["images_per_s"], row["tokens"], row["memory_mib"]) == (400.0, 65, 4.0)
    assert row["speedup"] == {"vit_mini": 4.0, "infvit_pure_mini": 8.0}
    assert (row["energy_j"], row["energy_source"]) == (0.75, "counter")
    assert row["papers_convention_j"] == pytest.approx(0.010 * 200 / 4)
    assert row_of(result, "vit_mini", mode="training")["papers_convention_j"] == pytest.approx(0.040 * 300 / 4)
    assert row_of(result, "vit_mini", mode="training")["speedup"]["infvit_pure_mini"] == 2.0
    assert result["complexity"] == dict(zip(MODELS, ["quadratic", "quadratic", "linear"], strict=True))
    assert json.loads((tmp_path / "efficiency.json").read_text()) == result


def test_energy_that_was_not_measured_is_null(tmp_path: Path, machine: Machine) -> None:
    machine.energy = {"joules": None, "source": "unavailable", "reason": "no counter"}
    result = measure(tmp_path, machine)
    row = row_of(result, "vit_mini")
    assert (row["energy_j"], row["energy_source"], row["energy_reason"]) == (None, "unavailable", "no counter")
    assert row["images_per_s"] == 100.0
    text = (tmp_path / "efficiency.md").read_text()
    assert "Energy was not measured: no counter." in text
    assert cells_of(text, "vit_mini")[-2:] == ["-", "2.00"]


def test_out_of_memory_is_a_cell_and_not_an_error(tmp_path: Path, machine: Machine) -> None:
    machine.failures = {("memory", "vit_mini", 64): "out of memory"}
    result = measure(tmp_path, machine, sizes=(32, 64))
    assert row_of(result, "vit_mini", resolution=32)["failed"] is None
    lost = row_of(result, "vit_mini", resolution=64)
    assert (lost["failed"], lost["latency"], lost["images_per_s"], lost["memory_mib"]) == ("out of memory",) + (
        None,
    ) * 3
    assert lost["speedup"] == {"vit_mini": "out of memory"}
    assert row_of(result, "infvit_linear_mini", resolution=64)["speedup"] == {"vit_mini": "vit_mini: out of memory"}
    assert row_of(result, "infvit_linear_mini", resolution=64)["latency"] is not None
    timed = [task for task in machine.asked if task.kind == "latency"]
    assert [cell.model for cell in timed[1].cells] == MODELS[1:]


def test_models_that_do_not_fit_together(tmp_path: Path, machine: Machine) -> None:
    machine.failures = {("latency", "vit_mini", 32): "out of memory"}
    result = measure(tmp_path, machine)
    row = row_of(result, "infvit_linear_mini")
    assert row["failed"] == "out of memory with all models in one process"
    assert (row["memory_mib"], row["images_per_s"]) == (4.0, None)
    assert isinstance(row["speedup"]["vit_mini"], str)


def test_a_wrong_mechanism_gets_no_ratio_and_the_command_fails(tmp_path: Path, machine: Machine) -> None:
    machine.checks = {"infvit_pure_mini": {"state": "wrong", "error": 0.7, "tolerance": 1e-4, "tokens": 65}}
    with pytest.raises(UserError, match=r"wrong result against the reference: infvit_pure_mini; see check in .*json"):
        measure(tmp_path, machine)
    result = json.loads((tmp_path / "efficiency.json").read_text())
    assert row_of(result, "infvit_pure_mini")["speedup"] == {"vit_mini": "wrong result"}
    assert row_of(result, "infvit_pure_mini")["check"]["error"] == 0.7
    assert row_of(result, "infvit_linear_mini")["speedup"] == {"vit_mini": 1.0}
    assert "wrong result" in cells_of((tmp_path / "efficiency.md").read_text(), "infvit_pure_mini")


@pytest.mark.parametrize(
    ("check", "shown"),
    [
        ({"state": "wrong", "error": None, "tokens": 65}, "wrong result: vit_mini"),
        ({"state": "unchecked", "reason": "too long"}, "unchecked: vit_mini"),
        ({"state": "no reference", "tokens": None}, 1.0),
    ],
)
def test_a_baseline_must_be_right_too(tmp_path: Path, machine: Machine, check: dict, shown: Any) -> None:
    machine.checks = {"vit_mini": check}
    try:
        measure(tmp_path, machine)
    except UserError:
        assert check["state"] == "wrong"
    result = json.loads((tmp_path / "efficiency.json").read_text())
    assert row_of(result, "infvit_linear_mini")["speedup"]["vit_mini"] == shown


def test_a_compiled_model_that_differs_is_wrong(tmp_path: Path, machine: Machine) -> None:
    def compiled(task: Task) -> dict[str, Any]:
        answer = machine(task)
        for cell, found in zip(task.cells, answer.get("cells", []), strict=False):
            if task.kind == "latency" and cell.model == "infvit_pure_mini":
                found["compiled"] = {"state": "wrong", "error": 0.4, "tolerance": 1e-4, "tokens": None, "reason": None}
        return answer

    with pytest.raises(UserError, match="infvit_pure_mini"):
        measure(tmp_path, compiled, compile=True)
    row = row_of(json.loads((tmp_path / "efficiency.json").read_text()), "infvit_pure_mini")
    assert "compiled model differs" in row["check"]["reason"]
    assert row["speedup"]["vit_mini"] == "wrong result"
    text = (tmp_path / "efficiency.md").read_text()
    assert "| first call (ms) | x vit_mini |" in text
    assert cells_of(text, "vit_mini")[7] == "50.0"


def test_a_check_at_fewer_tokens_is_marked(tmp_path: Path, machine: Machine) -> None:
    machine.checks = {"vit_mini": {"state": "right", "error": 0.0, "tolerance": 1e-4, "tokens": 64}}
    measure(tmp_path, machine)
    text = (tmp_path / "efficiency.md").read_text()
    assert "1.00*" in cells_of(text, "vit_mini")


# Files


@pytest.mark.slow
def test_tables_figures_and_redrawing(tmp_path: Path, machine: Machine) -> None:
    machine.milliseconds = lambda cell: cell.resolution / 10 if "linear" in cell.model else cell.resolution**2 / 100
    models = ["vit_mini", "infvit_linear_mini"]
    measure(tmp_path, machine, models, (32, 64, 128), modes=["inference", "training"], highest=128)
    figures = {"dashboard.png", "throughput_energy.png", "latency_resolution.png", "memory_tokens.png"}
    text = write_efficiency(tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == figures == set(re.findall(r"\]\((.*)\)", text))
    assert (tmp_path / "efficiency.md").read_text() == text
    growth = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in
              text.split("## Growth")[1].split("##")[0].splitlines() if line.startswith("| ")}  # fmt: skip
    # latency is proportional to the side (the square of it), tokens to its square
    assert growth["vit_mini"][-2:] == ["1.0", "0.50"]
    assert growth["infvit_linear_mini"][-2:] == ["0.50", "0.50"]
    assert "58.16" in text.split("## Published")[1]
    assert "58.16" not in text.split("## Published")[0]
    with (tmp_path / "efficiency.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert float(rows[0]["median_ms"]) == 10.24
    assert float(rows[1]["images_per_s_over_vit_mini"]) == pytest.approx(3.2)
    for path in [*tmp_path.glob("*.png"), tmp_path / "efficiency.md"]:
        path.unlink()
    assert report.main([str(tmp_path)]) == 0
    assert (tmp_path / "efficiency.md").read_text() == text
    assert {path.name for path in tmp_path.glob("*.png")} == figures


def test_several_runs_as_one(tmp_path: Path, machine: Machine) -> None:
    machine.milliseconds = lambda cell: cell.resolution / (10 if "linear" in cell.model else 5)
    first, second, joined = (tmp_path / name for name in "abc")
    models = ["vit_mini", "infvit_linear_mini"]
    measure(first, machine, models, (32, 64), highest=64)
    measure(second, machine, models, (64,), modes=["training"], baselines=["infvit_linear_mini"])
    assert report.main([str(first), str(second), "--efficiency", str(joined)]) == 0
    result = json.loads((joined / "efficiency.json").read_text())
    parts = [json.loads((one / "efficiency.json").read_text()) for one in (first, second)]
    assert [r["latency"] for r in result["rows"]] == [r["latency"] for one in parts for r in one["rows"]]
    assert result["highest"] == parts[0]["highest"]
    assert row_of(result, "infvit_linear_mini", resolution=64, mode="inference")["speedup"] == {
        "vit_mini": 2.0, "infvit_linear_mini": "not in its run"}  # fmt: skip
    assert row_of(result, "vit_mini", mode="training")["speedup"] == {
        "vit_mini": "not in its run", "infvit_linear_mini": 0.5}  # fmt: skip
    assert "not in its run" in (joined / "efficiency.md").read_text()
    assert {"dashboard.png", "latency_resolution.png"} <= {path.name for path in joined.glob("*.png")}


def test_runs_that_cannot_be_joined(tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    measure(first, machine)
    measure(second, machine)
    command = [str(first), str(second), "--efficiency", str(tmp_path / "c")]
    assert report.main(command) == 1
    assert f"more than one of these runs: {MODELS[0]}, model, inference, 32, 1" in capsys.readouterr().err
    result = json.loads((second / "efficiency.json").read_text())
    result["machine"]["torch"] = "2.9.0"
    (second / "efficiency.json").write_text(json.dumps(result))
    assert report.main(command) == 1
    assert f"2.9.0 ({second})" in capsys.readouterr().err
    (second / "efficiency.json").unlink()
    assert report.main(command) == 1
    assert f"no efficiency.json of eval=efficiency in {second}" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_depth_needs_both_depths(tmp_path: Path, machine: Machine) -> None:
    measure(tmp_path, machine, ["vit_mini", "infvit_linear_mini"])
    text = (tmp_path / "efficiency.json").read_text()
    for other, drawn in (("infvit_linear_24l", True), ("infvit_pure_24l", False)):
        renamed = text.replace("infvit_linear_mini", "infvit_linear_4l").replace("vit_mini", other)
        (tmp_path / "efficiency.json").write_text(renamed)
        assert ("depth.png" in write_efficiency(tmp_path)) is drawn
        assert (tmp_path / "depth.png").exists() is drawn  # that of another result would be a lie


# Runs


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one update each that differ in gamma; 7 classes, 16 px, grey images."""
    folder = tmp_path_factory.mktemp("sweep")
    for gamma in (0.3, 0.7):
        args = {"depth": 1, "embed_dim": 24, "num_heads": 2}
        config = TrainConfig(
            ModelConfig("infvit_linear_mini", gamma=gamma, args=args),
            DataConfig("digits", img_size=16, num_workers=0),
            RecipeConfig(warmup_epochs=0),
            EngineConfig(device="cpu"),
            epochs=1,
            max_steps=1,
            batch_size=16,
            run_dir=str(folder / f"model.gamma-{gamma}"),
        )
        train(config)
    return folder


def test_a_sweep_stands_for_its_runs(tmp_path: Path, machine: Machine, sweep: Path) -> None:
    """What is built is the run's model, without its weights; the table of the sweep then has the latencies."""
    runs = [str(sweep / f"model.gamma-{gamma}") for gamma in (0.3, 0.7)]
    plain = subject.create(Cell(runs[0], "training", 16))
    assert (len(plain.blocks), plain.embed_dim, plain.head.out_features) == (1, 24, 10)
    assert subject.create(Cell(runs[0], "training", 32)).patch_embed.num_patches == 4 * plain.patch_embed.num_patches
    decays = [float(subject.create(Cell(one, "inference", 16)).blocks[0].attn.core.decay().detach()) for one in runs]
    assert decays == pytest.approx([0.3, 0.7])
    machine.milliseconds = lambda cell: 10 * (3 if "0.3" in cell.model else 4) + cell.resolution + (cell.mode > "j")
    keys = {"modes": ["inference", "training"], "batch_sizes": [4, 2], "baselines": [runs[1]]}
    result = measure(sweep / "efficiency", machine, [str(sweep)], (32, 16), **keys)
    assert [row["model"] for row in result["rows"][:2]] == runs
    assert row_of(result, runs[0], mode="training", resolution=16, batch=2)["speedup"] == pytest.approx(
        {runs[1]: 57 / 47}
    )
    seen = {Path(view.folder).name: (view.last("train_ms"), view.last("infer_ms")) for view in find_runs(sweep)}
    assert seen == {"model.gamma-0.3": (47, 46), "model.gamma-0.7": (57, 56)}
    text = write_ablation(sweep).read_text()
    line = next(line for line in text.splitlines() if "latency, training (ms)" in line)
    assert line.replace(" ", "") == "|latency,training(ms)|47.0|57.0|"
    assert "float32, 16 px, batch 2." in text


def test_a_run_is_measured(sweep: Path) -> None:
    """In the worker itself, with grey images and its number of classes."""
    cell = Cell(str(sweep / "model.gamma-0.3"), "training", 16, 2)
    prepared = subject.prepare(cell, torch.device("cpu"), torch.float32)
    assert prepared.call() > 0
    assert cost(cell)["parameters"] == sum(p.numel() for p in prepared.model.parameters())


def test_a_folder_without_runs(tmp_path: Path, machine: Machine) -> None:
    with pytest.raises(ConfigError, match="neither a run nor a sweep"):
        measure(tmp_path / "out", machine, [str(tmp_path)])


# Mistakes


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"models": ["vit_mini"]}, r"needs resolutions=\[...\]"),
        ({"models": ["vit_mini"] * 2, "resolutions": [32]}, "names one twice"),
        ({"models": ["vit_mini"], "resolutions": [32], "checkpoint": "x"}, "leave out checkpoint"),
        ({"eval": "accuracy", "checkpoint": "x", "models": ["vit_mini"]}, "models=... is for eval=efficiency"),
        ({"models": ["vit_mini"], "resolutions": [32], "batch_size": 8}, r"efficiency.batch_sizes=\[8\]"),
        ({"models": ["vit_mini"], "resolutions": [0, 32]}, r"resolutions=\[0, 32\] must be at least 1 pixel"),
        (
            {"models": ["vit_mini"], "resolutions": [64], "efficiency": EfficiencyConfig(highest=32)},
            "below the smallest",
        ),
    ],
)
def test_keys_that_do_not_go_together(keys: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvalConfig(**{"eval": "efficiency", **keys})


@pytest.mark.parametrize(
    "keys",
    [{"modes": []}, {"modes": ["fast"]}, {"scopes": ["all"]}, {"batch_sizes": [0]}, {"rounds": 0}, {"warmup": -1},
     {"memory_limit_gib": 0.0}, {"worker_minutes": 0.0}, {"training_watts": -1.0}, {"batch_sizes": []},
     {"modes": ["training"] * 2}, {"scopes": ["model"] * 2}, {"batch_sizes": [2, 2]}, {"baselines": ["a", "a"]}],
)  # fmt: skip
def test_values_that_are_not_allowed(keys: dict) -> None:
    with pytest.raises(ConfigError, match=f"efficiency.{next(iter(keys))}"):
        EfficiencyConfig(**keys)


@pytest.mark.parametrize(
    ("models", "sizes", "keys", "message"),
    [
        (["vit_mini", "infvit_lienar_mini"], (32,), {}, "unknown model 'infvit_lienar_mini'. Did you mean"),
        (["runs/nowhere"], (32,), {}, "there is no folder runs/nowhere"),
        (["vit_mini"], (32, 33), {}, "img_size=33 is not divisible by the patch size 4"),
        (["vit_mini"], (32,), {"baselines": ["vit_4l"]}, "vit_4l is not among"),
        (["timm/test_resnet:unfused"], (64,), {}, "timm/test_resnet:unfused: test_resnet has no fused attention"),
        (["timm/test_vit"], (64,), {"scopes": ["attention"]}, "timm/test_vit has none of our attention layers"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(
    tmp_path: Path, machine: Machine, models: list[str], sizes: tuple[int, ...], keys: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        measure(tmp_path / "out", machine, models, sizes, **keys)
    assert machine.asked == []
    assert not (tmp_path / "out").exists()


def test_several_processes_are_refused(tmp_path: Path) -> None:
    config = EvalConfig(eval="efficiency", models=["vit_mini"], resolutions=[32], output=str(tmp_path))
    with pytest.raises(ConfigError, match="without torchrun"):
        run.efficiency(config, Processes(rank=0, world_size=2))
