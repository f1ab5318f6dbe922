"""How a key of the configuration is declared and checked."""

from dataclasses import field, fields, is_dataclass
from typing import Any

from infvit.errors import ConfigError

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda", "mps")


def key(default: Any, help: str) -> Any:
    """Declares a configuration key with its default and the sentence that documents it."""
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata={"help": help})
    return field(default=default, metadata={"help": help})


def require(condition: bool, message: str) -> None:
    """Raises a `ConfigError` with the message where the condition does not hold."""
    if not condition:
        raise ConfigError(message)


def require_range(config: object, prefix: str, names: str, low: float, high: float = float("inf")) -> None:
    """Requires the fields named in a string to lie within bounds, or to be None."""
    for name in names.split():
        value = getattr(config, name)
        if value is not None:
            allowed = f"at least {low}" if high == float("inf") else f"between {low} and {high}"
            require(low <= value <= high, f"{prefix}{name}={value} must be {allowed}.")


def leaf_keys(schema: type, prefix: str = "") -> list[str]:
    """Returns every key of a configuration dataclass in dotted form."""
    keys: list[str] = []
    for f in fields(schema):
        if isinstance(f.type, type) and is_dataclass(f.type):
            keys += leaf_keys(f.type, f"{prefix}{f.name}.")
        else:
            keys.append(prefix + f.name)
    return keys
