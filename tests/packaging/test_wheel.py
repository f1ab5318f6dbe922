"""The wheel works from any folder, and a missing extra names the command that installs it."""

import builtins
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infvit.config import LoggerConfig, TrainConfig
from infvit.engine.loggers import WandbLogger
from infvit.errors import MissingExtraError

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_registers_models_from_any_folder(tmp_path: Path):
    """Built and installed without network into a folder of its own; nothing of the checkout is seen."""
    source = tmp_path / "source"
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in run(*listing, cwd=ROOT).split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    run(
        *pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(tmp_path), str(source), cwd=tmp_path
    )
    (wheel,) = tmp_path.glob("infvit-*.whl")
    target, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel), cwd=tmp_path)
    packages = {path.name for path in target.iterdir()}
    assert "infvit" in packages
    assert not packages & {"tests", "configs", "benchmarks", "docs"}
    assert (target / "infvit" / "py.typed").exists()
    code = """
import infvit, timm, pkgutil, importlib
print(infvit.__file__)
print(infvit.__version__, sum(p.numel() for p in timm.create_model("infvit_pure_mini").parameters()))
for module in pkgutil.walk_packages(infvit.__path__, "infvit."):
    importlib.import_module(module.name)
"""
    file, rest = run(sys.executable, "-c", code, cwd=elsewhere, PYTHONPATH=str(target)).splitlines()
    assert Path(file) == target / "infvit" / "__init__.py"
    version, parameters = rest.split()
    assert f"infvit-{version}-" in wheel.name
    assert int(parameters) > 400_000
    metadata = next(target.glob("infvit-*.dist-info"))
    assert "Provides-Extra: wandb" in (metadata / "METADATA").read_text()
    assert list(metadata.rglob("LICENSE"))


def test_a_missing_extra_names_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    real = builtins.__import__

    def without_wandb(name, *args, **kwargs):
        if name == "wandb":
            raise ImportError("No module named 'wandb'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_wandb)
    with pytest.raises(MissingExtraError, match=r"logger=wandb.*pip install 'infvit\[wandb\]'"):
        WandbLogger(TrainConfig(logger=LoggerConfig(wandb=True)), tmp_path, "id")
    assert issubclass(MissingExtraError, ImportError)
