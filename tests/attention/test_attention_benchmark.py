"""The benchmark of the attention branch, at a small size."""

import importlib.util
from pathlib import Path

import pytest

from infvit.attention import LinearInfSA, list_mechanisms

SMALL = ["--tokens", "9", "--width", "16", "--heads", "2", "--repeats", "2", "--backward"]


@pytest.fixture
def benchmark():
    path = Path(__file__).resolve().parents[2] / "benchmarks/attention.py"
    spec = importlib.util.spec_from_file_location("attention_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_prints_every_candidate_and_the_goals(benchmark, capsys):
    benchmark.main([*SMALL, "--mechanisms", "infsa_linear", "infsa_pure", "softmax"])
    out = capsys.readouterr().out
    for name in ("one d x d projection", "infsa_linear, absorbed", "infsa_linear, plain form", "infsa_pure", "softmax"):
        assert f"\n{name} " in out
    assert "9 tokens, width 16, 2 heads, float32, forward + backward" in out
    assert out.count("reached") == 2


def test_every_registered_mechanism_is_timed(benchmark, capsys):
    benchmark.main(SMALL)
    out = capsys.readouterr().out
    assert [name for name in list_mechanisms() if f"\n{name}" not in out] == []


def test_goals_are_judged_by_the_medians(benchmark, capsys):
    times = {benchmark.PROJECTION: 10.0, "x, absorbed": 29.0, "x, plain form": 59.0}
    benchmark.report({name: (t, t, t) for name, t in times.items()})
    out = capsys.readouterr().out
    assert "faster than plain: 2.03x, reached" in out
    assert "one projection: 2.90x, reached" in out
    benchmark.report({name: (t, t, t) for name, t in {**times, "x, absorbed": 31.0}.items()})
    assert capsys.readouterr().out.count("NOT reached") == 2


def test_nothing_is_timed_when_the_forms_differ(benchmark, monkeypatch, capsys):
    absorbed = LinearInfSA.absorbed
    monkeypatch.setattr(LinearInfSA, "absorbed", lambda *args: absorbed(*args) * 1.001)
    with pytest.raises(AssertionError, match="not close"):
        benchmark.main(SMALL)
    assert "ms" not in capsys.readouterr().out
