"""What is measured, and how: plain values, so that another process can be told."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Cell:
    """One thing to measure.

    Attributes:
        model: as the user named it: NAME or timm/NAME, with `:unfused` behind it or not.
        mode: inference or training.
        resolution: image side in pixels.
        batch: images per call.
        scope: model, or attention: the attention function alone.
        reparameterize: inference in the form for inference; false: as trained.
    """

    model: str
    mode: str
    resolution: int
    batch: int = 1
    scope: str = "model"
    reparameterize: bool = True


@dataclass(frozen=True)
class Settings:
    """How it is measured; see `EfficiencyConfig` for what is not explained here."""

    device: str = "cpu"
    precision: str = "fp32"
    rounds: int = 20
    warmup: int = 3
    seconds: float = 60.0
    energy_seconds: float = 2.0
    compile: bool = False
    threads: int | None = None
    memory_limit: float | None = None  # bytes
    imports: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Task:
    """What one process measures: `memory` of its only cell, `latency` of all of them together, or `check`."""

    kind: str
    cells: list[Cell]
    settings: Settings

    def plain(self) -> dict[str, Any]:
        """Returns it for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "Task":
        """Builds it from `plain`."""
        return cls(plain["kind"], [Cell(**cell) for cell in plain["cells"]], Settings(**plain["settings"]))
