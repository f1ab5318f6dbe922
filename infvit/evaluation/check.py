"""`eval=check`: what of ImageNet and its relatives lies where it should, and what is missing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infvit.config import DataConfig, EvalConfig
from infvit.data.folders import scan_imagenet
from infvit.data.ground_truth import real_labels
from infvit.data.imagenet_sets import CORRUPTED, SETS, ImageNetSet, corruptions, locate, require_classes
from infvit.data.source import shown
from infvit.engine.processes import ALONE, Processes
from infvit.errors import ConfigError, DataError, did_you_mean
from infvit.evaluation.imagenet import root_of

TRAIN = ImageNetSet("imagenet_train", ("train", "imagenet/train", "ILSVRC/Data/CLS-LOC/train"), 1_281_167)


@dataclass(frozen=True)
class Finding:
    """What was found of one set; `wrong` says what keeps it from being the whole set, and is empty if nothing does."""

    path: str | None
    classes: int
    images: int
    wrong: list[str]


def check(config: EvalConfig, processes: Processes = ALONE) -> dict[str, dict[str, Any]]:
    """Looks for every set below `data.root` and the `roots`, and counts classes and images; decodes none.

    Returns:
        A `Finding` for each set, as a dictionary.

    Raises:
        ConfigError: no root is given, or an unknown key.
        DataError: no set is there, or one is not whole.
    """
    root = config.data.get("root")
    specs = {spec.name: spec for spec in (TRAIN, *SETS.values(), CORRUPTED)}
    for name in config.roots:
        if name not in specs:
            raise ConfigError(f"unknown key 'roots.{name}'. {did_you_mean(name, specs)}")
    for name in config.data.keys() - {"root"}:
        raise ConfigError(f"data.{name} has no effect with eval=check, which looks at files only; leave it out.")
    if root is None and not config.roots:
        raise ConfigError("data.root is missing: eval=check needs the folder to look into, data.root=PATH.")
    found = {name: _look(spec, DataConfig(root=root), root_of(name, config.roots)) for name, spec in specs.items()}
    if processes.first:
        print(_shown(found, specs))
    there = [name for name, finding in found.items() if finding.path]
    wrong = [name for name in there if found[name].wrong]
    if not there:
        raise DataError(f"{root} has none of the sets; docs/imagenet.md says what to put where.")
    if wrong:
        raise DataError(f"{len(wrong)} of {len(there)} sets are not whole: {', '.join(wrong)} (see above).")
    return {name: vars(finding) for name, finding in found.items()}


def _look(spec: ImageNetSet, data: DataConfig, own_root: str | None) -> Finding:
    root = own_root or data.root
    if root is None:
        return Finding(None, 0, 0, [])
    base = Path(root).expanduser()
    if not base.exists():
        raise DataError(f"{'data.root' if own_root is None else f'roots.{spec.name}'}={root} does not exist; "
                        "docs/imagenet.md says what to put where.")  # fmt: skip
    path = locate(spec, base) if base.is_dir() else None
    path = path or (base if own_root else None)
    if path is None:
        return Finding(None, 0, 0, [])
    if spec.name == CORRUPTED.name:
        return _look_at_corruptions(path)
    return _look_at_folders(spec, path)


def _look_at_folders(spec: ImageNetSet, path: Path) -> Finding:
    try:
        listing = scan_imagenet(path)
        wnids = require_classes(spec, path, listing)
    except DataError as error:
        return Finding(str(path), 0, 0, [str(error)])
    counts = {wnids[name]: len(files) for name, files in listing.files.items()}
    absent = [wnid for wnid in spec.classes if wnid not in counts]
    empty = [wnid for wnid, count in counts.items() if not count]
    images = sum(counts.values())
    wrong = []
    if spec.real:
        stems = {Path(str(file)).stem for files in listing.files.values() for file in files}
        unknown = sorted(stems - real_labels().keys())
        images = sum(bool(real_labels().get(stem)) for stem in stems)
        if unknown:
            wrong.append(f"{len(unknown)} files have not the names that ReaL's labels go by: {shown(unknown, 3)}")
    if absent:
        wrong.append(f"{len(absent)} of {len(spec.classes)} classes are absent: {shown(absent, 3)}")
    if empty:
        wrong.append(f"{len(empty)} class folders are empty: {shown(empty, 3)}")
    if images != spec.images:
        wrong.append(f"{abs(images - spec.images)} images {'are missing' if images < spec.images else 'too many'}")
    return Finding(str(path), len(counts) - len(empty), images, wrong)


def _look_at_corruptions(path: Path) -> Finding:
    settings = corruptions(path)
    findings = {spec.name: _look_at_folders(spec, folder) for spec, folder in settings}
    wrong = [f"{name}: {line}" for name, finding in findings.items() for line in finding.wrong]
    names = {spec.name.split("/")[1] for spec, _ in settings}
    lacking = [
        f"{CORRUPTED.name}/{name}/{severity}" for name in sorted(names) for severity in range(1, 6)
        if f"{CORRUPTED.name}/{name}/{severity}" not in findings
    ]  # fmt: skip
    if lacking:
        wrong.append(f"{len(lacking)} severities are absent: {shown(lacking, 3)}")
    if not settings:
        wrong.append(f"{path} has no folders CORRUPTION/SEVERITY")
    classes = min((finding.classes for finding in findings.values()), default=0)
    return Finding(str(path), classes, sum(finding.images for finding in findings.values()), wrong)


def _shown(found: dict[str, Finding], specs: dict[str, ImageNetSet]) -> str:
    lines = [f"{'set':<30}{'classes':>14}{'images':>20}  folder"]
    for name, finding in found.items():
        spec = specs[name]
        if finding.path is None:
            lines.append(f"{name:<30}{'-':>14}{'-':>20}  not found (looked for {', '.join(spec.folders)})")
            continue
        classes = f"{finding.classes} of {len(spec.classes)}"
        each = " each" if name == CORRUPTED.name else ""
        images = f"{finding.images} of {spec.images}{each}"
        lines.append(f"{name:<30}{classes:>14}{images:>20}  {finding.path}")
        lines += [f"    {line}" for line in finding.wrong]
    return "\n".join(lines)
