"""Where results go."""

import hashlib
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infvit.config import EvalConfig
from infvit.errors import ConfigError
from infvit.evaluation.rebuild import Rebuilt

QUALITY = ("attention_quality", "maps")
"""Evaluations that depend on the keys of `quality`."""


def result_folder(config: EvalConfig, rebuilt: Rebuilt) -> Path:
    """Returns `output`, or what the model's own is."""
    return Path(config.output) if config.output else rebuilt.folder


def require_writable(folder: Path) -> None:
    """Makes the folder of the results, before anything is computed.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"results cannot be written to {folder}: {error.strerror}. Choose output=...") from error


def result_path(config: EvalConfig, rebuilt: Rebuilt, kind: str, name: str, suffix: str) -> Path:
    """Returns the path of a result file; its name ends with a hash of the settings, so that others get another file."""
    name = name.replace("/", "-")
    own: Any = sorted(config.eval) if kind == "table" else asdict(config.quality) if name in QUALITY else []
    stem = f"{kind}_{name}_{config.weights}_{rebuilt.img_size}px_{_digest(config, rebuilt, own)}"
    return result_folder(config, rebuilt) / f"{stem}{suffix}"


def _digest(config: EvalConfig, rebuilt: Rebuilt, own: Any) -> str:
    """Returns a short hash of what the result depends on, and of what only this kind of it does."""
    # In a folder of the user's choice the results of several models may lie together.
    checkpoint = str(rebuilt.path.absolute()) if config.output else rebuilt.path.name
    depends = {**asdict(rebuilt.data), "precision": config.precision, "checkpoint": checkpoint}
    depends |= {"crop_pct": config.crop_pct, "interpolation": config.interpolation}
    depends |= {"model": asdict(config.model), "roots": config.roots, "on_damaged": config.on_damaged, "eval": own}
    depends |= {name: getattr(config, name) for name in ("num_images", "runs") if getattr(config, name)}
    depends.pop("num_workers")
    return hashlib.sha1(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:6]
