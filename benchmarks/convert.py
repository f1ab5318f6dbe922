"""The table of converted models: what was replaced, how far it is from the formula, and what else holds.

    python benchmarks/convert.py > docs/convert-models.md

The models are those of `infvit/testing/converted_*.py`: small, of random weights, in float64. Takes a minute or two.
"""

import sys
import warnings

from infvit.errors import ConfigError
from infvit.testing.converted import Row, Subject, examine, subjects

HEAD = """# Converted models, checked

Written by `python benchmarks/convert.py > docs/convert-models.md`; do not edit. `tests/convert/test_table.py` checks
the same. Small models of random weights, in float64. "error": the largest difference from the model with the formula of
the specification in place of its softmax, over training mode, evaluation, and evaluation without gradients; outputs are
of order 1. "causal": changing later tokens leaves earlier outputs as they were. "padding": padded tokens leave the real
ones as they were. "gradients": every parameter that learns, gamma included, gets one. "breaks": graph breaks of
`torch.compile`; language models are called with an attention mask. An error of 0e+00: RMS norms of transformers round
to float32, which swallows the last digits (differences of 1e-7 would show).

| library | model | mechanism | replaced / refused | error | causal | padding | gradients | breaks |
|---|---|---|---|---|---|---|---|---|"""


def line(row: Row) -> str:
    """Returns one line of the table."""
    counts = f"{len(row.report.converted)} / {len(row.report.refused)}"
    checks = ["-" if check is None else "yes" if check else "**no**" for check in (row.causal, row.padding)]
    cells = [row.library, row.model, row.mechanism, counts, f"{row.error:.0e}", *checks]
    cells += ["all" if row.gradients else "**not all**", str(row.breaks)]
    return f"| {' | '.join(cells)} |"


def refusal(subject: Subject, mechanism: str) -> str:
    """Returns the line of a model that the mechanism has to refuse."""
    try:
        examine(subject, mechanism, compiled=False)
    except ConfigError as error:
        reason = str(error).splitlines()[-1].split("  ")[-1]
        return f"| {subject.library} | {subject.name} | {mechanism} | refused: {reason} | | | | | |"
    sys.exit(f"{mechanism} converted {subject.name}, which it cannot do exactly.")


def main() -> None:
    """Prints the page."""
    warnings.simplefilter("ignore")
    print(HEAD)
    for subject in subjects():
        print(line(examine(subject, "infsa_pure")), flush=True)
        if subject.linear:
            print(line(examine(subject, "infsa_linear")), flush=True)
        else:
            print(refusal(subject, "infsa_linear"), flush=True)


if __name__ == "__main__":
    main()
