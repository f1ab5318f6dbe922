"""Bad input at the command line: one line that says what to do, exit code 1, the traceback only with `debug=true`.

Most of it runs `train.py` inside this process, which is what `python train.py ...` does after its imports.
"""

import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import submitit
import timm
import torch
from command import ROOT, Command, Ended
from omegaconf import OmegaConf

from infvit import cli, engine
from infvit.config import TrainConfig
from infvit.engine.signals import Interrupted
from infvit.errors import UserError

# One update of a tiny model on 64 digits: a second.
TINY = ["model.args.depth=1", "data.img_size=16", "data.num_workers=0", "batch_size=32", "epochs=1", "max_steps=1",
        "engine.device=cpu"]  # fmt: skip


def assert_one_line(ended: Ended, message: str) -> None:
    assert ended.code == 1, ended.err
    assert len(ended.errors) == 1, ended.err
    assert re.search(message, ended.errors[0]), ended.errors[0]
    assert "Traceback" not in ended.err + ended.out


# What is typed, and what the answer must say.
BAD: list[tuple[list[str], str]] = [
    (["epohcs=3"], "unknown key 'epohcs'. Did you mean 'epochs'"),
    (["engine.precison=bf16"], "unknown key 'engine.precison'. Did you mean 'engine.precision'"),
    (["+x=1"], "unknown key 'x'"),
    (["--epochs=3"], "--epochs=3: keys are written without dashes, e.g. epochs=3"),
    (["--foo"], "--foo: keys are written without dashes"),
    (["--epochs", "3"], "--epochs: keys are written without dashes"),
    (["recipe=diet"], "unknown recipe=diet. Did you mean 'deit'"),
    (["data=digit"], "unknown data=digit. Did you mean 'digits'"),
    (["model=infvit_linear_min"], "unknown model=infvit_linear_min. Did you mean 'infvit_linear_mini'"),
    (["model=timm/resnt18"], "unknown model=timm/resnt18. Did you mean 'timm/resnet18'"),
    (["model.name=resnt18"], "unknown model 'resnt18'. Did you mean 'resnet18'"),
    (["model.attention=infsa_pur"], "infsa_pure"),
    (["recipe.opt=adamv"], "unknown recipe.opt='adamv'. Did you mean 'adam"),
    (["model.args.num_heads=0"], "width 96 is not divisible by num_heads=0"),
    (["model.args.nothing=0"], "unexpected keyword argument 'nothing'.*Check model"),
    (["model.gamma=1.5"], r"model.gamma=1.5 must lie strictly between 0 and 1"),
    (["model=vit_mini", "model.gamma=0.5"], "gamma"),
    (["model=timm/resnet18", "model.attention=infsa_pure"], "resnet18.*attention"),
    (["data=folder", "data.root=/no/such/folder"], "data.root=/no/such/folder does not exist"),
    (["data=folder"], "data.root"),
    (["recipe.mixup=0.8", "batch_size=31"], "batch_size=31 is odd, but mixup"),
    (["recipe.cutmix=1", "data.micro_batch_size=5"], "data.micro_batch_size=5 is odd, but mixup"),
    (["compile=true", "engine.compile_backend=indctor"], "unknown engine.compile_backend='indctor'.*'inductor'"),
    (["init_from=/no/such/run"], "no run folder or checkpoint at /no/such/run"),
    (["seed=4294967296"], "seed=4294967296 must be between 0 and 4294967295"),
    (["run_dir=/dev/null/run"], "run_dir=/dev/null/run cannot be written: Not a directory. Choose another run_dir"),
    (["epochs=-1"], "epochs=-1 must be at least 1"),
    (["epochs=0"], "epochs=0 must be at least 1"),
    (["data.img_size=18"], "data.img_size=18 is not divisible by the model's patch size 4: use 16 or 20"),
    (["epochs=many"], "epochs=many: Value 'many' of type 'str' could not be converted to Integer"),
    (["batch_size=65"], "The training split has 64 images, fewer than one batch"),
    (["imports=[no_such_module]"], "imports: cannot import 'no_such_module'"),
    (["init_from=no/such/run"], "no run folder or checkpoint at no/such/run"),
    (["init_from=timm/resnt18"], "init_from=timm/resnt18: unknown model. Did you mean 'resnet18'"),
    (["reset_head=true"], "reset_head=true has no effect without init_from"),
    (["engine.device=mps"], "engine.device=mps is not available"),
    (["hydra/launcher=slurm"], "hydra/launcher=slurm submits jobs only with -m, one job too"),
    (["hydra/launcher=slrum"], "unknown hydra/launcher=slrum. Did you mean 'slurm'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_one_line_and_no_traceback(command: Command, tmp_path: Path, arguments: list[str], message: str):
    ended = command(*TINY, *arguments)
    assert_one_line(ended, message)
    assert not list(tmp_path.rglob("*.pt")), "before any training step"


@pytest.mark.parametrize("arguments", [["epochs=-1"], ["epohcs=1"], ["data.img_size=18"]], ids=" ".join)
def test_debug_shows_the_traceback(command: Command, arguments: list[str]):
    ended = command(*TINY, *arguments, "debug=true")
    assert ended.code == 1
    assert len(ended.errors) == 1
    assert "Traceback (most recent call last)" in ended.err


def test_good_input(command: Command, tmp_path: Path):
    ended = command(*TINY, "run_dir=run")
    assert (ended.code, ended.errors) == (0, [])
    assert (tmp_path / "run" / "last.pt").exists()
    for word in ("infvit_linear_mini", "digits", "quick", "cpu", "run", "ImageNet"):
        assert word in ended.err


def test_dry_run_writes_nothing(command: Command, tmp_path: Path):
    ended = command(*TINY, "dry_run=true")
    assert ended.code == 0
    for word in ("parameters", "FLOPs", "updates", "learning rate", "data"):
        assert word in ended.out
    assert not list(tmp_path.iterdir())


def test_nan_loss_stops_and_keeps_the_last_finite_checkpoint(command: Command, tmp_path: Path):
    """The rate is so high that the second epoch is not finite."""
    huge = ["epochs=4", "max_steps=null", "recipe.lr=1e30", "recipe.clip_grad=null", "recipe.warmup_epochs=1",
            "recipe.warmup_lr=1e-3", "recipe.sched_on_updates=false", "run_dir=run"]  # fmt: skip
    ended = command(*TINY, *huge)
    assert_one_line(ended, "not finite")
    state = torch.load(tmp_path / "run" / "last.pt", weights_only=True)["state_dict"]
    assert all(bool(value.isfinite().all()) for value in state.values())


def test_checkpoint_of_another_model(command: Command, tmp_path: Path):
    timm_model = timm.create_model("resnet18", num_classes=10)
    torch.save({"state_dict": timm_model.state_dict()}, tmp_path / "resnet.pt")
    torch.save({"epoch": 3, "nested": {"a": 1}}, tmp_path / "no_weights.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "damaged.pt").write_bytes(b"no checkpoint")
    for name, message in {
        "resnet.pt": r"init_from=resnet.pt does not fit the model \(\d+ missing: .*; \d+ unknown: .*\)",
        "no_weights.pt": "init_from=no_weights.pt holds no weights, only: epoch, nested",
        "list.pt": "holds a list",
        "damaged.pt": "damaged",
    }.items():
        assert_one_line(command(*TINY, f"init_from={name}", f"run_dir=run_{name}"), message)


# Sweeps


def test_a_job_that_fails_does_not_end_the_sweep(command: Command, tmp_path: Path):
    ended = command("-m", *TINY, "seed=1,-1,2", "run_dir=run_${seed}")
    assert_one_line(ended, "seed=-1 must be between 0 and 4294967295")
    assert (tmp_path / "run_1" / "last.pt").exists()
    assert (tmp_path / "run_2" / "last.pt").exists()


def test_a_misspelt_name_in_a_sweep_is_found_before_any_job(command: Command, tmp_path: Path):
    assert_one_line(command("-m", *TINY, "model=vit_mini,vit_mimi"), "unknown model=vit_mimi. Did you mean 'vit_mini'")
    assert not list(tmp_path.rglob("*.pt"))


def test_a_sweep_without_failure(command: Command, tmp_path: Path):
    ended = command("-m", *TINY, "seed=1,2")
    assert (ended.code, ended.errors) == (0, [])
    assert len(list(tmp_path.glob("runs/sweep/*/last.pt"))) == 2


def test_an_unforeseen_error_is_reported_whole_and_the_sweep_goes_on(command: Command, monkeypatch, tmp_path: Path):
    def train_or_fail(config, after_epoch):
        if config.seed == 1:
            raise KeyError("not foreseen")
        (tmp_path / f"done_{config.seed}").touch()

    monkeypatch.setattr(engine, "train", train_or_fail)
    ended = command("-m", *TINY, "seed=1,2")
    assert ended.code == 1
    assert "Traceback" in ended.err
    assert "KeyError: 'not foreseen'" in ended.err
    assert (tmp_path / "done_2").exists()


@pytest.mark.parametrize(("error", "code"), [(Interrupted(15, "saved"), 143), (KeyboardInterrupt(), 130)])
def test_an_interruption_ends_the_sweep(command: Command, monkeypatch, error: BaseException, code: int):
    started = []

    def train_or_stop(config, after_epoch):
        started.append(config.seed)
        if config.seed == 2:
            raise error

    monkeypatch.setattr(engine, "train", train_or_stop)
    ended = command("-m", *TINY, "seed=1,2,3")
    assert (ended.code, started) == (code, [1, 2])
    assert "Traceback" not in ended.err
    if code == 143:
        assert "interrupted: saved" in ended.err
    monkeypatch.setattr(engine, "train", lambda config, after_epoch: started.append(config.seed))
    assert command(*TINY, "seed=9").code == 0, "a later launch starts afresh"
    assert started == [1, 2, 9]


@pytest.mark.slow
def test_nothing_leaks_from_job_to_job(command: Command, tmp_path: Path):
    """The same job alone, first, and after another one with other global settings gives the same numbers."""

    def result(folder: str) -> tuple:
        row = json.loads((tmp_path / folder / "metrics.jsonl").read_text().splitlines()[-1])
        state = torch.load(tmp_path / folder / "last.pt", weights_only=True)["state_dict"]
        return row["loss"], row["train_loss"], b"".join(t.numpy().tobytes() for t in state.values())

    assert command(*TINY, "seed=3", "recipe.drop=0.2", "run_dir=alone").code == 0
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    jobs = "model.gamma=0.5,0.7"
    sweep = ["-m", *TINY, "seed=3", "recipe.drop=0.2", "deterministic=true,false", jobs, "engine.tf32=true"]
    assert command(*sweep, "run_dir=${deterministic}_${model.gamma}").code == 0
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cuda.matmul.allow_tf32
    assert result("True_0.7") == result("False_0.7") == result("alone") != result("False_0.5")
    assert not [handler for handler in logging.getLogger("infvit").handlers if isinstance(handler, logging.FileHandler)]


# Sweeps that are submitted


def test_submitting_needs_an_extra(command: Command, monkeypatch):
    monkeypatch.setitem(sys.modules, "hydra_plugins.hydra_submitit_launcher", None)
    monkeypatch.setitem(sys.modules, "hydra_plugins.hydra_joblib_launcher", None)
    message = r"hydra/launcher=joblib needs an optional dependency: pip install 'infvit\[joblib\]'"
    assert_one_line(command("-m", *TINY, "hydra/launcher=joblib"), message)
    message = r"hydra/launcher={} needs an optional dependency: pip install 'infvit\[slurm\]'"
    for name in ("slurm", "submitit_local"):
        assert_one_line(command("-m", *TINY, f"hydra/launcher={name}"), message.format(name))


def test_what_the_launcher_does_not_take(command: Command, monkeypatch):
    monkeypatch.setattr(submitit, "AutoExecutor", submitit.AutoExecutor)  # put back afterwards, `launch` replaces it
    for arguments, message in (
        (["slurm", "hydra.launcher.partitoin=x"], "unknown key 'hydra.launcher.partitoin'. Did you mean 'hydra.launch"),
        (["submitit_local", "hydra.launcher.nodes=2"], "The jobs could not be submitted: LocalExecutor can use only"),
        (["slurm"], 'The jobs could not be submitted: Could not detect "srun"'),
    ):
        assert_one_line(command("-m", *TINY, f"hydra/launcher={arguments[0]}", *arguments[1:]), message)


def test_an_error_is_shown_by_one_process_only(command: Command, monkeypatch):
    def fail(config, after_epoch):
        error = Interrupted(15, "saved") if config.seed else UserError("wrong")
        error.shown_elsewhere = True
        raise error

    monkeypatch.setattr(engine, "train", fail)
    for seed, code in ((0, 1), (1, 143)):
        ended = command(*TINY, f"seed={seed}")
        assert (ended.code, ended.err) == (code, "")


def test_a_job_that_slurm_starts_again_has_no_result(command: Command, monkeypatch):
    """And a sweep in one Slurm job is started again as a whole: its next job is not begun."""
    asked: list[int] = []

    def train_and_stop(config, after_epoch):
        raise Interrupted(signal.SIGUSR1, "saved")

    monkeypatch.setattr(engine, "train", train_and_stop)
    monkeypatch.setattr(cli, "requeue", lambda signum: asked.append(signum) or True)
    assert command("-m", *TINY, "seed=1,2", "engine.requeue=true").code == 143
    assert asked == [signal.SIGUSR1]
    config = OmegaConf.create({**asdict(TrainConfig()), "engine": {"requeue": True}})
    with pytest.raises(SystemExit):
        cli.run_job(config, TrainConfig, lambda config: train_and_stop(config, []))
    assert cli.run_job(OmegaConf.create(asdict(TrainConfig())), TrainConfig, lambda c: train_and_stop(c, [])) == 143
    assert len(asked) == 2, "engine.requeue is false"


# A process of its own


@pytest.mark.slow
def test_in_a_process(tmp_path: Path):
    command = [sys.executable, str(ROOT / "train.py"), "epochs=-1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: epochs=-1 must be at least 1.\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("error")
def test_a_sweep_where_nothing_can_be_written(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = command("-m", *TINY, "seed=0,1", "hydra.sweep.dir=file/sweep")
    assert_one_line(ended, r"file.*: Not a directory. Start it where you may write, or set hydra.sweep.dir=")
