"""`eval=maps`: image, heat map and overlay side by side, of one model or of several."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from infvit.config import EvalConfig, ModelConfig
from infvit.data import eval_transform
from infvit.engine.device import autocast, select_device, select_precision
from infvit.engine.processes import ALONE, Processes
from infvit.errors import DataError
from infvit.evaluation.baseline import open_model
from infvit.evaluation.chosen import Chosen, choose, seen_boxes
from infvit.evaluation.files import result_path
from infvit.evaluation.images import pixels
from infvit.evaluation.quality_figures import MapView, draw_maps, short
from infvit.evaluation.rebuild import Rebuilt, model_labels
from infvit.evaluation.relevance import about, relevance
from infvit.evaluation.scoring import crop, settings
from infvit.models.inspect import observe


def evaluate_maps(config: EvalConfig, rebuilt: Rebuilt, processes: Processes = ALONE) -> dict[str, Any]:
    """Draws maps of some images to `figure_maps_*.png`.

    Args:
        config: `quality` says which images, and which map; `runs` names further models.
        rebuilt: the model and its data; the others are shown the same images, each by its own transform.
        processes: this one and the others; the first draws.

    Returns:
        What was drawn.

    Raises:
        ConfigError: a model has no map to show.
        DataError: a map is not finite, or an image is damaged.
    """
    with processes.together():
        chosen = choose(config, rebuilt)
        indices = chosen.first(config.quality.map_images)
        models = [rebuilt]
        for source in config.runs:
            models.append(open_model(replace(config, checkpoint=source, model=ModelConfig(name=""), runs=[])))
        labeled = zip(models, model_labels(models), strict=True) if processes.first else ()
        shown = [_views(config, model, chosen, indices, label) for model, label in labeled]
    path = result_path(config, rebuilt, "figure", "maps", ".png")
    names = [chosen.name(index, rebuilt.data.root) for index in indices]
    if processes.first:
        draw_maps(list(zip(*(views for views, _ in shown), strict=True)), names, path)
    return {
        "figure": str(path),
        "images": names,
        "models": [{"checkpoint": str(model.path), **what} for model, (_, what) in zip(models, shown, strict=False)],
        "heads": config.quality.heads,
        "seed": config.quality.seed,
        **settings(config, rebuilt),
    }


def _views(
    config: EvalConfig, rebuilt: Rebuilt, chosen: Chosen, indices: list[int], label: str
) -> tuple[list[MapView], dict[str, Any]]:
    """Returns what one model sees in each image, and what the map is of."""
    transform = eval_transform(*crop(config, rebuilt), rebuilt.data, rebuilt.img_size, rebuilt.crop_mode)
    device = select_device(config.device)
    precision = select_precision(config.precision, device)
    images = torch.stack([transform(chosen.source.image(index)) for index in indices])
    with torch.no_grad(), autocast(device, precision):
        _, calls = observe(rebuilt.model.to(device), images.to(device))
    maps, what = relevance(calls, config).cpu(), about(calls, config)
    if not maps.isfinite().all():
        raise DataError(f"{rebuilt.path}: the map of {what['layer']} is not finite; there is nothing to show.")
    title = f"{short(label)}\n{what['mechanism']}, {what['map']}"
    views = []
    for index, image, relevance_of in zip(indices, pixels(images, rebuilt).numpy(), maps.numpy(), strict=True):
        boxes = seen_boxes(chosen, index, transform)
        views.append(MapView(title, image, relevance_of, np.empty((0, 4)) if isinstance(boxes, str) else boxes))
    return views, what
