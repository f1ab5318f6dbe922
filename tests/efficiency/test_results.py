"""`efficiency.json`: what it says of a benchmark that is not finished, and what becomes of a damaged one."""

import json
from pathlib import Path
from typing import Any

import pytest
from efficiency_doubles import MODELS, Machine, cells_of, measure, row_of

from infvit import report
from infvit.evaluation.efficiency.cells import Task

pytestmark = pytest.mark.usefixtures("growth")


class Interrupted(Machine):
    """Ctrl-C comes at a certain size."""

    size = 64

    def __call__(self, task: Task) -> dict[str, Any]:
        if task.cells[0].resolution == self.size:
            raise KeyboardInterrupt
        return super().__call__(task)


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert report.main([str(folder)]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_what_was_interrupted_says_so(tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path / "a", Interrupted(), sizes=(32, 64), modes=["inference", "training"], highest=128)
    # Two modes, two sizes, three models, less the group that is done; and a search for each mode and model.
    assert f"**Unfinished**: {2 * 2 * 3 - 3 + 2 * 3} of the cells" in shown(tmp_path / "a", capsys)
    measure(tmp_path / "b", machine, sizes=(96,))
    assert "Unfinished" not in shown(tmp_path / "b", capsys)
    assert report.main([str(tmp_path / "a"), str(tmp_path / "b"), "--efficiency", str(tmp_path / "c")]) == 0
    assert f"**Unfinished**: {2 * 2 * 3 - 3 + 2 * 3} of the cells" in capsys.readouterr().out


def test_searches_count_when_they_are_done(tmp_path: Path, machine: Machine) -> None:
    assert measure(tmp_path, machine, highest=64, highest_step=32)["to_do"] == 0


def test_the_trained_form_is_measured_when_it_is_asked_for(
    tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    folded, trained = (measure(tmp_path / str(form), machine, form=form, highest=64) for form in (True, False))
    cells = [task.cells[0].reparameterize for task in machine.asked]
    assert cells == sorted(cells, reverse=True)  # all of the first benchmark, none of the second
    assert {*cells} == {True, False}
    for model in MODELS:
        assert row_of(folded, model)["flops"] < row_of(trained, model)["flops"]
    assert "`infvit.reparameterize`" in shown(tmp_path / "True", capsys)
    assert "reparameterize=false" in shown(tmp_path / "False", capsys)


def _without(key: str) -> Any:
    return lambda result: {name: value for name, value in result.items() if name != key}


@pytest.mark.parametrize(
    "change",
    [
        lambda result: json.dumps(result)[:200],
        lambda result: "",
        lambda result: [],
        _without("rows"),
        _without("settings"),
        lambda result: {**result, "rows": [{}]},
        lambda result: {**result, "format": 99},
    ],
    ids=["cut off", "empty", "a list", "no rows", "no settings", "an empty row", "format"],
)
def test_a_damaged_result_is_one_line_with_its_path(
    tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str], change: Any
) -> None:
    result = measure(tmp_path, machine)
    changed = change(result)
    (tmp_path / "efficiency.json").write_text(changed if isinstance(changed, str) else json.dumps(changed))
    for more in ([], ["--efficiency", str(tmp_path / "joined")]):
        assert report.main([str(tmp_path), *more]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"error: {tmp_path / 'efficiency.json'}")
        assert len(said.splitlines()) == 1


def test_a_ratio_never_stands_beside_a_wrong_result(
    tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    result = measure(tmp_path, machine)
    row = row_of(result, MODELS[1])
    row["check"] = {**row["check"], "state": "wrong"}
    (tmp_path / "efficiency.json").write_text(json.dumps(result))
    text = shown(tmp_path, capsys)
    assert "1.00" in cells_of(text, MODELS[0])
    assert "wrong" in cells_of(text, MODELS[1])
    assert "1.00" not in cells_of(text, MODELS[1])
