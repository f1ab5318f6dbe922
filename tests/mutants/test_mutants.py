"""The runner of mutants, on a small package of its own, and the freshness of all lists."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

RUNNER = Path(__file__).with_name("run.py")


@pytest.fixture
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants_run", RUNNER)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package `infvit` that adds and never subtracts, with a test of the first only."""
    files = {
        "infvit/__init__.py": "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n",
        "tests/test_it.py": "import infvit\n\n\ndef test_add():\n    assert infvit.add(2, 1) == 3\n",
        "ignored.txt": "x",
        ".gitignore": "ignored.txt\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


def plant(project: Path, name: str, find: str, replace: str, tests: str = "tests/test_it.py"):
    folder = project / "tests" / "mutants"
    folder.mkdir(exist_ok=True)
    with (folder / "list.toml").open("a") as file:
        file.write(
            f"[[mutant]]\nname = '{name}'\nfile = 'infvit/__init__.py'\nfind = '{find}'\nreplace = '{replace}'\n"
            f"tests = '{tests}'\n"
        )


def run(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUNNER), "--root", str(project), "--preload", "pytest", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_lists_fit_the_code(runner: ModuleType):
    """No test runs: every `find` occurs exactly once, every selection names existing files."""
    mutants = runner.load(RUNNER.parent)
    assert mutants
    for mutant in mutants:
        assert (runner.ROOT / mutant.file).read_text().count(mutant.find) == 1, mutant.name
        assert (runner.ROOT / mutant.tests.split()[0].split("::")[0]).exists(), mutant.name


def test_the_copy_holds_what_git_does_not_ignore(runner: ModuleType, project: Path, tmp_path_factory):
    (project / "untracked.py").write_text("")
    target = tmp_path_factory.mktemp("copy")
    runner.copy_tree(project, target)
    copied = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert copied == {".gitignore", "untracked.py", "infvit/__init__.py", "tests/test_it.py"}


@pytest.mark.slow
def test_killed_and_survived(project: Path):
    plant(project, "caught", "a + b", "a * b")
    alone = run(project)
    assert (alone.returncode, "1 killed, 0 SURVIVED" in alone.stdout) == (0, True), alone
    plant(project, "missed", "a - b", "b - a")
    both = run(project)
    assert (both.returncode, "1 killed, 1 SURVIVED" in both.stdout) == (1, True), both
    assert run(project, "caug").returncode == 0
    assert "a + b" in (project / "infvit/__init__.py").read_text(), "the working tree is left alone"


def test_a_bug_that_stops_all_tests_is_not_a_success(project: Path):
    plant(project, "syntax", "a + b", "a +")
    result = run(project)
    assert (result.returncode, "1 BROKEN" in result.stdout) == (1, True), result


def test_endless_loop_times_out(project: Path):
    plant(project, "hang", "return a + b", 'return add(a, b) if __import__("time").sleep(60) else 3')
    result = run(project, "--timeout", "4")
    assert (result.returncode, "1 timed out" in result.stdout) == (0, True), result


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        ({"find": "a % b", "replace": "x"}, "occurs 0 times"),
        ({"find": "return", "replace": "x"}, "occurs 2 times"),
        ({"find": "a + b", "replace": "a + b"}, "changes nothing"),
        ({"find": "a + b", "replace": "a", "tests": "tests/test_it.py -k nothing_like_this"}, "does not pass"),
    ],
)
def test_stale_lists(project: Path, mutant: dict[str, str], message: str):
    plant(project, "stale", **mutant)
    result = run(project)
    assert (result.returncode, message in result.stderr) == (1, True), result


def test_tests_that_fail_without_a_bug(project: Path):
    plant(project, "any", "a + b", "a * b")
    (project / "tests/test_it.py").write_text("def test_it():\n    assert False, 'on its own'\n")
    result = run(project)
    assert (result.returncode, "on its own" in result.stderr) == (1, True), result
    assert run(project, "no-such-name").returncode == 1
