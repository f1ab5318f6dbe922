"""The names of the authors' InfSA release (arXiv 2603.00175), so that its users can move. See `docs/from-infsa.md`."""

import re
from typing import Any

from infvit.attention.infsa import EPS
from infvit.errors import ConfigError

VARIANTS = {"pure_infsa": "infsa_pure", "linear_infsa": "infsa_linear"}
NAMES = {
    "variant": "mechanism",
    "rho": "gamma",
    "rho_init": "gamma",
    "rho_trainable": "gamma_trainable",
    "include_patterns": "include",
    "exclude_patterns": "exclude",
}
PATTERNS = ("include_patterns", "exclude_patterns")  # lists of regular expressions


def translate(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments under our names.

    Args:
        arguments: by our names and the release's; None where not given.

    Raises:
        ConfigError: one thing given under both names, a pattern that is none, `copy_weights=False`, another `eps`, or a
            mechanism that is no name.
    """
    if arguments.pop("copy_weights", True) is not True:
        raise ConfigError("copy_weights=False: weights always stay. Draw new ones yourself where you want them.")
    ours: dict[str, Any] = {}
    for name, value in arguments.items():
        if value is None:
            continue
        if name in PATTERNS:
            value = [_compiled(name, pattern) for pattern in ([value] if isinstance(value, str) else value)]
        if NAMES.get(name, name) in ours:
            raise ConfigError(f"{name} is another name of {NAMES.get(name, name)}; give one of them.")
        ours[NAMES.get(name, name)] = value
    mechanism = ours.get("mechanism", "infsa_pure")
    if not isinstance(mechanism, str):
        raise ConfigError(f"mechanism must be the name of a registered mechanism, not {mechanism!r}.")
    if mechanism in VARIANTS:
        ours["mechanism"] = mechanism = VARIANTS[mechanism]
    if mechanism in VARIANTS.values() and ours.pop("eps", EPS) != EPS:
        raise ConfigError(f"eps={arguments['eps']}: it is {EPS:g}, as published.")
    return ours


def _compiled(name: str, pattern: Any) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ConfigError(f"{name}: {pattern!r} is no regular expression: {error}.") from error
