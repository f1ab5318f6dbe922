"""Jobs of a sweep: their folders, what they say of themselves, and what a second command makes of them."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from joblib.externals.loky.process_executor import TerminatedWorkerError

from infvit import cli, engine
from infvit.engine import device
from infvit.engine.folder import own_folder
from infvit.engine.signals import Interrupted
from infvit.engine.status import LONGEST_NAME, Status, add_jobs, job_name, read_jobs, read_status, write_status
from infvit.reports.ablation import settings_of
from infvit.reports.runs import find_runs
from infvit.sweep import Sweep

TINY = ("+model.args.depth=1", "+model.args.embed_dim=24", "+model.args.num_heads=2", "data.img_size=16",
        "data.num_workers=0", "batch_size=32", "epochs=1", "max_steps=1", "engine.device=cpu")  # fmt: skip


def jobs(folder: Path) -> dict[str, str]:
    """Returns the state of every job by what its seed is."""
    files = folder.glob("*/status.json")
    return {file.parent.name.rpartition("_")[2]: json.loads(file.read_text())["state"] for file in files}


# Names


def test_names_hold_no_sign_that_hydra_or_a_shell_reads() -> None:
    typed = ["model=timm/resnet18", "data.root=/my data/a,b=(1)", "seed=-1", "+model.args.depth=2", "recipe.lr=1e-3"]
    name = job_name(typed)
    assert not set(name) & set("=, /()[]{}$'\"\\")
    for part in ("model-timm-resnet18", "seed--1", "model.args.depth-2", "recipe.lr-1e-3"):
        assert part in name.split("_"), name


def test_names_are_those_of_what_is_computed() -> None:
    assert job_name(["seed=1", "model=vit_mini"]) == job_name(["model=vit_mini", "seed=1"]) == "model-vit_mini_seed-1"
    same = ["engine.device=cpu", "logger=wandb", "debug=true", "data.num_workers=3", "fresh=true", "hydra.verbose=true"]
    assert job_name(["seed=1", *same]) == "seed-1"
    assert job_name(same) == "default"
    assert job_name(["experiment=ablation_gamma", "seed=1"], "ablation_gamma") == "seed-1"
    assert job_name(["experiment=other", "seed=1"], "ablation_gamma") == "experiment-other_seed-1"


def test_names_of_different_jobs_differ_also_where_signs_are_lost_or_it_is_long() -> None:
    roots = ["/a/b", "/a b", "/a,b", "/a=b", "a-b"]
    assert len({job_name([f"data.root={root}"]) for root in roots}) == len(roots)
    long = [job_name([f"data.root={'x' * 300}{end}"]) for end in "yz"]
    assert len(set(long)) == 2
    assert max(map(len, long)) == LONGEST_NAME


# What jobs say of themselves


def test_status_is_read_back_and_damage_is_no_status(tmp_path: Path) -> None:
    status = Status("failed", ["seed=1"], 1, "bad", ended="2026-01-01T00:00:00+0000")
    write_status(tmp_path / "job", status)
    assert read_status(tmp_path / "job") == status
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["status.json"]
    assert read_status(tmp_path) is None
    for text in ("", "[]", '{"state": "done"}'):
        (tmp_path / "job" / "status.json").write_text(text)
        assert read_status(tmp_path / "job") is None


def test_who_was_killed_could_not_say_so(tmp_path: Path) -> None:
    """On this machine it is seen; of another nobody knows."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    gone = Status("running", [], pid=process.pid)
    for status, state in ((gone, "preempted"), (replace(gone, pid=os.getpid()), "running"),
                          (replace(gone, host=socket.gethostname() + "x"), "running"),
                          (replace(gone, state="done"), "done")):  # fmt: skip
        write_status(tmp_path, status)
        found = read_status(tmp_path)
        assert found is not None
        assert found.state == state


def test_the_list_of_jobs_grows(tmp_path: Path) -> None:
    add_jobs(tmp_path / "s", {tmp_path / "s" / "a": ["seed=1"]})
    add_jobs(tmp_path / "s", {tmp_path / "s" / "b": ["seed=2"], tmp_path / "else": ["seed=3"]})
    assert read_jobs(tmp_path / "s") == {
        tmp_path / "s" / "a": ["seed=1"], tmp_path / "s" / "b": ["seed=2"], tmp_path / "else": ["seed=3"],
    }  # fmt: skip
    assert json.loads((tmp_path / "s" / "sweep.json").read_text())["jobs"]["../else"] == ["seed=3"]
    assert read_jobs(tmp_path) == {}


# Sweeps


@pytest.mark.slow
def test_a_failing_job_hides_no_other(command: Callable, tmp_path: Path) -> None:
    """Each has its folder, status, log and traceback; the table shows all; the exit code is not 0."""
    ended = command("-m", *TINY, "seed=1,-1,2")
    assert ended.code == 1
    folder = tmp_path / "runs" / "sweep"
    assert jobs(folder) == {"seed-1": "done", "seed--1": "failed", "seed-2": "done"}
    assert sorted(ended.table.values()) == ["done", "done", "failed"]
    assert "seed=-1 must be between 0 and 4294967295." in ended.out
    for file in folder.glob("*/status.json"):
        status, failed = json.loads(file.read_text()), file.parent.name.endswith("seed--1")
        assert f"seed={file.parent.name.rpartition('seed-')[2]}" in status["overrides"]
        assert status["exit_code"] == int(failed)
        assert (status["error"] == "seed=-1 must be between 0 and 4294967295.") == failed
        assert status["started"] <= status["ended"]
        assert (file.parent / "traceback.txt").exists() == failed
        if failed:
            assert "ConfigError: seed=-1 must be" in (file.parent / "traceback.txt").read_text()
        logged = status["error"] if failed else f"All of it in {file.parent.relative_to(tmp_path)}"
        assert logged in (file.parent / "train.log").read_text()
    report = (folder / "report.md").read_text()
    assert "2 done, 1 failed" in report
    assert {path.name for path in folder.glob("report.*")} == {"report.md", "report.csv", "report.tex", "report.png"}


def test_an_unforeseen_error_is_kept(command: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(config, after_epoch):
        raise KeyError("not foreseen")

    monkeypatch.setattr(engine, "train", fail)
    assert command("-m", *TINY, "seed=1").code == 1
    (text,) = [path.read_text() for path in tmp_path.glob("runs/sweep/*/traceback.txt")]
    assert "KeyError: 'not foreseen'" in text
    assert "in fail" in text


@pytest.mark.slow
def test_the_same_command_skips_what_is_done_and_goes_on_with_the_rest(
    command: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stopped in the second job, the third not begun; then all of it again, and once more with nothing left to do."""
    real, trained = engine.train, []

    def stop_at_two(config, after_epoch):
        trained.append(config.seed)
        if config.seed == 2 and trained.count(2) == 1:
            raise Interrupted(15, "saved")
        return real(config, after_epoch)

    monkeypatch.setattr(engine, "train", stop_at_two)
    ended = command("-m", *TINY, "seed=1,2,3")
    assert ended.code == 143
    assert jobs(tmp_path / "runs/sweep") == {"seed-1": "done", "seed-2": "preempted"}
    assert list(ended.table.values()) == ["done", "preempted", "not begun"]
    assert "1 done, 1 preempted, 1 missing" in (tmp_path / "runs/sweep/report.md").read_text()
    again = command("-m", *TINY, "seed=1,2,3", "engine.log_seconds=5")
    assert (again.code, trained) == (0, [1, 2, 2, 3])
    assert jobs(tmp_path / "runs/sweep") == {"seed-1": "done", "seed-2": "done", "seed-3": "done"}
    assert list(again.table.values()) == ["done"] * 3
    assert command("-m", *TINY, "seed=3,1,2").code == 0
    assert trained == [1, 2, 2, 3]
    assert command("-m", *TINY, "seed=1", "fresh=true").code == 0
    assert trained == [1, 2, 2, 3, 1]
    assert jobs(tmp_path / "runs/sweep")["seed-1"] == "done"


def test_a_job_is_done_only_with_its_own_configuration(command: Callable, tmp_path: Path) -> None:
    """What stands in the folder is of another configuration (a file of `configs/` was changed, say)."""
    assert command("-m", *TINY, "seed=1", "run_dir=here").code == 0
    ended = command("-m", *TINY, "seed=2", "run_dir=here")
    assert ended.code == 1
    assert "run_dir=here holds another run (seed: 1 -> 2)" in ended.err
    assert list(ended.table.values()) == ["failed"]
    assert command("-m", *TINY, "seed=1", "run_dir=here").code == 0
    assert json.loads((tmp_path / "here/status.json").read_text())["state"] == "done"


@pytest.mark.slow
def test_a_folder_in_use_keeps_the_status_of_its_owner(command: Callable, tmp_path: Path) -> None:
    """The lock is per process: the owner is another one."""
    assert command("-m", *TINY, "seed=1", "run_dir=here").code == 0
    code = (f"import sys; from pathlib import Path; from {own_folder.__module__} import own_folder\n"
            "with own_folder(Path('here'), False): print('mine', flush=True); sys.stdin.read()")  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(engine.__file__).parents[2])}
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                             env=environment, cwd=tmp_path)  # fmt: skip
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "mine\n"
        theirs = Status("running", ["seed=1"], pid=owner.pid)
        write_status(tmp_path / "here", theirs)
        ended = command("-m", *TINY, "seed=1", "run_dir=here")
        assert ended.code == 1
        assert f"run_dir=here is in use by process {owner.pid}" in ended.err
        assert read_status(tmp_path / "here") == theirs
    finally:
        owner.kill()
        owner.wait()


def test_the_status_of_a_run_that_starts_over_is_not_moved_aside(tmp_path: Path) -> None:
    write_status(tmp_path / "run", Status("running", ["seed=1"]))
    (tmp_path / "run" / "last.pt").touch()
    with own_folder(tmp_path / "run", fresh=True):
        assert read_status(tmp_path / "run") is not None
    (aside,) = tmp_path.glob("run.old-*")
    assert [path.name for path in aside.iterdir()] == ["last.pt"]


def test_the_exit_code_of_jobs_in_other_processes(tmp_path: Path) -> None:
    """All that is known of them is in their files."""
    paths = {name: tmp_path / name for name in ("done", "stopped", "failed", "killed", "never")}
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    for name, status in {"done": Status("done", [], 0), "stopped": Status("preempted", [], 143),
                         "failed": Status("failed", [], 1), "killed": Status("running", [], pid=process.pid),
                         }.items():  # fmt: skip
        write_status(paths[name], status)
    add_jobs(tmp_path, {path: [f"name={name}"] for name, path in paths.items()})
    assert Sweep(tmp_path, tuple(paths.values())).finish() == [143, 1, 1]


def test_a_killed_process_of_joblib_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """joblib then ends all of its processes."""
    monkeypatch.setattr(sys, "argv", ["train.py", "-m"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")

    def main() -> None:
        raise TerminatedWorkerError("A worker process managed by the executor was\nunexpectedly terminated.")

    with pytest.raises(SystemExit) as ended:
        cli.launch(main)
    assert ended.value.code == 1
    err = capsys.readouterr().err
    assert err.startswith("error: a job was killed")
    assert err.count("\n") == 1


def test_dry_runs_leave_nothing_and_single_runs_have_no_status(command: Callable, tmp_path: Path) -> None:
    assert command("-m", *TINY, "seed=1,2", "dry_run=true").code == 0
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"multirun.yaml"}
    assert command(*TINY).code == 0
    assert not list(tmp_path.rglob("status.json"))
    (folder,) = (path.parent for path in tmp_path.rglob("last.pt"))
    assert folder.parent == tmp_path / "runs"
    assert folder.name.startswith("infvit_linear_mini-digits-")


def test_folders_that_are_typed_are_those_of_the_jobs(command: Callable, tmp_path: Path) -> None:
    ended = command("-m", *TINY, "seed=1,-1", "run_dir=run_${seed}")
    assert ended.table == {"run_1": "done", "run_-1": "failed"}
    planned = read_jobs(tmp_path / "runs" / "sweep")
    assert {path.name for path in planned} == {path.parent.name for path in tmp_path.glob("*/status.json")}


def test_values_that_refer_to_others_are_written_as_typed(command: Callable, tmp_path: Path) -> None:
    """Else the jobs that are listed would not be those that run, and the seeds of one setting would be several."""
    ended = command("-m", *TINY, "seed=1,2", "max_steps='${seed}'")
    assert sorted(ended.table.values()) == ["done", "done"]
    sweep = tmp_path / "runs" / "sweep"
    assert {path.name for path in read_jobs(sweep)} == {path.parent.name for path in sweep.glob("*/status.json")}
    (setting,) = settings_of(find_runs(sweep))
    assert [run.config["max_steps"] for run in setting.runs] == [1, 2]


def test_a_name_that_is_wrong_leaves_no_jobs(command: Callable, tmp_path: Path) -> None:
    assert command("-m", *TINY, "model=vit_mini,vit_mimi").code == 1
    assert not list(tmp_path.rglob("sweep.json"))


@pytest.mark.slow
@pytest.mark.parametrize(("experiment", "key", "values"), [
    ("ablation_gamma", "gamma", [0.3, 0.5, 0.7, 0.9]), ("ablation_activation", "activation", ["relu", "gelu", "abs"]),
])  # fmt: skip
@pytest.mark.parametrize("multirun", [True, False])
def test_the_ablations(
    command: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, experiment: str, key: str, values: list,
    multirun: bool,
) -> None:  # fmt: skip
    """All settings, frozen, with and without -m; with seeds and on other data too."""
    seen = []
    monkeypatch.setattr(engine, "train", lambda config, after_epoch: seen.append(config))
    assert command(*(["-m"] if multirun else []), f"experiment={experiment}").code == 0
    assert [getattr(config.model, key) for config in seen] == values
    assert {config.model.gamma_trainable for config in seen} == {False}
    assert {(config.model.name, config.data.name) for config in seen} == {("infvit_linear_mini", "digits")}
    if key == "activation":
        assert {config.model.gamma for config in seen} == {0.7}
    names = {f"model.{key}-{value}" for value in values}
    assert {path.parent.name for path in (tmp_path / "runs" / experiment).glob("*/status.json")} == names
    assert {config.run_dir for config in seen} == {f"runs/{experiment}/{name}" for name in names}
    if multirun:
        seen.clear()
        large = ["model=infvit_linear_4l", "data=imagenet", "recipe=deit", "data.root=/x", "seed=0,1"]
        assert command("-m", f"experiment={experiment}", *large).code == 0
        assert [(getattr(config.model, key), config.seed) for config in seen] == [
            (v, seed) for v in values for seed in (0, 1)
        ]
        assert {(c.model.name, c.data.name, c.recipe.name, c.epochs) for c in seen} == {
            ("infvit_linear_4l", "imagenet", "deit", 300)
        }


# Nothing leaks


@pytest.mark.slow
def test_results_do_not_depend_on_the_order_of_jobs(command: Callable, tmp_path: Path) -> None:
    """Jobs with other models, seeds, dropout and switches, forwards, backwards and with one that fails between."""
    orders = {"a": "0.3,0.6,0.9", "b": "0.9,0.3,0.6", "c": "0.6,1.5,0.9,0.3"}
    more = ("max_steps=2", "recipe.drop=0.2", "recipe.mixup=0.8", "recipe.auto_augment=rand-m9-mstd0.5-inc1")
    results: dict[str, list] = {}
    for name, order in orders.items():
        ended = command("-m", *TINY, *more, f"model.gamma={order}", f"hydra.sweep.dir={name}")
        assert ended.code == ("1.5" in order)
        for folder in (file.parent for file in (tmp_path / name).glob("*/last.pt")):
            row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
            state = torch.load(folder / "last.pt", weights_only=True)["state_dict"]
            weights = b"".join(tensor.numpy().tobytes() for tensor in state.values())
            gamma = folder.name.split("model.gamma-")[1].split("_")[0]
            results.setdefault(gamma, []).append((row["train_loss"], row["loss"], row["ema_loss"], weights))
    for gamma in ("0.3", "0.6", "0.9"):
        assert len(results[gamma]) == 3
        assert results[gamma][0] == results[gamma][1] == results[gamma][2], gamma
    assert len({result[0][3] for result in results.values()}) == 3


def test_each_job_starts_with_the_memory_of_none(command: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it can be told without a GPU: the calls to torch, before each job."""
    calls: list[str] = []
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: True)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(device.torch.cuda, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(engine, "train", lambda config, after_epoch: calls.append(f"job {config.seed}"))
    assert command("-m", *TINY, "seed=1,2").code == 0
    memory = ["empty_cache", "reset_peak_memory_stats"]
    assert calls == [*memory, "job 1", *memory, "job 2"]
