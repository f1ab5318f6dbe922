"""An interrupted run is the unbroken run, bitwise: weights, average, optimiser, rows; also with loader workers."""

import contextlib
import logging
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from infvit.config import TrainConfig
from infvit.engine import checkpoint, loop, train
from infvit.engine.folder import default_folder
from infvit.engine.signals import Interrupted, stop_request
from infvit.errors import CheckpointError, ConfigError

Config = Callable[..., TrainConfig]


class Killed(BaseException):
    """Stands for the end of the process: nothing of ours catches it."""


@contextlib.contextmanager
def at_call(place: Any, name: str, number: int, action: Callable[[], Any]) -> Iterator[None]:
    """Does something just before the n-th call (from 1) of a function; it must come to that call."""
    original, calls = getattr(place, name), 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            action()
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, wrapped)
        yield
    assert calls >= number


def send(signum: int) -> Callable[[], None]:
    """Sends a real signal to this process, which must be listening to it."""

    def action() -> None:
        assert signal.getsignal(signum) not in (signal.SIG_DFL, signal.default_int_handler)
        signal.raise_signal(signum)

    return action


def die() -> None:
    raise Killed


def folder_of(config: TrainConfig) -> Path:
    return Path(str(config.run_dir))


@pytest.fixture(scope="module")
def memory() -> dict[str, Any]:
    return {}


@pytest.fixture
def straight(rich: Config, outcome: Any, memory: dict[str, Any]) -> dict[str, Any]:
    """What the unbroken run leaves: 2 epochs of 3 updates, everything random switched on."""
    if not memory:
        train(rich(run="straight"))
        memory.update(outcome(folder_of(rich(run="straight"))))
        assert [row["update"] for row in memory["rows"]] == [3, 6]
    return memory


STOPS: dict[str, tuple[Any, str, int]] = {
    "first-update": (loop, "train_update", 1),
    "mid-epoch": (loop, "train_update", 2),
    "last-update-of-an-epoch": (loop, "train_update", 3),
    "second-epoch": (loop, "train_update", 5),
    "validation-of-raw": (loop, "validate", 1),
    "validation-of-ema": (loop, "validate", 2),
    "last-validation": (loop, "validate", 4),
    "between-epochs": (loop, "write_history", 1),
}


@pytest.mark.parametrize("stop", STOPS)
def test_stopped_and_continued(rich: Config, straight: Any, outcome: Any, same: Any, stop: str) -> None:
    """By SIGINT and SIGTERM in turn; the exit code is the shell's, the handlers are put back."""
    number = list(STOPS).index(stop)
    signum, code = [(signal.SIGINT, 130), (signal.SIGTERM, 143)][number % 2]
    before = signal.getsignal(signum)
    with at_call(*STOPS[stop], send(signum)), pytest.raises(Interrupted, match="stopped after update") as info:
        train(rich())
    assert info.value.exit_code == code
    assert signal.getsignal(signum) is before
    train(rich())
    assert same(outcome(folder_of(rich())), straight)


def test_stopped_again_and_again(rich: Config, straight: Any, outcome: Any, same: Any) -> None:
    """One update at a time."""
    for update in range(1, 7):
        message = f"stopped after update {update} of 6"
        with at_call(loop, "train_update", 1, send(signal.SIGTERM)), pytest.raises(Interrupted, match=message):
            train(rich())
    train(rich())
    assert same(outcome(folder_of(rich())), straight)


KILLS: dict[str, tuple[Any, str, int]] = {
    "mid-epoch": (loop, "train_update", 2),
    "second-epoch": (loop, "train_update", 6),
    "validation": (loop, "validate", 2),
    "before-best": (checkpoint, "save", 4),
    "before-last": (checkpoint, "save", 5),
    "before-rows": (loop, "write_history", 1),
    "before-last-rows": (loop, "write_history", 2),
    "file-unnamed": (os, "replace", 4),
    "file-in-writing": (os, "fsync", 3),
}


@pytest.mark.parametrize("kill", KILLS)
def test_killed_and_continued(rich: Config, straight: Any, outcome: Any, same: Any, kill: str) -> None:
    """Nothing is saved on the way out; what was saved after each update is enough."""
    often = {"engine.checkpoint_minutes": 0.0}
    with at_call(*KILLS[kill], die), pytest.raises(Killed):
        train(rich(often))
    train(rich(often))
    assert same(outcome(folder_of(rich())), straight)


def test_mid_epoch_checkpoints_are_written(rich: Config, load: Any) -> None:
    for minutes, saved in ((0.0, 2), (10.0, 0)):
        config = rich({"engine.checkpoint_minutes": minutes}, run=f"run-{minutes}")
        with at_call(loop, "train_update", 3, die), pytest.raises(Killed):
            train(config)
        path = folder_of(config) / "last.pt"
        assert (load(path)["update"] if path.exists() else 0) == saved


@pytest.mark.parametrize("stop", ["mid-epoch", "validation-of-ema"])
def test_loader_workers_have_no_influence(rich: Config, straight: Any, outcome: Any, same: Any, stop: str) -> None:
    """Two of them until the interruption, one after it, against none."""
    with at_call(*STOPS[stop], send(signal.SIGTERM)), pytest.raises(Interrupted):
        train(rich({"data.num_workers": 2}))
    train(rich({"data.num_workers": 1}))
    assert same(outcome(folder_of(rich())), straight)


def test_stopped_in_a_run_that_is_cut_short(rich: Config, outcome: Any, same: Any) -> None:
    """`max_steps` in the middle of an epoch."""
    train(rich(run="whole", max_steps=4))
    with at_call(loop, "train_update", 2, send(signal.SIGTERM)), pytest.raises(Interrupted):
        train(rich(max_steps=4))
    train(rich(max_steps=4))
    whole = outcome(folder_of(rich(run="whole")))
    assert same(outcome(folder_of(rich())), whole)
    assert [row["update"] for row in whole["rows"]] == [3, 4]


def test_a_finished_run_shows_its_result_and_trains_nothing(
    rich: Config, load: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where only the picture is lacking."""
    caplog.set_level(logging.INFO, "infvit")
    first = train(rich(epochs=1))
    folder = folder_of(rich())
    written = (folder / "last.pt").stat().st_mtime_ns
    (folder / "metrics.jsonl").unlink()
    caplog.clear()
    drawn: list[Path] = []
    with at_call(loop, "train_update", 0, die):
        second = train(rich(epochs=1), after_epoch=[drawn.append])
    assert second == first
    assert (folder / "last.pt").stat().st_mtime_ns == written
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
    assert drawn == [folder]
    assert "This run is finished" in caplog.text
    assert f"Held-out top-1 {first.metrics['top1']:.2f} %" in caplog.text


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


def test_a_run_that_is_evaluated_for_long_is_saved_meanwhile(
    rich: Config, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All updates of an epoch, when the kill comes in its evaluation."""
    config = rich({"engine.checkpoint_minutes": 10.0})

    def later(*args: Any) -> Any:
        run_between = args[5]
        clock = time.monotonic
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop.time, "monotonic", lambda: clock() + 601)
            run_between()
        raise Killed

    monkeypatch.setattr(loop, "validate", later)
    with pytest.raises(Killed):
        train(config)
    content = load(folder_of(config) / "last.pt")
    assert (content["update"], content["history"]) == (3, [])


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


def test_a_checkpoint_of_another_configuration_is_refused(tiny: Config) -> None:
    """Put there by hand, or beside a record that is lost."""
    train(tiny(max_steps=1))
    (folder_of(tiny()) / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"holds another run \(seed: 0 -> 5\)"):
        train(tiny(max_steps=1, seed=5))


def test_metrics_without_a_checkpoint_do_not_start_over(tiny: Config, rows: Any) -> None:
    train(tiny())
    folder = folder_of(tiny())
    for name in ("last.pt", "previous.pt"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match=r"has metrics of a run but neither last.pt nor previous.pt"):
        train(tiny())
    assert len(rows(folder)) == 2
    train(tiny(fresh=True))


def test_a_disk_that_fills_up_is_one_line(tiny: Config, ranks: Callable[..., list[Any]], load: Any) -> None:
    """Torch's writer turns the error of the system into one of its own."""
    train(tiny(epochs=1))
    config = tiny(epochs=2, allow_change=["epochs"])

    def work(rank: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        train(config)

    (ended,) = ranks(1, work)
    assert ended.error == "CheckpointError"
    assert re.search(r"cannot write .*(last|best).pt: .*Free space or change run_dir", ended.message)
    assert load(folder_of(config) / "last.pt")["update"] == 3
    assert not list(folder_of(config).glob("*.tmp"))


def test_a_damaged_record_is_named(tiny: Config) -> None:
    train(tiny(max_steps=1))
    record = folder_of(tiny()) / "config.yaml"
    record.write_text("")
    with pytest.raises(ConfigError, match=r"config.yaml is damaged, .*; remove it to go on with this run"):
        train(tiny(max_steps=1))
    record.unlink()
    train(tiny(max_steps=1))
    assert "epochs: 2" in record.read_text()


def test_a_checkpoint_of_another_model_is_refused(tiny: Config) -> None:
    """Also where the record of the configuration is lost, or wrong."""
    train(tiny(max_steps=1))
    folder = folder_of(tiny())
    (folder / "config.yaml").unlink()
    deeper = {"depth": 2, "embed_dim": 24, "num_heads": 2}
    with pytest.raises(ConfigError, match=r"model.args.depth: 1 -> 2"):
        train(tiny({"model.args": deeper}, max_steps=1))
    content = torch.load(folder / "last.pt", weights_only=True)
    content["config"]["model"]["args"] = deeper
    torch.save(content, folder / "last.pt")
    with pytest.raises(CheckpointError, match="not of this run"):
        train(tiny({"model.args": deeper}, max_steps=1))
    torch.save({**content, "format": 99}, folder / "last.pt")
    with pytest.raises(CheckpointError, match="format 99, this version reads 2"):
        train(tiny(max_steps=1))


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


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = bytes(255 - byte for byte in content[middle : middle + 64])
    path.write_bytes(
        {
            "half": content[:middle],
            "empty": b"",
            "text": b"not a checkpoint",
            "table": b"epoch,update\n1,3\n",
            "flipped": content[:middle] + flipped + content[middle + 64 :],
        }[how]
    )


@pytest.mark.parametrize("how", ["half", "empty", "text", "table", "flipped"])
def test_a_damaged_checkpoint_is_skipped_for_the_older(
    rich: Config, straight: Any, outcome: Any, same: Any, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with at_call(loop, "train_update", 6, die), pytest.raises(Killed):
        train(rich({"engine.checkpoint_minutes": 0.0}))
    folder = folder_of(rich())
    damage(folder / "last.pt", how)
    train(rich())
    assert f"{folder / 'last.pt'} is damaged" in caplog.text
    assert f"Going on from the older {folder / 'previous.pt'}" in caplog.text
    assert same(outcome(folder), straight)


def test_without_a_usable_checkpoint_nothing_starts_over(tiny: Config) -> None:
    train(tiny())
    folder = folder_of(tiny())
    for name in ("last.pt", "previous.pt"):
        damage(folder / name, "half")
    with pytest.raises(CheckpointError, match=r"damaged.*No older one is usable; fresh=true"):
        train(tiny())
    train(tiny(fresh=True))


def test_the_last_two_states_are_kept(tiny: Config, load: Any) -> None:
    train(tiny(epochs=3))
    folder = folder_of(tiny())
    assert [load(folder / name)["update"] for name in ("last.pt", "previous.pt")] == [9, 6]
    assert not list(folder.glob("*.tmp"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_leaves_both_checkpoints(tiny: Config, load: Any) -> None:
    train(tiny())
    folder = folder_of(tiny())
    (folder / "last.tmp").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"cannot write .*last.pt: No space left"):
        checkpoint.save({"big": torch.zeros(100_000)}, folder / "last.pt", folder / "previous.pt")
    assert [load(folder / name)["update"] for name in ("last.pt", "previous.pt")] == [6, 3]


def test_what_torch_makes_of_a_full_disk(tiny: Config, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer finds less in the file than it wrote, and says so in an error of its own."""
    train(tiny())
    folder = folder_of(tiny())

    def half(content: Any, file: Any) -> None:
        file.write(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 344064 vs 343952")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(CheckpointError, match=r"cannot write .*last.pt: it could not be written whole. Free space"):
        checkpoint.save({}, folder / "last.pt", folder / "previous.pt")
    assert [load(folder / name)["update"] for name in ("last.pt", "previous.pt")] == [6, 3]
    assert not list(folder.glob("*.tmp"))


def test_a_second_ctrl_c_does_not_wait() -> None:
    with stop_request() as stop:
        assert not stop
        signal.raise_signal(signal.SIGINT)
        assert stop
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with stop_request() as stop:  # a second SIGTERM waits: the state is being saved
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signum == signal.SIGTERM


def test_a_changed_precision_may_continue(tiny: Config, load: Any) -> None:
    """The state of the loss scaler is only there under fp16."""
    with at_call(loop, "train_update", 2, send(signal.SIGTERM)), pytest.raises(Interrupted):
        train(tiny())
    with at_call(loop, "train_update", 2, send(signal.SIGTERM)), pytest.raises(Interrupted):
        train(tiny({"engine.precision": "fp16"}))
    scale = load(folder_of(tiny()) / "last.pt")["scaler"]["scale"]
    assert scale > 1
    train(tiny())
    assert load(folder_of(tiny()) / "last.pt")["scaler"] == {}


def test_the_scaler_continues(tiny: Config, load: Any, outcome: Any, same: Any) -> None:
    """fp16 on the CPU: the scale grows or shrinks on the way, and goes on from where it was."""
    half = {"engine.precision": "fp16"}
    train(tiny(half, run="straight"))
    with at_call(loop, "train_update", 4, send(signal.SIGTERM)), pytest.raises(Interrupted):
        train(tiny(half))
    train(tiny(half))
    assert same(outcome(folder_of(tiny())), outcome(folder_of(tiny(run="straight"))))
    assert load(folder_of(tiny()) / "last.pt")["scaler"]["_growth_tracker"] > 0


def test_the_state_of_a_run_is_one_object(rich: Config, built: Any, same: Any) -> None:
    """What goes into a checkpoint comes back out, and it is all that changed."""
    train(rich())
    first = built(rich()).state
    assert first.update == 6
    assert len(first.history) == 2
    assert same(first.state_dict(), built(rich()).state.state_dict())


def test_resume_takes_no_longer_than_the_rest(tiny: Config) -> None:
    """The sampler jumps to where the run was: no image is decoded twice."""
    from infvit.data import source

    with at_call(loop, "train_update", 3, send(signal.SIGTERM)), pytest.raises(Interrupted):
        train(tiny(epochs=1))
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        original = source.decode
        patch.setattr(source, "decode", lambda *args: seen.append(time.monotonic()) or original(*args))
        train(tiny(epochs=1))
    assert len(seen) == 2 * 11  # two evaluations and not one training image
