"""Attention quality of softmax, Pure and Linear InfSA on the embedded scenes: trains, measures, prints the table.

    python benchmarks/quality.py [--seeds 0 1 2] [--epochs N] [--jobs 2] [KEY=VALUE ...]

Three models of half a million parameters, three seeds each, meant to take under 25 minutes on two CPU cores. What is
trained already is not trained again. Further arguments go to train.py.
"""

import time

from embedded import ROOT, call, call_each, parse, print_time, train, weights

MODELS = ("vit_mini", "infvit_pure_mini", "infvit_linear_mini")
PERTURBED = 100
"""Images for MoRF and LeRF, 59 forward passes each; ROC and PR take all 800 that are held out."""


def main() -> None:
    """Trains, measures, draws and prints."""
    options = parse(__doc__.splitlines()[0])
    start = time.monotonic()
    folder = (options.folder or ROOT / "runs" / "quality").resolve()
    runs = train(options, MODELS)
    everyone = [run for name in MODELS for run in runs[name]]
    call_each(options.jobs, [
        ["eval.py", f"checkpoint={weights(run)}", "eval=attention_quality", f"quality.perturbation_images={PERTURBED}"]
        for run in everyone
    ])  # fmt: skip
    shown, *others = [weights(runs[name][0]) for name in MODELS]
    call(1, "eval.py", f"checkpoint={shown}", "eval=maps", f"runs=[{','.join(others)}]", f"output='{folder}'")
    call(1, "-m", "infvit.report", *[str(run.folder) for run in everyone], "--quality", str(folder))
    print_time(start)


if __name__ == "__main__":
    main()
