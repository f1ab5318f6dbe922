"""The model card of a run, and its model in a form that timm loads."""

import json
from pathlib import Path
from typing import Any

import yaml
from timm.models import push_to_hf_hub, save_for_hf

from infvit.config import ModelConfig
from infvit.engine.record import replace_text
from infvit.errors import UserError
from infvit.evaluation.rebuild import Rebuilt, rebuild
from infvit.models.build import convert_arguments, count_flops, count_parameters, model_arguments
from infvit.reports.published import SOURCE, published_quality, published_top1
from infvit.reports.runs import QUALITY, RunView, is_run, read_run

FRONT = """\
---
tags:
- image-classification
- timm
- infvit
pipeline_tag: image-classification
library_name: timm
license: apache-2.0
---
"""


def write_card(folder: Path) -> Path:
    """Writes README.md of a run from its files: what it is, scores, curves and figures, how to load it, configuration.

    Args:
        folder: a run folder; the run need not be over.

    Returns:
        The path of README.md.

    Raises:
        UserError: not a run that was started.
    """
    if is_run(folder) and (damage := read_run(folder).damage):
        raise UserError(damage)
    if not is_run(folder) or not read_run(folder).config:
        raise UserError(f"{folder} holds no run with a config.yaml; name the folder of a run that has started.")
    path = folder / "README.md"
    replace_text(path, FRONT + "\n" + card_text(folder))
    return path


def card_text(folder: Path) -> str:
    """Returns the card without its front matter."""
    run = read_run(folder)
    rebuilt = rebuild(str(folder), "raw", {}) if (folder / "best.pt").exists() else None
    model, data = ModelConfig(**run.config["model"]), run.config["data"]
    options = {**model_arguments(model), **convert_arguments(model)}
    facts = [
        ("model", model.name + "".join(f", {name} {value}" for name, value in options.items())),
        ("data", data["name"] + (f", {len(rebuilt.classes)} classes, {rebuilt.img_size} px" if rebuilt else "")),
        ("recipe", f"{run.config['recipe']['name']}, batch {run.config['batch_size']}, seed {run.config['seed']}"),
        ("epochs", f"{run.epochs} of {run.config['epochs']}, {run.state}"),
    ]
    if steps := run.config.get("max_steps"):
        facts.append(("updates", f"ended by max_steps={steps}"))
    use = []
    if rebuilt:
        size = (len(rebuilt.classes), rebuilt.data.in_chans, rebuilt.img_size)
        facts.append(("parameters", f"{count_parameters(rebuilt.model):,}"))
        facts.append(("FLOPs", f"{count_flops(model, *size) / 1e9:.3f} G for one image (1 MAC = 2 FLOPs)"))
        use = ["## Use", _use(model, rebuilt)]
    parts = [
        f"# {model.name} trained on {data['name']}",
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts + _environment(folder))]),
        "## Scores",
        _scores(run),
        *_quality(run),
        *_evaluations(folder),
        *_figures(folder),
        *use,
        "## Configuration",
        f"```yaml\n{yaml.safe_dump(run.config, sort_keys=False)}```",
        f"Made with infvit, after Infinite Self-Attention ({SOURCE}).",
    ]
    return "\n\n".join(parts) + "\n"


def _use(model: ModelConfig, rebuilt: Rebuilt) -> str:
    """Returns the call with which timm builds the saved model."""
    arguments: dict[str, Any] = {"num_classes": len(rebuilt.classes), **_input(rebuilt), **model_arguments(model)}
    given = "".join(f", {name}={value!r}" for name, value in arguments.items())
    if not model.convert:
        call = f'timm.create_model("{model.name}"{given}, checkpoint_path="best.pt")'
        return f"```python\nimport infvit, timm\n\nmodel = {call}\n```"
    options = ", ".join(f"{name}={value!r}" for name, value in convert_arguments(model).items())
    lines = (
        "import infvit, timm, torch\n",
        f'model = infvit.convert(timm.create_model("{model.name}"{given}), {options})',
        'model.load_state_dict(torch.load("best.pt", weights_only=True)["state_dict"])',
    )
    return "\n".join(["```python", *lines, "```"])


def _input(rebuilt: Rebuilt) -> dict[str, int]:
    """Returns the size of the input, as far as the constructor of the model has to know it."""
    known = {} if rebuilt.data.in_chans == 3 else {"in_chans": rebuilt.data.in_chans}
    fixed = getattr(rebuilt.model, "pretrained_cfg", {}).get("fixed_input_size", False)
    return {**known, "img_size": rebuilt.img_size} if fixed else known


def _environment(folder: Path) -> list[tuple[str, str]]:
    """Returns what it ran on."""
    path = folder / "environment.json"
    if not path.exists():
        return []
    record = json.loads(path.read_text())
    versions = ", ".join(f"{name} {record['packages'][name]}" for name in ("infvit", "torch", "timm"))
    return [("device", record["device"]), ("versions", versions)]


def _scores(run: RunView) -> str:
    """Returns a table of the last and the best epoch, with the published figure where the run is of that model."""
    names = [("top1", "top-1 (%)"), ("top5", "top-5 (%)"), ("loss", "loss"),
             ("ema_top1", "EMA top-1 (%)"), ("ema_top5", "EMA top-5 (%)"), ("ema_loss", "EMA loss")]  # fmt: skip
    scored = [(name, label) for name, label in names if run.last(name) is not None]
    if not scored:
        return "No epoch has been evaluated yet."
    lines = ["| held-out | last epoch | best epoch |", "|---|---|---|"]
    for name, label in scored:
        choose = min if name.endswith("loss") else max
        best, epoch = choose((value, -epoch) if choose is max else (value, epoch) for epoch, value in run.series(name))
        digits = 4 if name.endswith("loss") else 2
        lines.append(f"| {label} | {run.last(name):.{digits}f} | {best:.{digits}f} (epoch {abs(epoch)}) |")
    text = "\n".join(lines)
    if published := published_top1(run.config):
        data = run.config["data"].get("classes") or "ImageNet-1K"
        text += f"\n\nPublished for this model: top-1 {published[0]} % on {data} ({published[1]})."
    return text


def _quality(run: RunView) -> list[str]:
    """Returns the measures of attention quality with what chance gives, and the published ones of this model."""
    if not run.quality:
        return []
    chance = {"morf": run.quality["random_aoc"], "lerf": run.quality["random_auc"], "roc": 50.0,
              "pr": run.quality["prevalence"]}  # fmt: skip
    published = published_quality(run.config)
    lines = ["| | measured (%) | sd over images | chance | published |", "|---|---|---|---|---|"]
    for metric, name in QUALITY.items():
        figures = [run.quality[name], run.quality[f"{name}_sd"], chance[metric], published.get(metric)]
        shown = ["-" if value is None else f"{value:.1f}" for value in figures]
        lines.append(f"| {metric} | {' | '.join(shown)} |")
    return ["### Attention quality", "\n".join(lines)]


def _evaluations(folder: Path) -> list[str]:
    """Returns what eval.py left in the folder."""
    parts = []
    for path in sorted(folder.glob("eval_*.json")):
        result = json.loads(path.read_text())
        if isinstance(result, dict):
            shown = ((name, v) for name, v in result.items() if isinstance(v, str | int | float) and v is not None)
            rows = [f"| {name} | {f'{v:.6g}' if isinstance(v, float) else v} |" for name, v in shown]
            parts += [f"`{path.name}`", "\n".join(["| | |", "|---|---|", *rows])]
    return parts


def _figures(folder: Path) -> list[str]:
    """Returns every figure of the folder, the curves first; maps are here as soon as they are drawn."""
    figures = sorted(folder.glob("*.png"), key=lambda path: (path.name != "curves.png", path.name))
    return ["## Figures", *(f"![{path.stem}]({path.name})" for path in figures)] if figures else []


def export(folder: Path, target: Path, weights: str = "raw") -> Path:
    """Saves the model of a run with timm's helper, and its card, in a folder that timm loads as `local-dir:FOLDER`.

    Args:
        folder: a run folder; `best.pt` is taken.
        target: where to.
        weights: raw or ema.

    Returns:
        The target.

    Raises:
        UserError: no run, or no such weights.
    """
    rebuilt, settings = _for_hub(folder, weights)
    save_for_hf(rebuilt.model, str(target), safe_serialization=True, **settings)
    for path in folder.glob("*.png"):
        (target / path.name).write_bytes(path.read_bytes())
    replace_text(target / "README.md", FRONT + "\n" + card_text(folder))
    return target


def push(folder: Path, repository: str, weights: str = "raw") -> str:
    """Pushes the model of a run and its card to the Hugging Face hub with timm's helper; needs a login there.

    Figures stay behind: timm's helper takes text only. A card that is there already is kept.

    Returns:
        Where it is.

    Raises:
        UserError: no run, no such weights, or the hub refused.
    """
    rebuilt, settings = _for_hub(folder, weights)
    parts = card_text(folder).split("\n\n")
    text = "\n\n".join(part for part in parts if not part.startswith(("![", "## Figures")))
    card = {"description": text, "tags": ["image-classification", "timm", "infvit"]}
    try:
        answer = push_to_hf_hub(rebuilt.model, repository, model_card=card, safe_serialization=True, **settings)
    except Exception as error:  # the hub client raises errors of many kinds
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"--push {repository}: {reason} Log in with `hf auth login`, or use --export FOLDER."
        ) from error
    return str(answer)


def _for_hub(folder: Path, weights: str) -> tuple[Rebuilt, dict[str, Any]]:
    """Returns the model of a run, and what timm's helpers write down of it."""
    if not (folder / "best.pt").exists():
        raise UserError(f"{folder} holds no best.pt; name the folder of a run with an evaluated epoch.")
    model = ModelConfig(**read_run(folder).config["model"])
    if model.convert:
        raise UserError(
            f"{folder} holds a converted model (model.convert={model.convert}), which timm could not build from what "
            "its hub format holds. Publish best.pt with the code of the card, under Use."
        )
    rebuilt = rebuild(str(folder), weights, {})
    data = rebuilt.data
    size = (data.in_chans, rebuilt.img_size, rebuilt.img_size)
    channels = [values * data.in_chans if len(values) == 1 else values for values in (data.mean, data.std)]
    preprocessing = {"input_size": size, "mean": tuple(channels[0]), "std": tuple(channels[1]),
                     "interpolation": rebuilt.recipe.interpolation, "crop_pct": rebuilt.recipe.crop_pct}  # fmt: skip
    arguments = model_arguments(model)
    return rebuilt, {
        "model_config": {"label_names": list(rebuilt.classes)},
        "model_args": {**_input(rebuilt), **arguments},
        "data_config": preprocessing,
    }
