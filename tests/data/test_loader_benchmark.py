"""The benchmark of the loader, at a small size."""

import importlib.util
from pathlib import Path

import pytest
from PIL import Image


@pytest.fixture
def benchmark():
    path = Path(__file__).resolve().parents[2] / "benchmarks/loader.py"
    spec = importlib.util.spec_from_file_location("loader_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_prints_every_path_and_the_goals(benchmark, capsys):
    benchmark.main(["--images", "12", "--batch-size", "4", "--rounds", "1"])
    out = capsys.readouterr().out
    assert "12 JPEGs of 1" in out  # hundred and some KB
    for name in ("timm ", "infvit, resize=timm ", "infvit, resize=torch "):
        assert out.count(f"\n{name}") == 2
    assert "goal 1.15x: " in out
    assert "goal 1.5x: " in out
    assert "grey levels between both resizes over 48 views: mean 0.0" in out


def test_files_have_the_sizes_of_imagenet(benchmark, tmp_path):
    files = benchmark.write_images(tmp_path, 6)
    assert [Image.open(path).size for path in files] == list(benchmark.SIZES)
    assert all(70_000 < path.stat().st_size < 150_000 for path in files)


def test_both_load_the_same_number_of_views(benchmark, tmp_path):
    benchmark.write_images(tmp_path, 12)
    for repeats in (1, 3):
        paths = benchmark.TimmPath(tmp_path, 4, repeats), benchmark.OurPath(tmp_path, 4, repeats, "torch")
        assert [path.epoch(1) for path in paths] == [12, 12]
        if repeats > 1:
            indices = list(paths[0].sampler)
            assert len(set(indices)) == 4
            assert all(indices.count(index) == 3 for index in indices)


def test_parts_add_up(benchmark, tmp_path):
    benchmark.write_images(tmp_path, 8)
    for path in (benchmark.TimmPath(tmp_path, 4, 1), benchmark.OurPath(tmp_path, 4, 1, "timm")):
        parts = benchmark.measure(path, 1)
        assert parts["decode"] + parts["augment"] + parts["collate"] == pytest.approx(parts["worker"])
        assert all(0 < parts[name] < parts["all"] for name in ("decode", "augment", "collate", "worker"))


def test_ratios_are_those_of_the_same_round(benchmark, capsys):
    def row(worker, everything):
        return {"worker": worker, "all": everything, "decode": worker / 2, "augment": worker / 2, "collate": 0.0}

    timm, ours = [row(2, 4), row(20, 40), row(4, 8)], [row(1, 4), row(10, 40), row(1, 4)]
    assert benchmark.report("ours", ours, timm) == {"worker": 2.0, "all": 1.0}
    assert "1000/s   2.00x" in capsys.readouterr().out
