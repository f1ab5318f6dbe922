"""Top-1, top-5 and loss on the held-out split of the run's data."""

import math
from typing import Any

from infvit.config import EvalConfig
from infvit.data import build_eval_loader, build_source, eval_transform
from infvit.engine.device import select_device, select_precision
from infvit.engine.processes import ALONE, Processes
from infvit.engine.validate import validate
from infvit.errors import DataError
from infvit.evaluation.rebuild import Rebuilt


def accuracy(config: EvalConfig, rebuilt: Rebuilt, processes: Processes = ALONE) -> dict[str, Any]:
    """Scores the held-out split.

    Args:
        config: device, precision, batch size; crop and interpolation where they are not the recipe's.
        rebuilt: the model and its data.
        processes: this one and the others, which share the images.

    Returns:
        Scores in %, the loss (null when it is not finite), and everything they depend on.
    """
    device = select_device(config.device)
    precision = select_precision(config.precision, device)
    crop_pct = config.crop_pct or rebuilt.recipe.crop_pct
    interpolation = config.interpolation or rebuilt.recipe.interpolation
    with processes.together():
        source = build_source(rebuilt.data, "val", rebuilt.classes)
        if not len(source):
            raise DataError(f"the {rebuilt.data.val_split} split of {rebuilt.data.name} has no images.")
    processes.require_same(len(source), f"images at data.root={rebuilt.data.root}")
    transform = eval_transform(crop_pct, interpolation, rebuilt.data, rebuilt.img_size)
    workers, pin = rebuilt.data.num_workers, device.type == "cuda"
    loader = build_eval_loader(source, transform, config.batch_size, workers, pin, processes.rank, processes.world_size)
    scores = validate(rebuilt.model.to(device), loader, device, precision, processes=processes)
    return {
        "top1": scores["top1"],
        "top5": scores["top5"],
        "loss": scores["loss"] if math.isfinite(scores["loss"]) else None,
        "images": scores["images"],
        "data": rebuilt.data.name,
        "root": rebuilt.data.root,
        "split": rebuilt.data.val_split,
        "classes": len(rebuilt.classes),
        "resolution": rebuilt.img_size,
        "crop_pct": crop_pct,
        "interpolation": interpolation,
        "weights": config.weights,
        "precision": str(precision).removeprefix("torch."),
        "checkpoint": str(rebuilt.path),
    }
