"""Sweeps through Hydra's submitit launcher: really, with submitit's local executor, and the script meant for Slurm."""

import contextlib
import json
import logging
import os
import pickle
import re
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import submitit
import torch
from cluster_processes import members, wait_for
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from submitit.auto.auto import AutoExecutor

from infvit import cli, cluster

ROOT = Path(__file__).resolve().parents[2]
LOCAL = ("-m", "hydra/launcher=submitit_local", "data.num_workers=0", "epochs=500")


def task_of(group: int, part: str, rank: int = 0) -> int:
    """Returns the process of a task of submitit, by a part of what it has said; 0 if there is none."""
    for pid in members(group):
        with contextlib.suppress(OSError):
            output = Path(f"/proc/{pid}/fd/2").resolve()
            if output.name.endswith(f"_{rank}_log.err") and part in output.read_text():
                return pid
    return 0


def stop(pid: int, signum: int) -> None:
    """Sends a signal to a task."""
    assert pid, "to 0 it would go to the tests themselves"
    os.kill(pid, signum)


@pytest.mark.slow
def test_jobs_are_reported_and_go_on(start: Callable, tmp_path: Path) -> None:
    """One that succeeds, one with an error, one that is stopped; the last again, as two processes that agree."""
    process = start(*LOCAL, "max_steps=1,0,5000", "run_dir=run_${max_steps}")

    def said() -> str:
        return (tmp_path / "stderr").read_text()

    log = tmp_path / "run_5000" / "metrics.jsonl"
    assert wait_for(log.exists), said()
    stop(task_of(process.pid, "folder  run_5000\n"), signal.SIGUSR2)
    assert process.wait(timeout=60) == 1, "the code of the first job that failed"
    lines = said().splitlines()
    for expected in (
        r"#0 max_steps=1: Held-out top-1 .* All of it in run_1",
        r"#1 max_steps=0: error: max_steps=0 must be at least 1.",
        r"#2 max_steps=5000: interrupted: stopped after update \d+ of 5000; saved in run_5000. .* \(SIGUSR2\)",
    ):
        assert sum(bool(re.fullmatch(expected, line)) for line in lines) == 1, said()
    assert "Traceback" not in said()
    saved = torch.load(tmp_path / "run_5000" / "last.pt", weights_only=True)["update"]
    assert f"stopped after update {saved} of" in said()
    recorded = json.loads((tmp_path / "run_5000" / "environment.json").read_text())["command"]
    assert recorded[:3] == ["train.py", *LOCAL[:2]]

    again = start(*LOCAL, "max_steps=5000", "run_dir=run_${max_steps}", "hydra.launcher.tasks_per_node=2")
    assert wait_for(lambda: task_of(again.pid, f"Found the state after update {saved} in run_5000") > 0), said()
    assert wait_for(lambda: task_of(again.pid, f"epoch {saved // 11 + 2}/500") > 0), said()
    stop(task_of(again.pid, "", rank=1), signal.SIGTERM)
    assert again.wait(timeout=60) == 143, said()
    assert re.fullmatch(r"#0: interrupted: stopped after update .* \(SIGTERM\)", said().splitlines()[-1])
    assert wait_for(lambda: not members(again.pid), 5)
    assert torch.load(tmp_path / "run_5000" / "last.pt", weights_only=True)["update"] > saved
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"sweep"}
    assert {".submitit", "multirun.yaml", "sweep.json"} <= {path.name for path in (tmp_path / "runs/sweep").iterdir()}


@pytest.mark.slow
def test_a_killed_job_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Its own line says where to look."""

    def job(overrides: list[str], sweep: str, number: int) -> JobReturn:
        print(f"{overrides[0]} was here", file=sys.stderr)
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return JobReturn(_return_value=number, status=JobStatus.COMPLETED)

    monkeypatch.setattr(submitit.Job, "_results_timeout_s", 0.1)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    codes: list[int] = []
    executor = cluster.ReportingExecutor(codes, tmp_path / "%j", cluster="local")
    executor.update_parameters(timeout_min=10)  # on a busy machine the import alone may take a minute
    ended = executor.map_array(job, [["seed=0"], ["seed=1"]], ["", ""], [0, 3])
    assert codes == [1, 3]
    assert [end.results()[0].return_value for end in ended] == codes
    said = capsys.readouterr().err
    assert "#0 seed=0: ended without a result; last it said 'seed=0 was here' (" in said
    assert "#3 seed=1: seed=1 was here (" in said


def test_a_task_ends_with_the_exit_code_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves it as its result; the record of the run shows what the user typed."""
    for name, value in {
        "EXECUTOR": "local",
        "FOLDER": str(tmp_path),
        "LOCAL_JOB_ID": "5",
        "LOCAL_GLOBALID": "1",
    }.items():
        monkeypatch.setenv(f"SUBMITIT_{name}", value)
    monkeypatch.setattr(sys, "argv", ["_submit.py"])
    monkeypatch.setattr(logging.getLogger("submitit"), "propagate", True)
    for code in (0, 1, 143):
        with pytest.raises(SystemExit) as ended:
            cluster.run_task(["train.py", "-m"], lambda: JobReturn(_return_value=code, status=JobStatus.COMPLETED))  # noqa: B023
        assert ended.value.code == code
        assert pickle.loads((tmp_path / "5_1_result.pkl").read_bytes()) == ("success", code)
        assert sys.argv == ["train.py", "-m"]


def launcher(*overrides: str) -> Any:
    """Composes what `python train.py -m` would, and returns Hydra's launcher."""
    cli.register_configs([])
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = compose("train", ["hydra.mode=MULTIRUN", *overrides], return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    context = HydraContext(config_loader=None, callbacks=None)
    return Plugins.instance().instantiate_launcher(hydra_context=context, task_function=lambda cfg: None, config=config)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """Returns the lines of the script that sbatch would be given."""
    monkeypatch.chdir(tmp_path)
    for name in ("srun", "sbatch"):  # by these submitit knows a cluster
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    texts: list[str] = []

    class Recorder(AutoExecutor):
        def map_array(self, fn: Any, *iterable: Any) -> list[Any]:
            texts.append(self._executor._make_submission_file_text("python -m job", "id"))
            return []

    monkeypatch.setattr(submitit, "AutoExecutor", Recorder)

    def build(*overrides: str) -> list[str]:
        launcher("hydra/launcher=slurm", *overrides).launch([["seed=1"]], 0)
        return texts.pop().splitlines()

    return build


def test_the_script_for_one_gpu(script: Callable[..., list[str]], tmp_path: Path) -> None:
    lines = script()
    for line in (
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=1",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --time=1440",
        "#SBATCH --signal=USR2@120",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={tmp_path}/runs/sweep/.submitit/%j/%j_0_log.out",
    ):
        assert line in lines, "\n".join(lines)
    assert not [line for line in lines if "partition" in line or "account" in line]
    srun = shlex.split(next(line for line in lines if line.startswith("srun ")))
    assert "--kill-on-bad-exit=1" in srun[: srun.index("python")]


def test_the_script_for_two_nodes(script: Callable[..., list[str]]) -> None:
    """One process for each of eight GPUs on each of two nodes, by the keys that docs/cluster.md names."""
    lines = script(
        "hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=8", "hydra.launcher.partition=gpu",
        "hydra.launcher.timeout_min=90", "hydra.launcher.signal_delay_s=300", "hydra.launcher.mem_gb=400",
    )  # fmt: skip
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --partition=gpu",
        "#SBATCH --time=90",
        "#SBATCH --mem=400GB",
        "#SBATCH --signal=USR2@300",
    ):
        assert line in lines, "\n".join(lines)


def test_what_sbatch_refuses_is_one_line(script: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    script()
    Path("sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: x' >&2\nexit 1\n")
    cluster.report_jobs([])
    with pytest.raises(cluster.UserError, match=r"could not be submitted: .*invalid partition specified: x") as caught:
        launcher("hydra/launcher=slurm").launch([["seed=1"]], 0)
    assert "\n" not in str(caught.value)


def test_what_distinguishes_jobs() -> None:
    jobs = [["model=a", "seed=1", "hydra.x=1", "epochs=3"], ["model=b", "seed=1", "epochs=3"]]
    assert cluster.differences(jobs) == ["model=a", "model=b"]
    assert cluster.differences([["seed=1"]]) == [""]


class Task:
    """What `ending` looks at of a task: whether its result is there, the result, and what it said."""

    def __init__(self, folder: Path, number: int, code: int | None, said: str) -> None:
        self.paths = submitit.core.utils.JobPaths(folder, "1", number)
        self.code, self.said = code, said
        if code is not None:
            self.paths.result_pickle.touch()

    def result(self) -> int:
        if self.code is None:
            raise submitit.core.utils.UncompletedJobError
        return self.code

    def stderr(self) -> str:
        return self.said


class Job(list[Task]):
    """A job of several tasks."""

    num_tasks = property(len)
    task = list.__getitem__


@pytest.mark.parametrize(
    ("tasks", "code", "words"),
    [
        ([(0, "log\nresult\n"), (0, "")], 0, "result"),
        ([(None, "killed"), (1, "error: bad\nwarning\n")], 1, "error: bad"),  # srun ended the first for the second
        ([(143, "interrupted: saved\n"), (143, "")], 143, "interrupted: saved"),
        ([(1, "error: bad\n"), (1, "")], 1, "error: bad"),
        ([(1, "error: another process has ended"), (1, "process 1: error: bad")], 1, "process 1: error: bad"),
        ([(0, "fine"), (1, "Traceback\nKeyError: 'x'\n")], 1, "KeyError: 'x' ("),
        ([(0, "fine"), (None, "log\noom\n\n")], 1, "ended without a result; last it said 'oom' ("),
        ([(None, "")], 1, "ended without a result; last it said '' ("),
    ],
)
def test_the_ending_of_a_job(tmp_path: Path, tasks: list[tuple[int | None, str]], code: int, words: str) -> None:
    """The first task that failed counts; what a task says that does not fail for itself does not."""
    found = cluster.ending(Job(Task(tmp_path, number, *task) for number, task in enumerate(tasks)))
    assert found[0] == code
    assert found[1].startswith(words)
    assert (found[1] == words) != words.endswith("(")
