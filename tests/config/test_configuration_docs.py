"""The configuration page is what its generator writes."""

import runpy
import sys
from dataclasses import fields
from pathlib import Path

from infvit.config import EvalConfig, TrainConfig, leaf_keys
from infvit.reports.configuration import render

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "configuration.md"


def test_the_page_is_current():
    assert PAGE.read_text() == render(), "python -m infvit.reports.configuration > docs/configuration.md"


def test_every_key_has_a_row_that_explains_it():
    text = render()
    for schema in (TrainConfig, EvalConfig):
        for key in leaf_keys(schema):
            rows = [line for line in text.splitlines() if line.startswith(f"| `{key}` |")]
            assert rows, key
            assert all(len(row.split("|")[-2].strip()) > 5 for row in rows if row.count("|") > 4), key


def test_types_and_defaults():
    text = render()
    assert "| `recipe.opt_betas` | list[float] | `[0.9, 0.999]` | betas of the optimiser |" in text
    assert "| `epochs` | int | `300` | passes over the training split |" in text
    assert "| `data.root` | str \\| None | `null` |" in text
    assert "| `recipe.mixup` | `0.8` | `0.0` |" in text.replace("`0`", "`0.0`")
    assert "| `batch_size` | `1024` | `32` |" in text


def test_every_file_of_every_group_is_named():
    text = render()
    for path in (ROOT / "configs").glob("*/*.yaml"):
        assert f"`{path.stem}`" in text


def test_fields_have_a_help_text():
    for schema in (TrainConfig, *(f.type for f in fields(TrainConfig) if hasattr(f.type, "__dataclass_fields__"))):
        for f in fields(schema):
            assert "help" in f.metadata or hasattr(f.type, "__dataclass_fields__"), f.name


def test_the_command_that_writes_it(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "infvit.reports.configuration")
    runpy.run_module("infvit.reports.configuration", run_name="__main__")
    assert capsys.readouterr().out == PAGE.read_text()
