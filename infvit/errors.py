"""Errors that are meant for the user: shown as one line, without a traceback."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Something the user can mend. The message says what is wrong, where, and what to do.

    Attributes:
        shown_elsewhere: another process of the run shows the same error, so this one need not.
    """

    shown_elsewhere = False


class ConfigError(UserError, ValueError):
    """A configuration value is not allowed, or two values do not go together."""


class DataError(UserError):
    """The data set on disk is not what the configuration promises."""


class CheckpointError(UserError):
    """A checkpoint cannot be read, or does not belong to the model it is loaded into."""


class TrainingError(UserError):
    """Training cannot go on (the loss is not finite, say)."""


class MissingExtraError(UserError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional dependency: pip install 'infvit[{extra}]'")


def did_you_mean(name: str, known: Iterable[str], *, count: int = 3) -> str:
    """Returns a sentence that offers the known names closest to `name`, or lists them when none is close."""
    known = sorted(set(known))
    close = get_close_matches(name, known, n=count, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(repr(c) for c in close)}?"
    listed = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
    return f"Known: {listed}."
