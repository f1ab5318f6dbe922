"""The examples run, and show what they say."""

import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def main(name: str):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_fine_tuning_brings_a_converted_vit_back(library):
    found = main("finetune_vit")(["--library", library, "--epochs", "8", "--scenes", "320"])
    assert found["fine-tuned"] > found["converted"] + 0.08
    assert found["gamma"] == pytest.approx(0.7)
    assert abs(found["gamma, fine-tuned"] - 0.7) > 1e-5


def test_a_block_of_ones_own_learns():
    found = main("block")(steps=100)
    assert found["last loss"] < 0.5 * found["first loss"]
    assert abs(found["gamma"] - 0.7) > 1e-3


@pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers")
def test_rt_detr_runs_and_keeps_its_deformable_attention():
    report = main("rt_detr")([])
    assert report.converted
    assert all("Deformable" in entry.kind for entry in report.refused)
    assert report.refused


@pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers")
def test_llama_learns_from_a_text(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 40)
    found = main("llama_text")(["--text", str(text), "--steps", "40"])
    assert found["last loss"] < 0.7 * found["first loss"]
