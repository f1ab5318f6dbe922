"""Turning a request to stop into a clean stop between two updates."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from infvit.errors import UserError


class Interrupted(UserError):
    """The run was asked to stop and has saved its state."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum  # the shell's convention: 130 for Ctrl-C, 143 for SIGTERM


class StopRequest:
    """Remembers a signal until the loop looks. A second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def __bool__(self) -> bool:
        return self.signum is not None

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler."""
        if self.signum is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = signum


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Listens for SIGINT and SIGTERM while the context is open, and puts the old handlers back."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # handlers can only be set in the main thread
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    saved = [signal.signal(s, request.handle) for s in signals]
    try:
        yield request
    finally:
        for s, handler in zip(signals, saved, strict=True):
            signal.signal(s, handler)
