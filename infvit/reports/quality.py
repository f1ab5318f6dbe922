"""Attention quality of several models in one table: MoRF, LeRF, ROC and PR, as in Fig. 5 of arXiv 2603.00175."""

from collections.abc import Sequence
from pathlib import Path

from infvit.engine.record import replace_text
from infvit.errors import UserError
from infvit.reports.ablation import Setting, settings_of
from infvit.reports.formats import draw_curves, draw_quality, to_csv, to_latex, to_markdown
from infvit.reports.published import QUALITY as PUBLISHED
from infvit.reports.published import SOURCE
from infvit.reports.runs import QUALITY, QUALITY_FILES, RunView, read_run
from infvit.reports.tables import Cell, Row, Table

ROWS = (
    ("morf", "MoRF-AOC (%)", "random_aoc", "random order"),
    ("lerf", "LeRF-AUC (%)", "random_auc", "random order"),
    ("roc", "ROC-AUC (%)", None, "chance"),
    ("pr", "PR-AUC (%)", "prevalence", "prevalence of positives"),
)
"""Measure, its row, and what a map of no use gives: which value of the result, and its row."""
ALIKE = (
    *("weights", "fill", "blur_sigma", "heads", "seed", "images_sha1", "annotations", "split"),
    *("resolution", "crop_pct", "interpolation", "precision"),
)
"""Settings of a result that columns must share to be comparable."""
RELATIVES = {
    f"{family}_{size}": f"{family}_4l" for family in ("vit", "infvit_pure", "infvit_linear") for size in ("4l", "mini")
}
"""The published model that stands beside one of ours."""


def quality_table(settings: Sequence[Setting]) -> Table:
    """Builds the table: a column for each model, seeds taken together."""
    rows = [Row("top1", "top-1 (%)", 2, tuple(Cell.of(setting.scores("top1")) for setting in settings))]
    for metric, label, chance, chance_label in ROWS:
        rows.append(Row(metric, label, 1, tuple(Cell.of(_values(s, QUALITY[metric])) for s in settings)))
        published = tuple(Cell.of([p] if (p := _published(s, metric)) is not None else []) for s in settings)
        if any(cell.mean is not None for cell in published):
            rows.append(Row(f"{metric}_published", "  published", 1, published))
        controls = ([50.0] if chance is None else _values(setting, chance) for setting in settings)
        rows.append(Row(f"{metric}_chance", f"  {chance_label}", 1, tuple(map(Cell.of, controls))))
    for name, label in (
        ("perturbation_images", "images, MoRF and LeRF"),
        ("localization_images", "images, ROC and PR"),
    ):
        rows.append(Row(name, label, 0, tuple(_same(_values(setting, name)) for setting in settings)))
    progress = tuple(f"{len(setting.runs)}" for setting in settings)
    explained = (
        "Mean ± standard deviation over the runs, each the mean over its images; higher is better. Published: "
        f"{SOURCE}, Fig. 5 and text. Top-1 is that of the last epoch."
    )
    labels = tuple(setting.label for setting in settings)
    return Table("Attention quality", labels, tuple(rows), progress, _note(settings), (), explained, "quality.png")


def _values(setting: Setting, name: str) -> list[float]:
    values = (run.quality.get(name) for run in setting.runs)
    return [float(value) for value in values if value is not None]


def _same(values: Sequence[float]) -> Cell:
    """Returns a number that all runs share, or the smallest and the largest."""
    if len(set(values)) > 1:
        return Cell(text=f"{min(values):.0f} to {max(values):.0f}")
    return Cell.of(values[:1])


def _published(setting: Setting, metric: str) -> float | None:
    models = {run.config["model"]["name"] if run.config else "" for run in setting.runs}
    return PUBLISHED.get(RELATIVES.get(models.pop(), ""), {}).get(metric) if len(models) == 1 else None


def _note(settings: Sequence[Setting]) -> str:
    """Says which maps were measured on what, and whether the published figures are of the same."""
    runs = [run for setting in settings for run in setting.runs]
    maps = sorted({f"{run.quality['mechanism']}: {run.quality['map']} of {run.quality['layer']}" for run in runs})
    data = sorted({run.quality["data"] for run in runs})
    models = {run.config["model"]["name"] if run.config else "" for run in runs}
    same = data == ["imagenet"] and models <= set(PUBLISHED)
    note = f"Maps: {', '.join(maps)}. Data: {', '.join(data)}."
    files = sorted({Path(run.quality["checkpoint"]).name for run in runs if run.quality.get("checkpoint")})
    note += f" Measured on {', '.join(files)}." if files else ""
    note += f" **Not measured alike:** {unlike}." if (unlike := _unlike(settings)) else ""
    return note + ("" if same else " The published figures are of 4-layer models on ImageNet-1K, so no comparison.")


def _unlike(settings: Sequence[Setting]) -> str:
    """Names what was measured with other settings in one column than in another; empty if all is alike."""
    found = []
    for name in ALIKE:
        labels: dict[str, list[str]] = {}
        for setting in settings:
            for value in sorted({str(run.quality.get(name)) for run in setting.runs if run.quality}):
                labels.setdefault(value, []).append(setting.label)
        if len(labels) > 1:
            values = (f"{value}: {', '.join(who)}" for value, who in labels.items())
            found.append(f"{name} ({'; '.join(values)})")
    return ", ".join(found)


def compared(runs: Sequence[RunView]) -> list[Setting]:
    """Returns runs that were evaluated as columns: those of a sweep by setting, others by their name."""
    swept = [run for run in runs if run.overrides]
    alone = [Setting(run.name, (), (run,)) for run in runs if not run.overrides]
    return [*(settings_of(swept) if swept else []), *alone]


def find_quality(roots: Sequence[Path]) -> list[RunView]:
    """Returns every folder at and below some others in which `eval=attention_quality` left a result.

    Raises:
        UserError: there is none, or one is damaged.
    """
    folders = {path.parent.resolve() for root in roots for path in root.rglob(f"{QUALITY_FILES}*.json")}
    if not folders:
        raise UserError(
            f"no result of eval=attention_quality in {', '.join(map(str, roots))}; run it first: "
            "python eval.py checkpoint=RUN_FOLDER eval=attention_quality"
        )
    runs = [read_run(folder) for folder in sorted(folders)]
    for run in runs:
        if run.damage:
            raise UserError(run.damage)
    return runs


def write_quality(folders: Sequence[Path], target: Path) -> Path:
    """Writes `quality.md`, `.csv`, `.tex`, `.png` and `quality_curves.png` of all models in and below some folders.

    Args:
        folders: of runs, of sweeps, or what `output` of eval.py was.
        target: where to.

    Returns:
        The path of `quality.md`.
    """
    settings = compared(find_quality(folders))
    table = quality_table(settings)
    target.mkdir(parents=True, exist_ok=True)
    replace_text(target / "quality.csv", to_csv(table))
    replace_text(target / "quality.tex", to_latex(table))
    draw_quality(table, target / "quality.png")
    draw_curves({s.label: [run.quality for run in s.runs] for s in settings}, target / "quality_curves.png")
    replace_text(target / "quality.md", to_markdown(table) + "\n![curves](quality_curves.png)\n")
    return target / "quality.md"
