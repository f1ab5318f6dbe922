"""The folder of a run: whose it is, what made it, and what may change in it."""

import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interruptions import folder_of

from infvit.config import TrainConfig
from infvit.engine import train
from infvit.engine.folder import default_folder
from infvit.errors import ConfigError

Config = Callable[..., TrainConfig]


def test_another_configuration_is_refused_with_the_difference(tiny: Config) -> None:
    train(tiny(max_steps=1))
    with pytest.raises(ConfigError, match=r"holds another run \(recipe.lr: 0.01 -> 0.02; seed: 0 -> 3\)"):
        train(tiny({"recipe.lr": 0.02}, seed=3, max_steps=1))
    # How it is run is no difference.
    train(tiny({"data.num_workers": 1, "engine.log_seconds": 0.0}, max_steps=1, debug=True))


def test_epochs_and_rate_change_only_when_asked(
    tiny: Config, load: Any, rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A finished run of 2 epochs goes on to 4; the rows stay, and the rate follows the new schedule."""
    caplog.set_level(logging.INFO, "infvit")
    train(tiny())
    folder = folder_of(tiny())
    before = rows(folder)
    with pytest.raises(ConfigError, match=r"\(epochs: 2 -> 4\).*allow_change=\[epochs\] to go on anyway"):
        train(tiny(epochs=4))
    longer = tiny({"recipe.lr": 0.02}, epochs=4, allow_change=["epochs", "recipe.lr"])
    caplog.clear()
    train(longer)
    assert "Changed on the way, epochs: 2 -> 4." in caplog.text
    assert "Changed on the way, recipe.lr: 0.01 -> 0.02." in caplog.text
    after = rows(folder)
    assert after[:2] == before
    assert [row["epoch"] for row in after] == [1, 2, 3, 4]
    # A cosine over 12 updates from 0.02 to 1e-4, at the last update of an epoch.
    for row in after[2:]:
        expected = 1e-4 + 0.5 * (0.02 - 1e-4) * (1 + math.cos(math.pi * (row["update"] - 1) / 12))
        assert row["lr"] == pytest.approx(expected)
    assert load(folder / "last.pt")["config"]["epochs"] == 4
    caplog.clear()
    train(tiny({"recipe.lr": 0.02}, epochs=4))  # it is that run now
    assert "Changed on the way" not in caplog.text
    assert "This run is finished" in caplog.text


def test_what_may_not_change_stays_refused(tiny: Config) -> None:
    train(tiny())
    with pytest.raises(
        ConfigError, match=r"\(seed: 0 -> 1\)\. Choose another run_dir=\.\.\., or fresh=true [^,]*aside\.$"
    ):
        train(tiny(epochs=4, seed=1, allow_change=["epochs"]))
    with pytest.raises(ConfigError, match=r"model.attention: None -> softmax"):
        train(tiny({"model.attention": "softmax"}, epochs=4, allow_change=["epochs"]))
    with pytest.raises(ConfigError, match=r"model.gamma: None -> 0.3"):
        train(tiny({"model.gamma": 0.3}))
    with pytest.raises(
        ConfigError, match=r"allow_change=model.gamma: only epochs, recipe.lr, recipe.min_lr may change"
    ):
        tiny(allow_change=["model.gamma"])
    with pytest.raises(
        ConfigError, match=r"nothing is left to train: epochs=1 ends after update 3, and .* is at 6 already"
    ):
        train(tiny(epochs=1, allow_change=["epochs"]))
    assert default_folder(tiny(allow_change=["epochs"])) == default_folder(tiny())


def test_a_finished_run_keeps_its_rate(tiny: Config, load: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Its result is that of the old one."""
    train(tiny())
    folder = folder_of(tiny())
    before = (folder / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"nothing is left to train: epochs=2 ends after update 6"):
        train(tiny({"recipe.lr": 0.02}, allow_change=["recipe.lr"]))
    assert (folder / "config.yaml").read_text() == before
    assert "Changed on the way" not in caplog.text
    assert "Changed on the way" not in (folder / "train.log").read_text()


@pytest.mark.parametrize("content", [b"", b"a: [", b"\xff\xfe", b"- 1"])
def test_a_damaged_record_is_named(tiny: Config, content: bytes) -> None:
    train(tiny(max_steps=1))
    record = folder_of(tiny()) / "config.yaml"
    record.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config.yaml is damaged; remove it, and start the run's command again"):
        train(tiny(max_steps=1))
    record.unlink()
    train(tiny(max_steps=1))
    assert "epochs: 2" in record.read_text()


def test_fresh_moves_the_old_run_aside(tiny: Config, load: Any) -> None:
    """Twice within a second, too."""
    train(tiny(max_steps=1))
    folder = folder_of(tiny())
    for _ in range(2):
        train(tiny(max_steps=1, seed=7, fresh=True))
    aside = sorted(folder.parent.glob("run.old-*"))
    assert [load(path / "last.pt")["config"]["seed"] for path in aside] == [0, 7]
    assert load(folder / "last.pt")["config"]["seed"] == 7


def test_default_folder_follows_from_what_is_computed(tiny: Config) -> None:
    base = default_folder(tiny(run_dir=None))
    assert base.parent == Path("runs")
    assert base.name.startswith("infvit_linear_mini-folder-")
    for changes, top in (
        ({"data.num_workers": 3}, {}),
        ({"engine.log_seconds": 1.0}, {}),
        ({"logger.wandb": True}, {}),
        ({}, {"debug": True, "run_dir": "elsewhere", "fresh": True, "profile": True}),
    ):
        assert default_folder(tiny(changes, **top)) == base
    for changes, top in (({"recipe.lr": 1.0}, {}), ({"model.gamma": 0.3}, {}), ({}, {"seed": 1})):
        assert default_folder(tiny(changes, **top)) != base


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
file.truncate(0)
file.write("process 4711 on elsewhere")
file.flush()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_in_use_is_refused_by_the_name_of_its_owner(tiny: Config) -> None:
    """And free again once the owner is dead, however it died."""
    folder = folder_of(tiny())
    folder.mkdir()
    command = [sys.executable, "-c", HOLD, str(folder / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="in use by process 4711 on elsewhere"):
            train(tiny(max_steps=1, fresh=True))
        assert not (folder / "last.pt").exists()
        owner.kill()
    train(tiny(max_steps=1))
    assert (folder / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_child_that_outlives_a_run_does_not_hold_its_folder(tiny: Config) -> None:
    """Loader workers live on for seconds after their process is killed."""
    folder = folder_of(tiny())
    folder.mkdir()
    code = (
        "import os, sys, time; from pathlib import Path; from infvit.engine.folder import own_folder\n"
        "with own_folder(Path(sys.argv[1]), False):\n"
        "    child = os.fork()\n"
        "    if child == 0: os.close(1); time.sleep(60)\n"
        "    print(child, flush=True); os.kill(os.getpid(), 9)\n"
    )
    process = subprocess.run([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True, check=False)
    child = int(process.stdout) if process.stdout.strip().isdigit() else None
    try:
        assert process.returncode == -signal.SIGKILL
        train(tiny(max_steps=1))
    finally:
        if child is not None:
            os.kill(child, signal.SIGKILL)
