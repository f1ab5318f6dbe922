"""Ends a run from inside, at a chosen call of one of its functions."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infvit.config import TrainConfig


class Killed(BaseException):
    """Stands for the end of the process: nothing of ours catches it."""


@contextlib.contextmanager
def at_call(place: Any, name: str, number: int, action: Callable[[], Any]) -> Iterator[None]:
    """Does something just before the n-th call (from 1) of a function; it must come to that call. 0: never."""
    original, calls = getattr(place, name), 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            action()
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, wrapped)
        yield
    assert calls >= number


def send(signum: int) -> Callable[[], None]:
    """Sends a real signal to this process, which must be listening to it."""

    def action() -> None:
        assert signal.getsignal(signum) not in (signal.SIG_DFL, signal.default_int_handler)
        signal.raise_signal(signum)

    return action


def die() -> None:
    """Ends the process without a word."""
    raise Killed


def folder_of(config: TrainConfig) -> Path:
    """The run folder that a configuration names."""
    return Path(str(config.run_dir))
