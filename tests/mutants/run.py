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

The runner imports the large libraries once and forks for each bug: pytest then starts in a second instead of ten.
"""

import argparse
import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "infvit"
PRELOADED = "pytest torch timm torchvision.transforms.v2 hydra matplotlib.figure sklearn.datasets scipy.stats"
"""Imported before anything is forked. None of them starts a thread."""
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


@dataclass(frozen=True)
class Job:
    """Tests to run in a tree that is made when their turn comes.

    Attributes:
        key: What the outcome is of.
        tree: Makes the tree and returns it.
        tests: What pytest is given.
        limit: Most seconds.
    """

    key: str
    tree: Callable[[], Path]
    tests: str
    limit: float


def run_jobs(jobs: Iterable[Job], at_a_time: int, logs: Path) -> Iterator[tuple[Job, Outcome]]:
    """Runs pytest for each job, several at a time, and yields the outcomes as they come."""
    waiting = deque(jobs)
    running: dict[int, tuple[Job, Path, float]] = {}  # by process
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                job = waiting.popleft()
                root, log = job.tree(), logs / f"{len(waiting)}.log"
                running[_fork(root, job.tests, log)] = job, log, time.monotonic()
            time.sleep(0.05)
            for pid, (job, log, start) in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                seconds = time.monotonic() - start
                if not ended and seconds < job.limit:
                    continue
                del running[pid]
                _kill(pid, wait=not ended)
                # 0: all passed; 1: a test failed; anything else: no test came to a verdict
                code = os.waitstatus_to_exitcode(status)
                verdict = {0: SURVIVED, 1: KILLED}.get(code, BROKEN) if ended else TIMED_OUT
                yield job, Outcome(verdict, log.read_text(errors="replace"), seconds)
    finally:
        for pid in running:
            _kill(pid, wait=True)


def _fork(root: Path, tests: str, log: Path) -> int:
    """Starts pytest in a tree, importing the package from there; returns its process."""
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        os.setsid()  # so that what the tests start ends with them
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(root)
        os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        sys.dont_write_bytecode = True
        sys.path[0] = str(root)
        sys.argv = ["pytest"]
        import pytest

        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *shlex.split(tests)]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _kill(pid: int, wait: bool) -> None:
    """Ends what is left of a session."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if wait:
        os.waitpid(pid, 0)


def check_import(root: Path) -> None:
    """Makes sure that a copy tests itself and not the installed package."""
    code = f"import {PACKAGE}; print({PACKAGE}.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout
    if not Path(found.strip()).is_relative_to(root):
        raise StaleError(f"the copy in {root} imports {found.strip()}.")


def run_all(mutants: Iterable[Mutant], root: Path, at_a_time: int, timeout: float) -> dict[str, Outcome]:
    """Checks that every selection passes as the code stands, then plants the bugs one by one.

    Raises:
        StaleError: a bug cannot be planted, or tests fail without it.
    """
    mutants = list(mutants)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name).resolve()
        clean = folder / "clean"
        copy_tree(root, clean)
        check_import(clean)

        def plant(mutant: Mutant) -> Path:
            tree = folder / str(mutants.index(mutant))
            shutil.copytree(clean, tree)
            mutant.apply(tree)
            return tree

        for mutant in mutants:  # every stale one is found before any test runs
            shutil.rmtree(plant(mutant))

        seconds = {}
        whole = [Job(tests, lambda: clean, tests, timeout) for tests in sorted({mutant.tests for mutant in mutants})]
        for job, outcome in run_jobs(whole, at_a_time, folder):
            if outcome.verdict != SURVIVED:
                raise StaleError(f"without any bug, `pytest {job.tests}` does not pass:\n{outcome.output[-3000:]}")
            seconds[job.tests] = outcome.seconds

        def limit(mutant: Mutant) -> float:
            return min(timeout, 60 + 5 * seconds[mutant.tests])

        planted = [Job(m.name, partial(plant, m), m.tests, limit(m)) for m in mutants]
        outcomes = {}
        for job, outcome in run_jobs(planted, at_a_time, folder):
            outcomes[job.key] = outcome
            print(f"{outcome.verdict:9}  {outcome.seconds:6.1f} s  {job.key}", flush=True)
        return outcomes


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", nargs="?", default="", help="only mutants whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--timeout", type=float, default=600, help="most seconds for one selection (default: 600)")
    parser.add_argument("--root", type=Path, default=ROOT, help="the working tree (default: this one)")
    parser.add_argument("--preload", default=PRELOADED, help="modules to import before forking")
    options = parser.parse_args(arguments)
    root: Path = options.root
    os.environ["OMP_NUM_THREADS"] = "1"
    for module in options.preload.split():
        importlib.import_module(module)
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
