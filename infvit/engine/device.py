"""Where and in which precision a run computes, and how its random numbers are seeded."""

import contextlib
import gc
import os
import random
from collections.abc import Iterator

import numpy as np
import torch

from infvit.errors import ConfigError


def select_device(name: str) -> torch.device:
    """Returns the device for `auto`, `cpu`, `cuda` or `mps`.

    Raises:
        ConfigError: the device is not there.
    """
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(device for device in ("cuda", "mps", "cpu") if available[device])
    if not available[name]:
        have = ", ".join(device for device, there in available.items() if there)
        raise ConfigError(f"engine.device={name} is not available on this machine; available: {have}.")
    # With an index: several processes have a GPU each, which `join_processes` made the current one.
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def select_precision(name: str, device: torch.device) -> torch.dtype:
    """Returns the dtype of matrix products for `auto`, `fp32`, `bf16` or `fp16`; auto is bf16 on CUDA, else fp32."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def autocast(device: torch.device, precision: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """Returns the context of a forward pass in the given precision."""
    if precision == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=precision)


def seed_update(seed: int, update: int, device: torch.device, rank: int = 0) -> None:
    """Seeds dropout and stochastic depth from (seed, update, rank), so that there is no random state to save.

    Not by `torch.manual_seed`: for every kind of device that is not in use it queues the call, with its traceback.
    """
    number = int(np.random.SeedSequence((seed, update, 2, rank)).generate_state(1, np.uint64)[0] >> 1)
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
    elif device.type == "mps":
        torch.mps.manual_seed(number)


def seed_all(seed: int) -> None:
    """Seeds every generator, for the initial weights."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def forget_memory() -> None:
    """Lets go of what an earlier job of a sweep left on the GPU, and of the peak it reached."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def backend_settings(deterministic: bool, tf32: bool, cudnn_benchmark: bool) -> Iterator[None]:
    """Applies torch's global switches for one run and puts the old values back: a sweep runs many in one process."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    saved = (torch.are_deterministic_algorithms_enabled(), matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark)
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch refuses cuBLAS without it
    matmul.allow_tf32 = cudnn.allow_tf32 = tf32
    cudnn.benchmark = cudnn_benchmark and not deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(saved[0])
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = saved[1:]
