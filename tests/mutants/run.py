"""Plants known bugs, one at a time, and checks that the tests notice: `python tests/mutants/run.py [NAME-PART]`.

Every `tests/mutants/*.toml` lists bugs:

    [[mutant]]
    name = "models-skip-tanh"
    file = "infvit/models/infvit.py"
    find = "self.pooler_act(self.pooler(x))"       # must occur exactly once in the file
    replace = "self.pooler(x)"
    tests = "tests/models -k straight_line"        # what pytest is given; must pass without the bug

Each bug is planted in a copy of the working tree and its tests run there. A bug that all of them pass is a gap in the
tests. The exit status is 1 if there is one, or if a bug leaves the tests unable to run at all.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "infvit"
KILLED, SURVIVED, TIMED_OUT, BROKEN = "killed", "SURVIVED", "timed out", "BROKEN"


class StaleError(Exception):
    """A list of mutants does not fit the code."""


@dataclass(frozen=True)
class Mutant:
    """One planted bug; see the module's docstring."""

    name: str
    file: str
    find: str
    replace: str
    tests: str

    def apply(self, root: Path) -> None:
        """Plants the bug in the tree at `root`."""
        path = root / self.file
        text = path.read_text() if path.is_file() else ""
        if (count := text.count(self.find)) != 1:
            raise StaleError(f"{self.name}: `find` occurs {count} times in {self.file}, not once.")
        path.write_text(text.replace(self.find, self.replace))


@dataclass(frozen=True)
class Outcome:
    """What pytest said: a verdict, its output, and the seconds it took."""

    verdict: str
    output: str
    seconds: float


def load(folder: Path) -> list[Mutant]:
    """Reads all lists of mutants in a folder."""
    mutants: dict[str, Mutant] = {}
    keys = {field.name for field in fields(Mutant)}
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text()).get("mutant", []):
            if entry.keys() != keys:
                raise StaleError(f"{path.name}: {entry.get('name', entry)}: keys {sorted(entry)}, not {sorted(keys)}.")
            mutant = Mutant(**entry)
            if mutant.name in mutants:
                raise StaleError(f"{path.name}: two mutants are called {mutant.name}.")
            if not mutant.find or mutant.find == mutant.replace:
                raise StaleError(f"{path.name}: {mutant.name} changes nothing.")
            mutants[mutant.name] = mutant
    return list(mutants.values())


def copy_tree(root: Path, target: Path) -> None:
    """Copies tracked and untracked files, not the ignored ones."""
    listing = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, target / name)


def run_tests(root: Path, selection: str, timeout: float) -> Outcome:
    """Runs pytest on a selection in the tree at `root`, importing the package from there."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(selection)]
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that what the tests started ends with them
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return Outcome(TIMED_OUT, process.communicate()[0], time.monotonic() - start)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    # 0: all passed; 1: a test failed; anything else: no test came to a verdict
    verdict = {0: SURVIVED, 1: KILLED}.get(process.returncode, BROKEN)
    return Outcome(verdict, output, time.monotonic() - start)


def check_import(root: Path) -> None:
    """Makes sure that a copy tests itself and not the installed package."""
    code = f"import {PACKAGE}; print({PACKAGE}.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout
    if not Path(found.strip()).is_relative_to(root):
        raise StaleError(f"the copy in {root} imports {found.strip()}.")


def run_all(mutants: Iterable[Mutant], root: Path, jobs: int, timeout: float) -> dict[str, Outcome]:
    """Checks that every selection passes as the code stands, then plants the bugs one by one.

    Raises:
        StaleError: a bug cannot be planted, or tests fail without it.
    """
    mutants = list(mutants)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name, ThreadPoolExecutor(jobs) as pool:
        folder = Path(name).resolve()
        clean = folder / "clean"
        copy_tree(root, clean)
        check_import(clean)

        def plant(number: int, mutant: Mutant) -> Path:
            tree = folder / str(number)
            shutil.copytree(clean, tree)
            mutant.apply(tree)
            return tree

        for number, mutant in enumerate(mutants):  # every stale one is found before any test runs
            shutil.rmtree(plant(number, mutant))

        selections = sorted({mutant.tests for mutant in mutants})
        baseline = dict(zip(selections, pool.map(lambda tests: run_tests(clean, tests, timeout), selections),
                            strict=True))  # fmt: skip
        for selection, outcome in baseline.items():
            if outcome.verdict != SURVIVED:
                raise StaleError(f"without any bug, `pytest {selection}` does not pass:\n{outcome.output[-3000:]}")

        def judge(numbered: tuple[int, Mutant]) -> tuple[str, Outcome]:
            tree = plant(*numbered)
            limit = min(timeout, 60 + 5 * baseline[numbered[1].tests].seconds)
            outcome = run_tests(tree, numbered[1].tests, limit)
            shutil.rmtree(tree)
            print(f"{outcome.verdict:9}  {outcome.seconds:6.1f} s  {numbered[1].name}", flush=True)
            return numbered[1].name, outcome

        return dict(pool.map(judge, enumerate(mutants)))


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", nargs="?", default="", help="only mutants whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--timeout", type=float, default=600, help="most seconds for one selection (default: 600)")
    options = parser.parse_args(arguments)
    try:
        mutants = [mutant for mutant in load(root / "tests" / "mutants") if options.name in mutant.name]
        if not mutants:
            raise StaleError(f"no mutant has {options.name!r} in its name.")
        outcomes = run_all(mutants, root, options.jobs, options.timeout)
    except StaleError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 1
    for name, outcome in outcomes.items():
        if outcome.verdict == BROKEN:
            print(f"\n{name}: no test came to a verdict:\n{outcome.output[-1500:]}")
    counts = {v: sum(o.verdict == v for o in outcomes.values()) for v in (KILLED, SURVIVED, TIMED_OUT, BROKEN)}
    print(f"{len(outcomes)} mutants: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(bool(counts[SURVIVED] or counts[BROKEN]))


if __name__ == "__main__":
    sys.exit(main())
