"""Turning a request to stop into a clean stop between two updates."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from infvit.errors import UserError

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Ctrl-C; the end, from a scheduler; and what a scheduler is told to send ahead of it (submitit: SIGUSR2)."""


class Interrupted(UserError):
    """The run was asked to stop and has saved its state."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(f"{message} ({signal.Signals(signum).name})")
        self.signum = signum
        # The shell's convention: 130 for Ctrl-C, 143 for SIGTERM; the others announce a SIGTERM.
        self.exit_code = 128 + (signum if signum == signal.SIGINT else signal.SIGTERM)


class StopRequest:
    """Remembers a signal until the loop looks. A second Ctrl-C interrupts at once.

    Args:
        patient: it does not. Under torchrun one Ctrl-C arrives twice, from the terminal and from torchrun.
    """

    def __init__(self, patient: bool = False) -> None:
        self.signum: int | None = None
        self.patient = patient

    def __bool__(self) -> bool:
        return self.signum is not None

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler."""
        if self.signum is not None and signum == signal.SIGINT and not self.patient:
            raise KeyboardInterrupt
        self.signum = signum


@contextmanager
def stop_request(patient: bool = False) -> Iterator[StopRequest]:
    """Listens for the signals that stop a run while the context is open, and puts the old handlers back.

    The old ones may be those of submitit, which would start the job again without saving. One of several processes
    (`patient`) that ends with an error goes on to hold SIGTERM off: where one has gone torchrun sends it to the others
    within a tenth of a second, and they still have to say what they saw.
    """
    request = StopRequest(patient)
    if threading.current_thread() is not threading.main_thread():
        yield request  # handlers can only be set in the main thread
        return
    saved = {s: signal.signal(s, request.handle) for s in STOPPING}
    try:
        yield request
    except Exception:
        if patient:
            del saved[signal.SIGTERM]
        raise
    finally:
        for s, handler in saved.items():
            signal.signal(s, handler)
