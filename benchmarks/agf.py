"""AGF beside softmax, Pure and Linear InfSA on the embedded scenes: accuracy, over-smoothing, and AGF's ablations.

    python benchmarks/agf.py [--seeds 0 1 2] [--epochs N] [--jobs 2] [KEY=VALUE ...]

Four models of half a million parameters, three seeds each, and nine runs of two ablations with the first seed on single
digits, meant to take under 30 minutes on two CPU cores. What is trained already, also by quality.py, is not trained
again. Further arguments go to train.py.
"""

import time

from embedded import ROOT, call, parse, print_time, sweep, train, weights

MODELS = ("vit_mini", "infvit_pure_mini", "infvit_linear_mini", "agf_mini")
ABLATIONS = ("ablation_agf_k", "ablation_agf_filter")
ABLATED = 3
"""Epochs of each of their runs."""


def main() -> None:
    """Trains, measures, draws and prints."""
    options = parse(__doc__.splitlines()[0])
    start = time.monotonic()
    folder = (options.folder or ROOT / "runs" / "agf").resolve()
    runs = train(options, MODELS)
    for ablation in ABLATIONS:
        sweep(
            options,
            folder / ablation,
            f"experiment={ablation}",
            f"seed={options.seeds[0]}",
            "data=digits",
            f"epochs={ABLATED}",
        )
    first = ",".join(weights(runs[name][0]) for name in MODELS)
    call(1, "eval.py", "eval=oversmoothing", f"runs=[{first}]", f"output='{folder}'")
    done = options.runs / "digit_scenes", *(folder / ablation for ablation in ABLATIONS)
    call(1, "-m", "infvit.report", *map(str, done))
    print_time(start)


if __name__ == "__main__":
    main()
