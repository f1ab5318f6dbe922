"""Shared by all tests: one thread and a fixed seed, so that a test gives the same numbers alone and in the suite."""

import multiprocessing
import os
import pickle
import random
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from command import command as command

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    """Seeds every global generator before each test."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _work(rank: int, world_size: int, port: int, work: Callable[[int], Any], answer: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    try:
        result = work(rank)
    except Exception as error:
        shown_elsewhere = getattr(error, "shown_elsewhere", False)
        result = SimpleNamespace(error=type(error).__name__, message=str(error), shown_elsewhere=shown_elsewhere)
    answer.send_bytes(pickle.dumps(result))
    answer.close()
    os._exit(0)  # as a process does that has failed: without a word to the others


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """Runs a function on several processes: `ranks(2, work)` returns what `work(rank)` returned, by rank.

    Where it raised that is a namespace of `error` (the name of its class), `message` and `shown_elsewhere`. They are
    forked, so that they start within milliseconds and know the variables of the test.
    """

    def run(world_size: int, work: Callable[[int], Any], seconds: float = 60) -> list[Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(target=_work, args=(rank, world_size, port, work, pipes[rank][1]))
            for rank in range(world_size)
        ]
        try:
            for process, (_, end) in zip(processes, pipes, strict=True):
                process.start()
                end.close()
            deadline = time.monotonic() + seconds
            results = []
            for rank, (answer, _) in enumerate(pipes):
                assert answer.poll(max(0.0, deadline - time.monotonic())), f"process {rank} does not end"
                results.append(pickle.loads(answer.recv_bytes()))
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()

    return run
