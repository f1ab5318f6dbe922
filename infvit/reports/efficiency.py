"""The tables of `eval=efficiency`, from `efficiency.json` alone, so that they can be written again at any time."""

import csv
import io
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infvit.engine.record import replace_text
from infvit.errors import UserError
from infvit.evaluation.efficiency import FORMAT, RESULT
from infvit.evaluation.efficiency.check import NO_REFERENCE, RIGHT
from infvit.metrics.growth import exponent
from infvit.reports.efficiency_figures import draw_all
from infvit.reports.published import EFFICIENCY, EFFICIENCY_HARDWARE, SOURCE
from infvit.reports.tables import significant

PLAIN = (
    *("scope", "model", "mode", "resolution", "batch", "tokens", "parameters", "flops", "flops_formula"),
    *("images_per_s", "memory_mib", "memory_start_mib", "energy_j", "energy_source", "papers_convention_j", "failed"),
)
NOTES = """\
Latency: median [quartiles] of one call, all models of a group called in turn in one process, warmed up and
synchronised. Inference: weights in the precision, our models {form}.
Training: a whole step (forward, cross-entropy, backward, AdamW), float32 weights under autocast. Memory: highest point
of a fresh process above what it held before the call, weights not included (training: gradients and AdamW's averages
are; under torch.compile that of a later call, when the compiler is done). FLOPs: matrix products and convolutions of
one image, 1 MAC = 2 FLOPs, counted along the path without fused kernels; training: forward and backward. "Paper's
convention": latency x {inference_watts:g} W (training {training_watts:g} W), no measurement. Ratios are images per
second over those of the baseline, from one process; a ratio stands only where both mechanisms equal their references in
float64 at this size and precision (`*`: at fewer tokens, for the reference's memory; `+`: attention of timm, which has
no reference here)."""
FORMS = {
    True: "in their form for inference\n(`infvit.reparameterize`: output projections folded, "
    "last MLP on the class token only)",
    False: "as they are trained (`reparameterize=false`)",
}
SAME_MACHINE = (
    "cpu",
    "cores",
    "threads",
    "device",
    "gpu",
    "gpu_memory_gib",
    "cuda",
    "driver",
    "torch",
    "timm",
    "infvit",
)
SAME_SETTINGS = ("precision", "compile", "inference_watts", "training_watts", "reparameterize")


def join_efficiency(folders: Sequence[Path], folder: Path) -> str:
    """Writes the results of several runs of `eval=efficiency` as one, with its tables and figures.

    Ratios stay those that each run measured in one process: there are none between runs.

    Args:
        folders: the folders of the runs.
        folder: where the joined result goes.

    Returns:
        The Markdown.

    Raises:
        UserError: no result in a folder, or a damaged one; machine, versions or precision differ; two runs measured
            the same.
    """
    parts = [read_result(one) for one in folders]
    for part, name in (("machine", SAME_MACHINE), ("settings", SAME_SETTINGS)):
        for key in name:
            found = {str(one[part].get(key)): path for one, path in zip(parts, folders, strict=True)}
            if len(found) > 1:
                values = " and ".join(f"{value} ({path})" for value, path in found.items())
                raise UserError(f"these runs cannot stand in one table: {key} is {values}.")
    for kind, keys in (
        ("rows", ("model", "scope", "mode", "resolution", "batch")),
        ("highest", ("model", "mode", "batch")),
    ):
        cells = [tuple(row[key] for key in keys) for one in parts for row in one[kind]]
        twice = [cell for cell, count in Counter(cells).items() if count > 1]
        if twice:
            raise UserError(f"measured in more than one of these runs: {', '.join(map(str, twice[0]))}. Leave one out.")
    joined = parts[0] | {kind: [row for one in parts for row in one[kind]] for kind in ("rows", "highest")}
    joined["complexity"] = {model: growth for one in parts for model, growth in one["complexity"].items()}
    joined["to_do"] = sum(one.get("to_do", 0) for one in parts)
    for key in ("baselines", "modes"):
        joined["settings"][key] = list(dict.fromkeys(name for one in parts for name in one["settings"][key]))
    commits = {(one["machine"]["git"] or {}).get("commit"): one["machine"]["git"] for one in parts}
    joined["machine"]["more_commits"] = list(commits.values())[1:]
    for row in joined["rows"]:
        row["speedup"] = {name: row["speedup"].get(name, "not in its run") for name in joined["settings"]["baselines"]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--efficiency {folder} cannot be written: {error.strerror}.") from error
    replace_text(folder / RESULT, json.dumps(joined, indent=1, allow_nan=False) + "\n")
    return write_efficiency(folder)


def read_result(folder: Path) -> dict[str, Any]:
    """Reads `efficiency.json`.

    Raises:
        UserError: there is none, it is damaged, or of another version's format.
    """
    path = folder / RESULT
    if not path.is_file():
        raise UserError(f"no {RESULT} of eval=efficiency in {folder}.")
    try:
        result = json.loads(path.read_text())
        known = result["format"] == FORMAT
        complete = all(name in row for row in result["rows"] for name in ("latency", "check", "speedup", *PLAIN))
        complete &= all(name in result for name in ("machine", "settings", "complexity", "highest"))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); measure again.") from error
    if not known:
        raise UserError(f"{path} has format {result['format']}, this version reads {FORMAT}; measure again.")
    if not complete:
        raise UserError(f"{path} is damaged: something that every result has is missing; measure again.")
    return dict(result)


def write_efficiency(folder: Path) -> str:
    """Writes `efficiency.md`, `efficiency.csv` and the figures beside `efficiency.json`.

    Returns:
        The Markdown.

    Raises:
        UserError: see `read_result`.
    """
    result = read_result(folder)
    figures = draw_all(result, folder)
    text = to_markdown(result, figures)
    replace_text(folder / "efficiency.md", text)
    replace_text(folder / "efficiency.csv", to_csv(result))
    return text


def to_markdown(result: dict[str, Any], figures: Sequence[str] = ()) -> str:
    """Returns all tables."""
    settings = result["settings"]
    notes = NOTES.format(**settings, form=FORMS[settings.get("reparameterize", True)])
    parts = ["# Efficiency", _machine(result["machine"], settings)]
    if to_do := result.get("to_do", 0):
        parts.append(f"**Unfinished**: {to_do} of the cells and searches that were asked for are not measured yet.")
    parts += [_main_table(result), notes]
    reasons = sorted({row["energy_reason"] for row in result["rows"] if row["energy_reason"]})
    parts += [f"Energy was not measured: {reason}." for reason in reasons]
    parts += [
        f"FLOPs of {row['model']}, {row['mode']}, {row['resolution']} px: {row['flops_reason']}."
        for row in result["rows"] if row["flops_reason"]
    ]  # fmt: skip
    parts += _growth(result) + _highest(result) + [_published()]
    parts += [f"![{name}]({name})" for name in figures]
    return "\n\n".join(parts) + "\n"


def _machine(machine: dict[str, Any], settings: dict[str, Any]) -> str:
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads"
    if machine["device"] == "cuda":
        gpu = f"{machine['gpu_memory_gib']} GiB, driver {machine['driver']}, CUDA {machine['cuda']}"
        where = f"{machine['gpu']} ({gpu}), {where}"
    states = [machine["git"], *machine.get("more_commits", ())]
    state = ", ".join(git["commit"][:7] + " with changes" * git["dirty"] if git else "commit unknown" for git in states)
    compiled = ", torch.compile" if settings["compile"] else ""
    return (
        f"{where}. {settings['precision']}{compiled}, torch {machine['torch']}, timm {machine['timm']}, infvit "
        f"{machine['infvit']} ({state}), {machine['measured']}."
    )


def _main_table(result: dict[str, Any]) -> str:
    baselines = result["settings"]["baselines"]
    several = len({row["scope"] for row in result["rows"]}) > 1 or any(r["scope"] != "model" for r in result["rows"])
    heads = ["model", *(["scope"] if several else []), "mode", "px", "batch", "tokens", "latency (ms)", "images/s"]
    compiled = result["settings"]["compile"]
    heads += [*(["first call (ms)"] if compiled else []), *(f"x {name}" for name in baselines)]
    heads += ["memory (MiB)", "GFLOPs"]
    heads += ["J/image, measured", "J/image, paper's convention"]
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for row in result["rows"]:
        latency = row["latency"]
        shown = row["failed"] or "-"
        if latency:
            low, high = significant(latency["low_ms"]), significant(latency["high_ms"])
            shown = f"{significant(latency['median_ms'])} [{low}, {high}]"
        cells = [row["model"], *([row["scope"]] if several else []), row["mode"], row["resolution"], row["batch"]]
        cells += [row["tokens"] or "-", shown, significant(row["images_per_s"])]
        cells += [significant(latency["first_ms"] if latency else None)] if compiled else []
        cells += [_ratio(row, row["speedup"][name]) for name in baselines]
        flops = None if row["flops"] is None else row["flops"] / 1e9
        cells += [
            significant(row["memory_mib"]),
            significant(flops),
            significant(row["energy_j"]),
            significant(row["papers_convention_j"]),
        ]
        lines.append(_line(cells))
    return "\n".join(lines)


def _ratio(row: dict[str, Any], ratio: float | str) -> str:
    if isinstance(ratio, str):
        return ratio
    check = row["check"]
    if check["state"] not in (RIGHT, NO_REFERENCE):  # of a file that was changed: a ratio never stands beside it
        return str(check["state"])
    mark = "+" if check["state"] == NO_REFERENCE else "*" if check["tokens"] < row["tokens"] else ""
    return f"{ratio:.2f}{mark}"


def series(result: dict[str, Any], value: str, x: str = "tokens") -> dict[tuple[str, str, int, str], list[Any]]:
    """Returns (x, value) of every model, mode, batch size and scope, in the order of x; without what is missing."""
    found: dict[tuple[str, str, int, str], list[Any]] = defaultdict(list)
    for row in result["rows"]:
        y = row["latency"]["median_ms"] if value == "latency_ms" and row["latency"] else row.get(value)
        if row[x] is not None and y is not None:
            found[row["model"], row["mode"], row["batch"], row["scope"]].append((row[x], y))
    return {name: sorted(points) for name, points in found.items()}


def _growth(result: dict[str, Any]) -> list[str]:
    times, memory = series(result, "latency_ms"), series(result, "memory_mib")
    lines = []
    for name in times:
        fitted = [exponent(points.get(name, ())) for points in (times, memory)]
        if fitted != [None, None]:
            model, mode, batch, scope = name
            growth = result["complexity"].get(model, "unknown")
            span = f"{times[name][0][0]} to {times[name][-1][0]}"
            lines.append(_line([model, scope, mode, batch, growth, span, *(significant(b, 2) for b in fitted)]))
    if not lines:
        return []
    heads = ["model", "scope", "mode", "batch", "FLOPs in tokens", "tokens", "exponent of latency", "of memory"]
    note = "Exponents b of a N^b, fitted to all sizes above (least squares on the logarithms)."
    return ["## Growth with the number of tokens N", "\n".join([_line(heads), "|---" * len(heads) + "|", *lines]), note]


def _highest(result: dict[str, Any]) -> list[str]:
    if not result["highest"]:
        return []
    heads = ["model", "mode", "batch", "highest resolution (px)", "what kept it from more"]
    lines = [
        _line([h["model"], h["mode"], h["batch"], h["resolution"] or "none", h["reason"]]) for h in result["highest"]
    ]
    return [
        "## Highest resolution without memory failure",
        "\n".join([_line(heads), "|---" * len(heads) + "|", *lines]),
    ]


def _published() -> str:
    heads = ["model", "latency (ms)", "images/s", "J/image (latency x 200 W)"]
    lines = [_line([model, *values.values()]) for model, values in EFFICIENCY.items()]
    title = f"## Published, not measured here: {SOURCE}, Table 1 ({EFFICIENCY_HARDWARE}, batch 1, 1024 px, inference)"
    return "\n\n".join([title, "\n".join([_line(heads), "|---" * len(heads) + "|", *lines])])


def to_csv(result: dict[str, Any]) -> str:
    """Returns a line for each row of the result, with all digits."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    baselines = result["settings"]["baselines"]
    times = ("median_ms", "low_ms", "high_ms", "rounds", "first_ms")
    checks = ("state", "error", "tolerance", "tokens")
    ratios = [f"images_per_s_over_{name}" for name in baselines]
    writer.writerow([*PLAIN, *times, *ratios, *(f"check_{name}" for name in checks)])
    for row in result["rows"]:
        cells = [row[name] for name in PLAIN]
        cells += [(row["latency"] or {}).get(name) for name in times]
        cells += [row["speedup"][name] for name in baselines]
        writer.writerow(["" if cell is None else cell for cell in [*cells, *(row["check"].get(n) for n in checks)]])
    return out.getvalue()


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
