"""The Triton kernels of Linear InfSA: in Triton's interpreter on a CPU, on a GPU where there is one, and compiled."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("linear_cases.py")

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("dtype", ["float32", "float16"])  # the interpreter's bfloat16 product is wrong
def test_kernels_in_the_interpreter(dtype):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, str(CASES), dtype], env=environment, capture_output=True, text=True)
    assert result.stdout == "all equal\n", result.stderr


@needs_triton
@needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_kernels_on_a_gpu(dtype):
    from linear_cases import check_all

    check_all([getattr(torch, dtype)], "cuda")


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_gpus():
    """To machine code of NVIDIA's Ampere and Hopper, which needs no GPU."""
    result = subprocess.run([sys.executable, str(CASES.with_name("linear_compile.py"))], capture_output=True, text=True)
    assert result.stdout == "compiled 16 kernels\n", result.stdout + result.stderr
