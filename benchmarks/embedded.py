"""What `quality.py` and `agf.py` share: small models trained on the embedded data, several runs at a time."""

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from infvit.reports.runs import RunView, find_runs

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "embedded"
"""Where the runs of both lie: what one of the two has trained the other does not train again."""
KEYS = ("recipe=quick", "recipe.ema_decay=null", "engine.eval_every=12", "data.num_workers=0", "engine.device=cpu")
DIGITS = ("data=digits", "epochs=12")
FOLDER = "${model.name}-seed-${seed}"
EPOCHS = 3
"""On the scenes, after the digits: from nothing, softmax needs ten epochs for what three teach it then."""


def parse(description: str) -> argparse.Namespace:
    """Reads the command line of either."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--runs", type=Path, default=RUNS, help="the folder of the runs")
    parser.add_argument("--folder", type=Path, help="the folder of tables and figures")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="further keys of train.py")
    options = parser.parse_args()
    options.runs = options.runs.resolve()
    return options


def call(jobs: int, *arguments: str) -> None:
    """Runs a command with its share of the cores; ends with its exit code where that is not 0."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = str(max(1, cores // jobs))
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": threads})
    if done.returncode:
        sys.exit(done.returncode)


def call_each(jobs: int, commands: Sequence[Sequence[str]]) -> None:
    """Runs commands, so many at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda arguments: call(jobs, *arguments), commands))


def sweep(options: argparse.Namespace, folder: Path, *keys: str) -> None:
    """Trains what a sweep asks for, as far as it is not trained yet."""
    launcher = ["hydra/launcher=joblib", f"hydra.launcher.n_jobs={options.jobs}"] if options.jobs > 1 else []
    call(options.jobs, "train.py", "-m", f"hydra.sweep.dir={folder}", *launcher, *KEYS, *keys, *options.keys)


def train(options: argparse.Namespace, models: Sequence[str]) -> dict[str, list[RunView]]:
    """Trains each model with each seed, on single digits first and then on scenes with digits in them.

    Returns:
        The runs on scenes of each model, in the order of the seeds.
    """
    digits, scenes = options.runs / "digits", options.runs / "digit_scenes"
    jobs = f"model={','.join(models)}", f"seed={','.join(map(str, options.seeds))}"
    sweep(options, digits, *DIGITS, f"run_dir='{digits / FOLDER}'", *jobs)
    start = f"init_from='{digits / FOLDER}'"
    what = "data=digit_scenes", "data.img_size=32", f"epochs={options.epochs}", f"run_dir='{scenes / FOLDER}'"
    sweep(options, scenes, *what, start, *jobs)
    done = sorted(
        (run for run in find_runs(scenes) if run.state == "done" and run.seed in options.seeds),
        key=lambda run: options.seeds.index(run.seed),
    )
    return {name: [run for run in done if run.config["model"]["name"] == name] for name in models}


def weights(run: RunView) -> str:
    """Returns the last epoch's file, as a value of a key: the best one was chosen on the very images looked at here."""
    return f"'{run.folder / 'last.pt'}'"


def print_time(start: float) -> None:
    """Says how long it took since `start`, of `time.monotonic`."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = used.ru_utime + used.ru_stime
    print(f"{(time.monotonic() - start) / 60:.1f} minutes, {busy / 60:.1f} minutes of one core at work")
