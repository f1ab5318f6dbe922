"""A table of measured and published figures, before it is written in one format or another."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PENDING = "pending"


def significant(value: float | None, digits: int = 3) -> str:
    """Returns a number with so many significant digits, never as a power of ten; whole digits are all kept."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


@dataclass(frozen=True)
class Cell:
    """Mean and standard deviation of some runs, or a word where there is no number.

    Attributes:
        mean: None where there is no number.
        sd: of the sample, with n - 1; None of fewer than two.
        count: how many numbers.
        text: what stands in place of a number.
    """

    mean: float | None = None
    sd: float | None = None
    count: int = 0
    text: str = "-"

    @classmethod
    def of(cls, values: Sequence[float]) -> "Cell":
        """Builds the cell of some numbers."""
        if not values:
            return cls()
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))

    def show(self, digits: int) -> str:
        """Returns it as text, e.g. `97.22 ± 0.28`."""
        if self.mean is None:
            return self.text
        return f"{self.mean:.{digits}f}" + ("" if self.sd is None else f" ± {self.sd:.{digits}f}")


@dataclass(frozen=True)
class Row:
    """A metric over all settings."""

    metric: str
    label: str
    digits: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """Settings in columns, metrics in rows.

    Attributes:
        title: heads it.
        columns: labels of the settings.
        rows: the metrics.
        progress: of each setting, how many runs are in which state.
        note: what the numbers are of.
        errors: a line for each run that has one.
        explained: what the numbers are; empty: as in the table of a sweep.
        figure: the name of the file with its figure.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    progress: tuple[str, ...]
    note: str
    errors: tuple[str, ...]
    explained: str = ""
    figure: str = "report.png"
