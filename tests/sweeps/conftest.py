"""Sweeps of `train.py` inside this process: jobs of one update of a tiny model on 64 digits."""

import logging
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra

from infvit import cli
from infvit.data import digits

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def table(self) -> dict[str, str]:
        """Returns the state of each job in the table at the end."""
        lines = self.out.splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("job "))
        column = lines[start].index("state")
        jobs = lines[start + 1 : -1]
        return {line.split()[0]: line[column:].split("  ")[0] for line in jobs}


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture) -> Iterator[Callable]:
    """Runs `train.py` with the given arguments in an empty folder."""
    monkeypatch.chdir(tmp_path)
    images, labels = digits.digit_arrays("train")
    monkeypatch.setattr(digits, "digit_arrays", lambda split: (images[:64], labels[:64]))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # put back afterwards, `launch` sets it
    cli.register_configs([])
    repository = ConfigStore.instance().repo.get("model", {})
    monkeypatch.delitem(repository, "timm", raising=False)  # 1,400 models which Hydra would copy for every job
    monkeypatch.setattr(cli, "register_configs", lambda: None)
    handlers = list(logging.root.handlers)
    monkeypatch.setattr(logging.root, "level", logging.INFO)
    logging.root.manager._clear_cache()  # of which levels are on

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py"), *arguments])
        GlobalHydra.instance().clear()
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(sys.argv[0], run_name="__main__")
        out, err = capfd.readouterr()
        return Ended(int(ended.value.code or 0), out, err)

    yield run
    logging.root.handlers[:] = handlers
