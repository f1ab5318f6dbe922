"""Shared by all tests: one thread and a fixed seed, so that a test gives the same numbers alone and in the suite."""

import os
import random

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    """Seeds every global generator before each test."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
