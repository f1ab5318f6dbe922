"""Checkpoint files that are damaged, missing, of another run, or do not fit on the disk."""

import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interruptions import Killed, at_call, die, folder_of

from infvit.config import TrainConfig
from infvit.engine import checkpoint, loop, train
from infvit.errors import CheckpointError, ConfigError

Config = Callable[..., TrainConfig]


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
