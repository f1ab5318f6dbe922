"""`docs/configuration.md` from the dataclasses of `infvit/config/` and the recipe files.

python -m infvit.reports.configuration > docs/configuration.md
"""

from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from infvit.config import EvalConfig, RecipeConfig, TrainConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

INTRO = """\
# Configuration

Written by `python -m infvit.reports.configuration > docs/configuration.md` from `infvit/config/`; do not edit.

Every key stands on the command line as `key=value`, the same way in `train.py` and in `eval.py`:

```sh
python train.py model=infvit_pure_mini recipe.lr=1e-3 epochs=20 batch_size=128
python eval.py checkpoint=runs/my_run weights=ema
```

**Groups.** `model=`, `data=`, `recipe=`, `engine=`, `logger=` and `experiment=` each choose a file of
`configs/GROUP/`; the keys inside are reached with a dot (`data.root=...`). A file sets some keys, the others keep the
defaults below, and what stands on the command line wins. A recipe sets `epochs` and `batch_size` too. An experiment
chooses files of the other groups (`experiment=infvit_linear_4l_imagenet`). `model=timm/NAME` is every model of timm's
registry; a model that your own module registers (`imports=[my_pkg.models]`) is named with `model.name=NAME`.

| group | files |
|---|---|
{groups}

**Unknown keys and names** are refused, and the closest known ones are offered; only below `model.args` (and `data` of
`eval.py`) any key may stand. `null` unsets a key: `recipe.ema_decay=null`. Lists stand in brackets:
`'logger.tags=[a,b]'`.

**Paths with `=`, spaces, commas or brackets** need two pairs of quotes, one for the shell and one for Hydra:

```sh
python eval.py 'checkpoint="/data/my runs (v2)/lr=0.1,a.pt"'
```

A backslash works for a single sign (`'checkpoint=runs/lr\\=0.1.pt'`); in a file of `configs/` plain YAML quoting does.

**Sweeps.** `-m` runs every combination of values separated by commas, one after the other, each in a folder of
its own ([Sweeps](sweeps.md)):

```sh
python train.py -m model=vit_mini,infvit_pure_mini,infvit_linear_mini seed=0,1,2
```

A job that fails does not end the sweep, but makes its exit code 1; Ctrl-C ends it.
"""


def render() -> str:
    """Returns the page."""
    groups = "\n".join(_row(group, _files(group)) for group in _groups())
    parts = [INTRO.format(groups=groups), "## `train.py`\n", _table(TrainConfig)]
    for f in fields(TrainConfig):
        if isinstance(f.type, type) and is_dataclass(f.type):
            parts += [f"### {f.name}\n", f"{_docstring(f.type)}\n", _table(f.type, f"{f.name}.")]
    parts += ["## The recipes side by side\n", _recipes(), "## `eval.py`\n", f"{_docstring(EvalConfig)}\n"]
    own = [f for f in fields(EvalConfig) if isinstance(f.type, type) and is_dataclass(f.type) and f.name != "model"]
    parts.append(_table(EvalConfig))
    for f in own:
        parts += [f"### {f.name}\n", f"{_docstring(f.type)}\n", _table(f.type, f"{f.name}.")]  # type: ignore[arg-type]
    return "\n".join(parts)


def _groups() -> list[str]:
    order = [f.name for f in fields(TrainConfig)] + ["experiment"]
    found = {folder.name for folder in CONFIGS.iterdir() if any(folder.glob("*.yaml"))}  # hydra/ has subgroups only
    return [name for name in order if name in found] + sorted(found - set(order))


def _files(group: str) -> str:
    names = [f"`{path.stem}`" for path in sorted((CONFIGS / group).glob("*.yaml"))]
    return ", ".join(names + (["`timm/NAME`"] if group == "model" else []))


def _table(schema: type, prefix: str = "") -> str:
    leaves = [f for f in fields(schema) if not (isinstance(f.type, type) and is_dataclass(f.type))]
    rows = [_row(f"`{prefix}{f.name}`", _type(f), _value(_default(f)), f.metadata["help"]) for f in leaves]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _recipes() -> str:
    """Compares the values of the recipe files."""
    trees = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CONFIGS / "recipe").glob("*.yaml"))}
    lines = [_row("key", *(f"`recipe={name}`" for name in trees)), "|---" * (len(trees) + 1) + "|"]
    for key in ("epochs", "batch_size"):
        lines.append(_row(f"`{key}`", *(_value(tree[key]) for tree in trees.values())))
    for f in fields(RecipeConfig):
        if f.name != "name":
            lines.append(_row(f"`recipe.{f.name}`", *(_value(tree["recipe"][f.name]) for tree in trees.values())))
    return "\n".join([*lines, ""])


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(f: Field[Any]) -> str:
    return f.type.__name__ if isinstance(f.type, type) and not hasattr(f.type, "__args__") else str(f.type)


def _default(f: Field[Any]) -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()


def _value(value: Any) -> str:
    """Writes a value as it stands on the command line."""
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower().replace('none', 'null')}`"
    if isinstance(value, list):
        return f"`[{', '.join(map(_number, value))}]`"
    return f"`{_number(value)}`"


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _docstring(schema: type) -> str:
    return " ".join((schema.__doc__ or "").split())


if __name__ == "__main__":
    print(render(), end="")
