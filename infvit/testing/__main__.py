"""`python -m infvit.testing NAME --imports MODULE`: runs the contract on registered mechanisms."""

import argparse
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from itertools import product

from infvit.attention import get_mechanism, list_mechanisms
from infvit.errors import ConfigError
from infvit.testing import CHECKS


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all checks on mechanisms and prints one line for each; the exit status is 1 if any fails."""
    parser = argparse.ArgumentParser(prog="python -m infvit.testing", description=main.__doc__)
    parser.add_argument("names", nargs="*", help="registered mechanisms; all by default")
    parser.add_argument("--imports", nargs="*", default=[], help="modules to import first")
    options = parser.parse_args(argv)
    for module in options.imports:
        import_module(module)
    try:
        for name in options.names:
            get_mechanism(name)
    except ConfigError as error:
        parser.error(f"{error} A mechanism of your own needs --imports.")
    failed = 0
    for name, check in product(options.names or list_mechanisms(), CHECKS):
        try:
            check(name)
            print(f"{name} {check.__name__}: ok", flush=True)
        except Exception:
            failed += 1
            print(f"{name} {check.__name__}: FAILED\n{traceback.format_exc()}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
