"""Top-1, top-5 and loss on the held-out split of the run's data."""

import math
from typing import Any

from infvit.config import EvalConfig
from infvit.data import build_source
from infvit.engine.processes import ALONE, Processes
from infvit.errors import ConfigError, DataError
from infvit.evaluation.files import result_path
from infvit.evaluation.rebuild import Rebuilt
from infvit.evaluation.scoring import score, settings, write_predictions


def accuracy(config: EvalConfig, rebuilt: Rebuilt, processes: Processes = ALONE) -> dict[str, Any]:
    """Scores the held-out split, and saves what the model said about each image.

    Args:
        config: device, precision, batch size; crop and interpolation where they are not the recipe's.
        rebuilt: the model and its data.
        processes: this one and the others, which share the images.

    Returns:
        Scores in %, the loss (null when it is not finite), and everything they depend on.
    """
    with processes.together():
        if config.data.get("classes") is not None and not config.model.name:
            raise ConfigError(
                "data.classes=... is for eval=imagenet and its relatives; a run keeps the classes it has."
            )
        source = build_source(rebuilt.data, "val", rebuilt.classes)
        if not len(source):
            raise DataError(f"the {rebuilt.data.val_split} split of {rebuilt.data.name} has no images.")
    processes.require_same(len(source), f"images at data.root={rebuilt.data.root}")
    scores, answers = score(config, rebuilt, source, processes)
    if processes.first:
        labels = [(source.target(i),) for i in range(len(source))]
        path = result_path(config, rebuilt, "predictions", "accuracy", ".csv")
        write_predictions(path, source, rebuilt.data.root, source.classes, answers, labels)
    damaged = {"damaged": len(answers.damaged)} if config.on_damaged == "exclude" else {}
    return {
        "top1": scores["top1"],
        "top5": scores["top5"],
        "loss": scores["loss"] if math.isfinite(scores["loss"]) else None,
        "images": scores["images"],
        **damaged,
        "data": rebuilt.data.name,
        "root": rebuilt.data.root,
        "split": rebuilt.data.val_split,
        "classes": len(rebuilt.classes),
        **settings(config, rebuilt),
    }
