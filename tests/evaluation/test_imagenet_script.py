"""`eval.py` as a user starts it: exit codes, the table on stdout, one line for an error, several processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from command import Command
from imagenet_trees import FILE, WNIDS, paint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def call(folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(ROOT / "eval.py"), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """21 validation images, and weights of a small model."""
    for i in range(0, 1000, 49):
        paint(tmp_path / "root" / "val" / WNIDS[i] / FILE.format(i + 1), i)
    torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "w.pt")
    return tmp_path


def test_one_and_two_processes_give_one_table(folder: Path) -> None:
    arguments = ("model=timm/test_resnet", "checkpoint=w.pt", "eval=[imagenet,imagenet_real]", "data.root=root",
                 "data.num_workers=1", "device=cpu")  # fmt: skip
    code, alone, err = call(folder, *arguments)
    assert code == 0, err
    assert [line.split()[0] for line in alone.splitlines()] == ["set", "imagenet", "imagenet_real"]
    (table,) = folder.glob("table_imagenet_raw_160px_*.csv")
    before = table.read_text()
    table.unlink()
    code, together, err = call(folder, *arguments, launcher=TORCHRUN)
    assert code == 0, err
    assert together == alone
    assert table.read_text() == before
    code, out, err = call(folder, "eval=compare", "runs=[.,.]")
    assert (code, out.splitlines()[1].split()[:2]) == (0, ["imagenet", "21"]), err


def test_check_says_what_is_missing(folder: Path) -> None:
    code, out, err = call(folder, "eval=check", "data.root=root")
    assert code == 1
    assert "979 of 1000 classes are absent" in out
    assert err.splitlines()[-1] == "error: 2 of 2 sets are not whole: imagenet, imagenet_real (see above)."


def test_mistakes_are_one_line(folder: Path, command: Command) -> None:
    code, _, err = call(folder, "model=timm/test_resnett", "eval=imagenet")
    assert code == 1
    assert err.startswith("error: unknown model=timm/test_resnett. Did you mean")
    assert len(err.splitlines()) == 1
    torch.save(timm.create_model("resnet18").state_dict(), folder / "resnet18.pt")
    for arguments, message in (
        (("eval=imagenet",), "error: checkpoint=... is missing: name a run folder"),
        (("model=timm/resnet18", "checkpoint=resnet18.pt", "eval=imagenet_a", "data.root=root"),
         "error: data.root=root has no imagenet_a (looked for imagenet-a, imagenet_a)"),
    ):  # fmt: skip
        ended = command(*arguments, script="eval.py")
        assert ended.code == 1
        assert ended.err.startswith(message)
        assert len(ended.err.splitlines()) == 1
