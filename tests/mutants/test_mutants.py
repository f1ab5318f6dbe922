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
def test_killed_and_survived(runner: ModuleType, project: Path, capsys: pytest.CaptureFixture):
    plant(project, "caught", "a + b", "a * b")
    assert runner.main([], project) == 0
    assert "1 killed, 0 SURVIVED" in capsys.readouterr().out
    plant(project, "missed", "a - b", "b - a")
    assert runner.main([], project) == 1
    assert "1 killed, 1 SURVIVED" in capsys.readouterr().out
    assert runner.main(["caug"], project) == 0
    assert "a + b" in (project / "infvit/__init__.py").read_text(), "the working tree is left alone"


def test_a_bug_that_stops_all_tests_is_not_a_success(runner: ModuleType, project: Path, capsys: pytest.CaptureFixture):
    plant(project, "syntax", "a + b", "a +")
    assert runner.main([], project) == 1
    assert "1 BROKEN" in capsys.readouterr().out


@pytest.mark.slow
def test_endless_loop_times_out(runner: ModuleType, project: Path, capsys: pytest.CaptureFixture):
    plant(project, "hang", "return a + b", 'return add(a, b) if __import__("time").sleep(60) else 3')
    assert runner.main(["--timeout", "8"], project) == 0
    assert "1 timed out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        ({"find": "a % b", "replace": "x"}, "occurs 0 times"),
        ({"find": "return", "replace": "x"}, "occurs 2 times"),
        ({"find": "a + b", "replace": "a + b"}, "changes nothing"),
        ({"find": "a + b", "replace": "a", "tests": "tests/test_it.py -k nothing_like_this"}, "does not pass"),
    ],
)
def test_stale_lists(
    runner: ModuleType, project: Path, mutant: dict[str, str], message: str, capsys: pytest.CaptureFixture
):
    plant(project, "stale", **mutant)
    assert runner.main([], project) == 1
    assert message in capsys.readouterr().err


def test_tests_that_fail_without_a_bug(runner: ModuleType, project: Path, capsys: pytest.CaptureFixture):
    plant(project, "any", "a + b", "a * b")
    (project / "tests/test_it.py").write_text("def test_it():\n    assert False, 'on its own'\n")
    assert runner.main([], project) == 1
    assert "on its own" in capsys.readouterr().err
    assert runner.main(["no-such-name"], project) == 1
