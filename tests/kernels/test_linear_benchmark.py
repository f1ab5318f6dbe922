"""The benchmark of Linear InfSA, at a small size."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # it imports its neighbour
    spec = importlib.util.spec_from_file_location("linear_benchmark", BENCHMARKS / "linear.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delitem(sys.modules, "attention")
    for name, value in (("WIDTH", 32), ("HEADS", 4), ("LENGTHS", dict.fromkeys(module.LENGTHS, (1, 3)))):
        monkeypatch.setattr(module, name, value)
    return module


def test_prints_every_time_with_its_goal(benchmark, capsys):
    benchmark.main(["branches", "blocks"])
    out = capsys.readouterr().out
    judged = [key for key in benchmark.REQUIRED_AND_GOAL if key[0] not in ("growth", "memory")]
    assert out.count("(required ") == len(judged)
    for tokens in benchmark.LENGTHS:
        assert out.count(f"1 x {tokens:5}") >= 2


@pytest.mark.parametrize(("value", "word"), [(1.2, "goal"), (1.3, "required"), (1.4, "NOT")])
def test_verdicts(benchmark, value, word):
    assert benchmark.verdict("projection", 4097, value).endswith(f"{word} reached)")
