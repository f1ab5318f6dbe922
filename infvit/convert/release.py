"""The names of the authors' InfSA release (arXiv 2603.00175), so that its users can move. See `docs/from-infsa.md`."""

import re
from typing import Any

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
        ConfigError: one thing given under both names, or `copy_weights=False`.
    """
    if arguments.pop("copy_weights", True) is not True:
        raise ConfigError("copy_weights=False: weights always stay. Draw new ones yourself where you want them.")
    ours: dict[str, Any] = {}
    for name, value in arguments.items():
        if value is None:
            continue
        if name in PATTERNS:
            value = [re.compile(pattern) for pattern in ([value] if isinstance(value, str) else value)]
        if NAMES.get(name, name) in ours:
            raise ConfigError(f"{name} is another name of {NAMES.get(name, name)}; give one of them.")
        ours[NAMES.get(name, name)] = value
    if ours.get("mechanism") in VARIANTS:
        ours["mechanism"] = VARIANTS[ours["mechanism"]]
    return ours
