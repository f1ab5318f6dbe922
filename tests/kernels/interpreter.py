"""Triton kernels in tests: on a GPU where there is one, and always on the CPU in Triton's interpreter.

A file of Triton tests marks what runs kernels with `needs_triton`, puts its tensors on `DEVICE`, and has one test that
calls `run_in_interpreter(__file__)`: TRITON_INTERPRET=1 must be set before Triton is imported, hence another process.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or not (INTERPRETED or DEVICE == "cuda"),
    reason="no CUDA device; on the CPU this test runs in Triton's interpreter, started by another test",
)
needs_no_interpreter = pytest.mark.skipif(
    INTERPRETED or find_spec("triton") is None, reason="this is the interpreter already, or Triton is not installed"
)
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter multiplies bfloat16 wrongly")


def run_in_interpreter(file: str) -> int:
    """Runs the tests of a file in Triton's interpreter.

    Returns:
        How many passed.

    Raises:
        AssertionError: one failed, with pytest's output.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", file]
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    return int(passed[1]) if passed else 0
