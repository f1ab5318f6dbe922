"""The ablation table of a sweep, as Table 4 of the paper has it: a column for each setting, seeds taken together."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infvit.engine.record import replace_text
from infvit.engine.status import STATES, job_name
from infvit.reports.formats import draw_ablation, to_csv, to_latex, to_markdown
from infvit.reports.published import ABLATION, AGF_IN_WORDS, AGF_SOURCE, SOURCE, published_top1
from infvit.reports.runs import RunView, find_runs
from infvit.reports.tables import PENDING, Cell, Row, Table

# Metric, its row, its digits, and whether every run that is done has it: the others are shown as pending until
# eval=attention_quality was run on each, or (latency) eval=efficiency on all of them together.
METRICS = (
    ("top1", "top-1 (%)", 2, True),
    ("ema_top1", "top-1, EMA weights (%)", 2, True),
    ("morf", "MoRF-AOC (%)", 1, False),
    ("lerf", "LeRF-AUC (%)", 1, False),
    ("roc", "ROC-AUC (%)", 1, False),
    ("train_ms", "latency, training (ms)", 1, False),
    ("infer_ms", "latency, inference (ms)", 1, False),
)
TABLE_4 = f"{SOURCE}, Table 4"
ABLATION_ORDER = {f"{key}={value}": number for number, (key, value) in enumerate(ABLATION)}


@dataclass(frozen=True)
class Setting:
    """The runs that differ in their seed only.

    Attributes:
        label: what sets them apart from the other settings; heads the column.
        overrides: all of theirs but the seed.
        runs: one for each seed.
    """

    label: str
    overrides: tuple[str, ...]
    runs: tuple[RunView, ...]

    def scores(self, metric: str) -> list[float]:
        """Returns the final value of a metric, of every run that is done."""
        values = (run.last(metric) for run in self.runs if run.state == "done")
        return [value for value in values if value is not None]

    @property
    def progress(self) -> str:
        """How many runs are in which state."""
        counts = Counter(run.state for run in self.runs)
        order = [*STATES[1:], "running", "stopped", "damaged", "missing"]
        return ", ".join(f"{counts[state]} {state}" for state in order if counts[state])

    def published(self, metric: str) -> tuple[float, str] | None:
        """Returns the published figure of this setting and where it stands, if there is one."""
        pairs = (override.partition("=")[::2] for override in self.overrides)
        figures = [ABLATION[key, value] for key, value in pairs if (key, value) in ABLATION]
        if len(figures) == 1 and metric in figures[0]:
            return figures[0][metric], TABLE_4
        of_models = {published_top1(run.config) for run in self.runs if run.config} if metric == "top1" else set()
        return of_models.pop() if len(of_models) == 1 else None


def settings_of(runs: Sequence[RunView]) -> list[Setting]:
    """Puts runs that differ in their seed only together; of two with one seed as well, one that is done counts."""
    groups: dict[tuple[str, ...], dict[int, RunView]] = {}
    for run in runs:
        what = tuple(o for o in sorted(run.overrides) if _matters(o)) or ((run.name,) if not run.overrides else ())
        seeds = groups.setdefault(what, {})
        if run.seed not in seeds or (run.state == "done" and seeds[run.seed].state != "done"):
            seeds[run.seed] = run
    common = set.intersection(*map(set, groups))
    found = []
    for what, seeds in groups.items():
        label = ", ".join(override for override in what if override not in common) or "all"
        found.append(Setting(label, what, tuple(seeds[seed] for seed in sorted(seeds))))
    return sorted(found, key=lambda s: ([ABLATION_ORDER.get(o, -1) for o in s.overrides], _numbers_in_order(s.label)))


def _numbers_in_order(label: str) -> list[tuple[float, str]]:
    """Returns what sorts labels by the numbers in them: 3 before 10, 1e-3 before 0.5."""
    parts = re.split(r"(?<![\w.])(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\w.])", label)
    return [(float(part), "") if odd % 2 else (0.0, part) for odd, part in enumerate(parts)]


def _matters(override: str) -> bool:
    """Whether an override sets runs apart; the seed does not, nor what has no place in the name of a job."""
    return not override.startswith("seed=") and job_name([override]) != "default"


def ablation_table(runs: Sequence[RunView], title: str) -> Table:
    """Builds the table of a sweep."""
    settings = settings_of(runs)
    rows, sources = [], set()
    for metric, label, digits, known in METRICS:
        if known and metric != "top1" and not any(setting.scores(metric) for setting in settings):
            continue
        rows.append(Row(metric, label, digits, tuple(_cell(s, metric, known) for s in settings)))
        published = [s.published(metric) for s in settings]
        if any(published):
            cells = tuple(Cell.of([] if figure is None else [figure[0]]) for figure in published)
            rows.append(Row(f"{metric}_published", "  published", 1 if metric in _PERCENT else 0, cells))
            sources |= {figure[1] for figure in published if figure is not None}
    errors = tuple(f"{run.name}: {run.error}" for run in runs if run.error)
    labels, progress = tuple(s.label for s in settings), tuple(s.progress for s in settings)
    return Table(title, labels, tuple(rows), progress, _note(runs, sources), errors)


_PERCENT = ("top1", "ema_top1", "morf", "lerf", "roc")


def _cell(setting: Setting, metric: str, known: bool) -> Cell:
    scores = setting.scores(metric)
    if scores:
        return Cell.of(scores)
    if not known:
        return Cell(text=PENDING)
    states = {run.state for run in setting.runs}
    order = ("running", "failed", "damaged", "preempted", "stopped", "missing")
    return Cell(text=next((state for state in order if state in states), "-"))


def _note(runs: Sequence[RunView], sources: set[str]) -> str:
    """Says what was run, and whether the published figures are of the same."""
    what = {(run.config["model"]["name"], run.config["data"]["name"]) for run in runs if run.config}
    ran = ", ".join(f"{model} on {data}" for model, data in sorted(what)) or "nothing yet"
    same = what == {("infvit_linear_4l", "imagenet")}
    cut = sorted({run.config["max_steps"] for run in runs if run.config.get("max_steps")})
    short = f" Ended by max_steps={', '.join(map(str, cut))} updates." if cut else ""
    short += "".join(f" Latency: {where}." for where in sorted({r.latency["where"] for r in runs if r.latency}))
    published = f" Published: {', '.join(sorted(sources))}." if sources else ""
    if TABLE_4 in sources and not same:
        published += " Published: infvit_linear_4l on ImageNet-1K, so no comparison."
    if any("agf" in model for model, _ in what) and AGF_SOURCE not in sources:
        published += f" {AGF_IN_WORDS}"
    return f"Run: {ran}.{short}{published}"


def write_ablation(folder: Path) -> Path:
    """Writes `report.md`, `.csv`, `.tex` and `.png` of a sweep into its folder, from whatever there is by now.

    Args:
        folder: of the sweep.

    Returns:
        The path of `report.md`.
    """
    table = ablation_table(find_runs(folder), folder.resolve().name)
    replace_text(folder / "report.csv", to_csv(table))
    replace_text(folder / "report.tex", to_latex(table))
    draw_ablation(table, folder / "report.png")
    replace_text(folder / "report.md", to_markdown(table))
    return folder / "report.md"
