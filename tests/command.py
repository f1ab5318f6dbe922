"""`train.py` (or `eval.py`) run inside this process, which is what `python train.py ...` does after its imports."""

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

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """Returns the lines that stderr shows as errors."""
        return [line for line in self.err.splitlines() if line.startswith("error:")]

    @property
    def table(self) -> dict[str, str]:
        """Returns the state of each job in the table at the end of a sweep."""
        lines = self.out.splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("job "))
        column = lines[start].index("state")
        jobs = lines[start + 1 : -1]
        return {line.split()[0]: line[column:].split("  ")[0] for line in jobs}


Command = Callable[..., Ended]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture) -> Iterator[Command]:
    """Runs `train.py`, or another script, with the given arguments in an empty folder, on 64 digits."""
    monkeypatch.chdir(tmp_path)
    images, labels = digits.digit_arrays("train")
    monkeypatch.setattr(digits, "digit_arrays", lambda split: (images[:64], labels[:64]))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # put back afterwards, `launch` sets it
    # Hydra copies what is registered several times in a run; the rest of timm's models would take a second each time.
    cli.register_configs(["model=timm/NAME"])
    repository = ConfigStore.instance().repo["model"]
    monkeypatch.setitem(repository, "timm", {"resnet18.yaml": repository["timm"]["resnet18.yaml"]})
    monkeypatch.setattr(cli, "register_configs", lambda: None)
    handlers = list(logging.root.handlers)

    def run(*arguments: str, script: str = "train.py") -> Ended:
        monkeypatch.setattr(sys, "argv", [str(ROOT / script), *arguments])
        GlobalHydra.instance().clear()
        handler = logging.StreamHandler(sys.stderr)
        logging.root.addHandler(handler)
        level = logging.root.level
        logging.root.setLevel(logging.INFO)
        try:
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(sys.argv[0], run_name="__main__")
        finally:
            logging.root.removeHandler(handler)
            logging.root.setLevel(level)
        out, err = capfd.readouterr()
        return Ended(int(ended.value.code or 0), out, err)

    yield run
    logging.root.handlers[:] = handlers
