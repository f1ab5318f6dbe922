"""docs/mechanisms.md names every mechanism of the package, with what it declares and takes."""

from dataclasses import fields
from pathlib import Path

import timm

from infvit.attention import Capabilities, get_mechanism, hyperparameters, list_mechanisms

TABLE = Path(__file__).resolve().parents[2] / "docs/mechanisms.md"


def rows() -> dict[str, list[str]]:
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in cells if len(row) == 7}


def test_every_mechanism_has_a_row_that_is_true():
    ours = [name for name in list_mechanisms() if get_mechanism(name).__module__.startswith("infvit.")]
    assert sorted(rows()) == ours
    for name, (*_, capabilities, taken, model) in rows().items():
        cls = get_mechanism(name)
        declared = [f.name for f in fields(Capabilities) if getattr(cls.capabilities, f.name)]
        assert capabilities == ", ".join(declared), name
        assert taken == ", ".join(sorted(hyperparameters(cls))), name
        layers = timm.create_model(model.strip("`"), device="meta").blocks
        assert {block.attn.core.name for block in layers} == {name}
