"""The laboratory of the kill points, and the table of what was tried in it."""

import datetime
import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_lab import HERE, ROOT, SEED, Equal, Lab, Straight, Tried, differences, outcome

PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- counts: `make faults` writes them -->\n", "<!-- end of counts -->\n"
WHOLE = os.environ.get("FAULTS_WHOLE") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves only a selection, in which every kind of place occurs, unless the whole suite is asked for."""
    left_out = [item for item in items if HERE in item.path.parents and not WHOLE and item.get_closest_marker("whole")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_configure(config: pytest.Config) -> None:
    """Declares the marker of what is left out of the selection."""
    config.addinivalue_line("markers", "whole: a kill point that only `make faults` tries")


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Where runs are started and interrupted. At the end no process of them may be left."""
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


@pytest.fixture
def tried(record_property: Callable[[str, object], None]) -> Tried:
    """Notes a kill point for the table: `tried("saving", "before-last.pt:3:SIGKILL")`."""
    return lambda kind, point: record_property("fault", (kind, point))


@pytest.fixture
def equal() -> Equal:
    """Asserts that a run folder holds what the straight run left."""

    def check(folder: Path, straight: Straight) -> None:
        assert differences(outcome(folder), straight.outcome) == []

    return check


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Shows what was tried and how often the rerun was equal; a whole suite that passed also in the documentation."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for verdict in ("passed", "failed"):
        for report in terminalreporter.stats.get(verdict, []):
            for kind, point in (value for name, value in report.user_properties if name == "fault"):
                counts[kind][0] += 1
                counts[kind][1] += verdict == "passed"
                if config.getoption("verbose") > 0 or verdict == "failed":
                    terminalreporter.write_line(f"{verdict} {kind}: {point}")
    if not counts:
        return
    counts["all"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    table = ["| where | kill points tried | equal afterwards |", "|---|---|---|"]
    table += [f"| {kind} | {tried} | {equal} |" for kind, (tried, equal) in counts.items()]
    terminalreporter.section("kill points")
    terminalreporter.write_line("\n".join(table))
    complete = [Path(folder).resolve() for folder in config.args] == [
        HERE
    ] and "deselected" not in terminalreporter.stats
    if WHOLE and complete and exitstatus == 0:
        today, machine = datetime.date.today().isoformat(), f"{os.cpu_count()} CPU cores, {platform.machine()}"
        note = f"`make faults`, {today}, {machine}, Python {platform.python_version()}, seed {SEED}:"
        before, rest = PAGE.read_text().split(BEGIN)
        after = rest.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}{note}\n\n" + "\n".join(table) + f"\n{END}{after}")
