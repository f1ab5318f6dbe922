"""Published figures, to stand beside ours: of "Infinite Self-Attention" and of AGF. None was measured here."""

from collections.abc import Mapping
from typing import Any

SOURCE = "arXiv 2603.00175"

# Table 4: Linear InfSA, 4 layers, 64 heads, ImageNet-1K. By setting (key, value), then by metric.
# One configuration, relu and 0.7, is printed twice with slightly different figures.
ABLATION: dict[tuple[str, str], dict[str, float]] = {
    ("model.gamma", "0.3"): {"top1": 84.2, "morf": 72.5, "lerf": 62.1, "roc": 75.1, "train_ms": 36, "infer_ms": 11},
    ("model.gamma", "0.5"): {"top1": 84.3, "morf": 74.7, "lerf": 63.4, "roc": 75.4, "train_ms": 35, "infer_ms": 12},
    ("model.gamma", "0.7"): {"top1": 84.7, "morf": 76.0, "lerf": 64.9, "roc": 76.0, "train_ms": 36, "infer_ms": 11},
    ("model.gamma", "0.9"): {"top1": 83.5, "morf": 75.8, "lerf": 65.3, "roc": 76.2, "train_ms": 37, "infer_ms": 12},
    ("model.activation", "relu"): {"top1": 84.7, "morf": 76.0, "lerf": 64.0, "roc": 76.6},
    ("model.activation", "gelu"): {"top1": 83.5, "morf": 73.2, "lerf": 62.8, "roc": 74.8},
    ("model.activation", "abs"): {"top1": 82.8, "morf": 75.0, "lerf": 65.5, "roc": 77.2},
}

# Fig. 5 and its text: attention quality in %, 1,000 images for MoRF and LeRF, 2,088 for ROC and PR, by model.
QUALITY: dict[str, dict[str, float]] = {
    "vit_4l": {"morf": 42.6, "roc": 53.8, "pr": 56.2},
    "infvit_linear_4l": {"morf": 76.0, "lerf": 64.9, "roc": 75.9, "pr": 76.1},
    "infvit_pure_4l": {"morf": 71.7, "lerf": 65.3, "roc": 77.3, "pr": 72.4},
}

# Top-1 in % on ImageNet-1K and ImageNet-V2, by model.
IMAGENET: dict[str, tuple[float, float | None]] = {
    "vit_4l": (81.5, None),
    "infvit_linear_4l": (84.7, 79.8),
    "infvit_pure_4l": (85.1, 79.5),
    "infvit_pure_24l": (85.4, 79.8),
}

# AGF: top-1 in % of DeiT-S, by model and data.classes.
AGF_SOURCE = "arXiv 2505.08516"
AGF: dict[tuple[str, str | None], float] = {
    ("deit_small_patch16_224", None): 79.8,
    ("deit_small_agf", None): 80.3,
    ("deit_small_patch16_224", "imagenet100"): 80.6,
    ("deit_small_agf", "imagenet100"): 81.3,
}
AGF_IN_WORDS = (
    "Published ({}): DeiT-S {} %, with AGF {} % on ImageNet-1K, {} % and {} % on ImageNet-100; the figures of its "
    "ablations are not at hand."
).format(AGF_SOURCE, *AGF.values())

# Table 1: inference, batch 1, 1024 px. Energy there is latency x an assumed 200 W, not measured.
EFFICIENCY_HARDWARE = "A100 40 GB"
EFFICIENCY: dict[str, dict[str, float]] = {
    "vit_4l": {"latency_ms": 58.16, "images_per_s": 17.19, "energy_j": 11.63},
    "infvit_linear_4l": {"latency_ms": 4.33, "images_per_s": 230.95, "energy_j": 0.87},
}


def published_top1(config: Mapping[str, Any]) -> tuple[float, str] | None:
    """Returns the published top-1 in % of what a run trained, and where it stands; None where there is none.

    Args:
        config: of the run. A model with options of its own, or other data than ImageNet, has no published figure.
    """
    name, classes = config["model"]["name"], config["data"].get("classes")
    if not _as_published(config):
        return None
    if (name, classes) in AGF:
        return AGF[name, classes], AGF_SOURCE
    return (IMAGENET[name][0], SOURCE) if name in IMAGENET and classes is None else None


def published_quality(config: Mapping[str, Any]) -> Mapping[str, float]:
    """Returns the published attention quality in %, by measure, of what a run trained; empty where there is none.

    Args:
        config: of the run.
    """
    known = QUALITY.get(config["model"]["name"], {})
    return known if _as_published(config) and config["data"].get("classes") is None else {}


def _as_published(config: Mapping[str, Any]) -> bool:
    return config["data"]["name"] == "imagenet" and all(
        value in (None, {}) for key, value in config["model"].items() if key != "name"
    )
