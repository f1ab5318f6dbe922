"""What the quick recipe reaches on the embedded digits: held-out top-1 and training time, several seeds a model.

    python benchmarks/digits.py [--models infvit_linear_mini ...] [--seeds 0 1 2] [--folder runs/digits]

Goals: 95 % top-1 with Linear and Pure, 240 s of training on two CPU cores. Finished runs are not run again.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from infvit.reports.curves import read_metrics

ROOT = Path(__file__).resolve().parent.parent


def run(model: str, seed: int, folder: Path) -> tuple[float, float]:
    """Trains one model and returns its top-1 in % after the last epoch, and the seconds of training and evaluation."""
    run_dir = folder / f"{model}-{seed}"
    command = [sys.executable, str(ROOT / "train.py"), f"model={model}", f"seed={seed}", f"run_dir={run_dir}"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    rows = read_metrics(run_dir)
    return rows[-1]["top1"], sum(row["train_seconds"] + row["eval_seconds"] for row in rows)


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["infvit_linear_mini", "infvit_pure_mini", "vit_mini"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/digits"))
    options = parser.parse_args()
    print("| command | top-1 by seed (%) | mean ± sd | seconds a run |\n|---|---|---|---|")
    for model in options.models:
        results = [run(model, seed, options.folder.resolve()) for seed in options.seeds]
        scores, seconds = zip(*results, strict=True)
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        listed = ", ".join(f"{score:.2f}" for score in scores)
        print(
            f"| `python train.py model={model}` | {listed} | {statistics.mean(scores):.2f} ± {spread:.2f} "
            f"| {statistics.mean(seconds):.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
