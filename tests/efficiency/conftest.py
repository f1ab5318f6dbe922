"""What stands in for mechanisms, machine and clock."""

import pytest
from efficiency_doubles import BROKEN, Clock, Machine

from infvit.attention import mechanism, register_mechanism
from infvit.evaluation.efficiency import run


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the wrong mechanisms, for one test."""
    monkeypatch.setattr(mechanism, "_MECHANISMS", dict(mechanism._MECHANISMS))
    for cls in BROKEN:
        register_mechanism(cls)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares a test the counting at three more sizes; `test_flops` looks at it, and the command does it."""
    monkeypatch.setattr(run, "complexity", lambda model, patch: "linear" if "linear" in model else "quadratic")
