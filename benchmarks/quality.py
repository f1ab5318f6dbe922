"""Attention quality of softmax, Pure and Linear InfSA on the embedded scenes: trains, measures, prints the table.

    python benchmarks/quality.py [--folder runs/quality] [--seeds 0 1 2] [--epochs 12] [--jobs 2] [KEY=VALUE ...]

Three models of half a million parameters, three seeds each, meant to take under 25 minutes on two CPU cores. What is
trained already is not trained again. Further arguments go to train.py.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from infvit.reports.runs import find_runs

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("vit_mini", "infvit_pure_mini", "infvit_linear_mini")
KEYS = ("data=digit_scenes", "data.img_size=32", "recipe=quick", "data.num_workers=0", "engine.device=cpu")
PERTURBED = 300
"""Images for MoRF and LeRF, 59 forward passes each; ROC and PR take all 800 that are held out."""


def call(jobs: int, *arguments: str) -> None:
    """Runs a command with its share of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = str(max(1, cores // jobs))
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": threads})
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    """Trains, measures, draws and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/quality"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("keys", nargs="*", help="further keys of train.py")
    options = parser.parse_args()
    start = time.monotonic()
    folder = options.folder.resolve()
    seeds = ",".join(map(str, options.seeds))
    launcher = ["hydra/launcher=joblib", f"hydra.launcher.n_jobs={options.jobs}"] if options.jobs > 1 else []
    swept = ["-m", f"model={','.join(MODELS)}", f"seed={seeds}", f"hydra.sweep.dir={folder}", *launcher]
    call(options.jobs, "train.py", *swept, *KEYS, f"epochs={options.epochs}", *options.keys)

    runs = [run for run in find_runs(folder) if run.state == "done" and run.seed in options.seeds]
    with ThreadPoolExecutor(options.jobs) as pool:
        # last.pt: the best epoch was chosen on the very images that are looked at here.
        measure = [["eval.py", f"checkpoint='{run.folder / 'last.pt'}'", "eval=attention_quality",
                    f"quality.perturbation_images={PERTURBED}"] for run in runs]  # fmt: skip
        list(pool.map(lambda arguments: call(options.jobs, *arguments), measure))
    first = {run.config["model"]["name"]: run for run in runs if run.seed == options.seeds[0]}
    shown, *others = [f"'{first[name].folder / 'last.pt'}'" for name in MODELS if name in first]
    call(1, "eval.py", f"checkpoint={shown}", "eval=maps", f"runs=[{','.join(others)}]", f"output='{folder}'")
    call(1, "-m", "infvit.report", str(folder), "--quality", str(folder))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = used.ru_utime + used.ru_stime
    print(f"{(time.monotonic() - start) / 60:.1f} minutes, {busy / 60:.1f} minutes of one core at work")


if __name__ == "__main__":
    main()
