"""Modules import only what lies below them."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "infvit"

# From the bottom up. What stands in one line may not import each other.
LAYERS = [
    {"errors", "version"},
    {"config"},
    {"attention"},
    {"convert"},
    {"models"},
    {"data", "recipe"},
    {"metrics"},
    {"engine"},
    {"evaluation"},
    {"reports", "cluster"},
    {"sweep", "report"},
    {"cli"},
]
# The package itself registers attention and models; the checks for users stand on attention and convert alone.
SPECIAL = {
    "": {"attention", "convert", "models", "version"},
    "testing": {"attention", "convert", "errors", "testing"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def unit(path: Path) -> str:
    """Returns the module or sub-package of a file, e.g. `engine`; `` for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imported(path: Path) -> set[str]:
    """Returns the units of infvit that a file imports, anywhere in it."""
    units = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "infvit" else [node.module]
            )
        else:
            continue
        units |= {name.split(".")[1] for name in names if name.startswith("infvit.")}
    return units


def test_every_unit_has_its_layer():
    known = set().union(*LAYERS) | SPECIAL.keys()
    assert {unit(path) for path in FILES} == known
    assert sum(map(len, LAYERS)) == len(set().union(*LAYERS))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path):
    own = unit(path)
    if own in SPECIAL:
        allowed = SPECIAL[own]
    else:
        level = next(i for i, layer in enumerate(LAYERS) if own in layer)
        allowed = set().union(*LAYERS[:level]) | {own}
    assert imported(path) <= allowed


def test_the_check_sees_every_form(tmp_path: Path):
    file = tmp_path / "x.py"
    file.write_text(
        "import infvit.data\nfrom infvit import engine\nfrom infvit.models.build import f\n"
        "def g():\n    import infvit.reports.curves\n    from infvit.cli import launch\n"
    )
    assert imported(file) == {"data", "engine", "models", "reports", "cli"}
