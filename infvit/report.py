"""Reports from the files of runs, also while they run.

python -m infvit.report SWEEP_FOLDER              the ablation table: report.md, .csv, .tex, .png
python -m infvit.report EFFICIENCY_FOLDER         the tables and figures of eval=efficiency, drawn again
python -m infvit.report FOLDERS --efficiency DIR  those of several runs of eval=efficiency as one, in DIR
python -m infvit.report RUN_FOLDER                the model card: README.md
python -m infvit.report FOLDERS --html out.html   one page of all runs in and below the folders
python -m infvit.report FOLDERS --quality DIR     attention quality of several models: quality.md, .csv, .tex, .png
python -m infvit.report RUN_FOLDER --export DIR   the model for timm, in a folder
python -m infvit.report RUN_FOLDER --push ORG/NAME    the same on the Hugging Face hub
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from infvit.errors import UserError
from infvit.evaluation.efficiency import RESULT
from infvit.reports.ablation import write_ablation
from infvit.reports.card import export, push, write_card
from infvit.reports.efficiency import join_efficiency, write_efficiency
from infvit.reports.page import write_page
from infvit.reports.quality import write_quality
from infvit.reports.runs import find_runs, is_run


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes what is asked for.

    Args:
        arguments: the command line, by default that of this process.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="python -m infvit.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="a run, a sweep, or a folder of them")
    parser.add_argument("--html", type=Path, help="write one page of all runs to this file")
    parser.add_argument("--every", type=float, help="with --html: write it again every so many seconds, until Ctrl-C")
    parser.add_argument("--quality", type=Path, help="write the comparison of attention quality to this folder")
    parser.add_argument(
        "--efficiency", type=Path, help="write several results of eval=efficiency as one to this folder"
    )
    parser.add_argument("--export", type=Path, help="save the model of a run for timm in this folder")
    parser.add_argument("--push", help="push the model of a run to this repository of the Hugging Face hub")
    parser.add_argument("--weights", choices=("raw", "ema"), default="raw", help="which weights to export or push")
    options = parser.parse_args(arguments)
    try:
        if options.html is not None:
            _page(options)
        else:
            print("\n".join(_write(options)), flush=True)
    except BrokenPipeError:  # `| head`: all is written by now, and nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again at its end
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _write(options: argparse.Namespace) -> list[str]:
    """Writes everything but the page, and returns what to say of it."""
    if options.quality is not None:
        return [write_quality(options.folders, options.quality).read_text()]
    if options.efficiency is not None:
        return [join_efficiency(options.folders, options.efficiency)]
    said: list[str] = []
    for folder in options.folders:
        if options.export is not None or options.push is not None:
            if options.export is not None:
                said.append(f"The model is in {export(folder, options.export, options.weights)}")
            if options.push is not None:
                said.append(f"The model is at {push(folder, options.push, options.weights)}")
        elif (folder / RESULT).exists():
            said.append(write_efficiency(folder))
        elif is_run(folder):
            said.append(f"The model card is {write_card(folder)}")
        else:
            report = write_ablation(folder)
            said += [report.read_text(), f"written to {report} (also .csv, .tex, .png)"]
    return said


def _page(options: argparse.Namespace) -> None:
    """Writes the page, once or again and again."""
    while True:
        count = write_page(find_runs(*options.folders), options.html, options.every)
        print(f"{count} runs are in {options.html}", flush=True)
        if not options.every:
            return
        time.sleep(options.every)


if __name__ == "__main__":
    sys.exit(main())
