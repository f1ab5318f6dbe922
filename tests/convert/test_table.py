"""The models of docs/convert-models.md, checked again, and the page."""

from pathlib import Path

import pytest

from infvit.errors import ConfigError
from infvit.testing.converted import TOLERANCE, examine, subjects

PAGE = Path(__file__).resolve().parents[2] / "docs" / "convert-models.md"
SUBJECTS = subjects()


@pytest.mark.parametrize("mechanism", ["infsa_pure", "infsa_linear"])
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: f"{subject.library}-{subject.name}")
@pytest.mark.filterwarnings(
    "ignore:Linear InfSA gives", "ignore:enable_nested_tensor", "ignore:The PyTorch API of nested"
)
def test_a_converted_model(subject, mechanism):
    if mechanism == "infsa_linear" and not subject.linear:
        with pytest.raises(ConfigError, match="does not support"):
            examine(subject, mechanism, compiled=False)
        assert f"| {subject.library} | {subject.name} | {mechanism} | refused" in PAGE.read_text()
        return
    row = examine(subject, mechanism, compiled=False)
    assert row.scale > 0.01
    assert row.error <= TOLERANCE
    assert row.causal is not False
    assert row.padding is not False
    assert row.gradients
    counts = f"{len(row.report.converted)} / {len(row.report.refused)}"
    assert f"| {subject.library} | {subject.name} | {mechanism} | {counts} |" in PAGE.read_text()


def test_the_page_shows_nothing_that_failed():
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 2 * len(SUBJECTS)
    for row in rows:
        assert not any("**" in cell for cell in row), row
        assert "refused" in row[3] or (float(row[4]) <= TOLERANCE and row[-1] == "0 |"), row
