"""Some images of a held-out split, for evaluations that look into a model and not at its answers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from infvit.config import EvalConfig
from infvit.data import build_eval_loader, eval_transform
from infvit.engine.device import autocast, select_device, select_precision
from infvit.engine.processes import Processes
from infvit.errors import DataError
from infvit.evaluation.images import open_images, select
from infvit.evaluation.rebuild import Rebuilt
from infvit.evaluation.scoring import crop, settings

T = TypeVar("T")


@dataclass(frozen=True)
class Samples:
    """What `examine` found.

    Attributes:
        found: what the callback gave for each image, in the order of the split.
        about: what the result depends on, and the numbers of images.
    """

    found: list[Any]
    about: dict[str, Any]


def examine(
    config: EvalConfig,
    rebuilt: Rebuilt,
    processes: Processes,
    number: int,
    look: Callable[[nn.Module, Tensor], list[T]],
) -> Samples:
    """Shows images of the held-out split, evenly spread over it, to a callback. Labels play no part.

    Args:
        config: device, precision, batch size, `num_images`, what to do with damaged images.
        rebuilt: the model and its data.
        processes: this one and the others, which share the images.
        number: of images, where `num_images` does not say; fewer where there are no more.
        look: called with the model and images (B, C, H, W); returns one value per image.

    Raises:
        DataError: no images, a damaged one that is not to be excluded, or nothing but damaged ones.
        UserError: whatever the callback raises.
    """
    device = select_device(config.device)
    precision = select_precision(config.precision, device)
    transform = eval_transform(*crop(config, rebuilt), rebuilt.data, rebuilt.img_size, rebuilt.crop_mode)
    rows: list[tuple[int, Any]] = []
    damaged: list[str] = []
    with processes.together():
        whole = open_images(rebuilt)
        number = min(config.num_images or number, len(whole))
        # At equal distances: a split is sorted by class, and its first images are alike.
        source = select(whole, [at * len(whole) // number for at in range(number)])
    processes.require_same(len(source), f"images at data.root={rebuilt.data.root}")
    with processes.together():
        loader = build_eval_loader(
            source, transform, config.batch_size, rebuilt.data.num_workers, device.type == "cuda",
            processes.rank, processes.world_size, config.on_damaged == "exclude",
        )  # fmt: skip
        model = rebuilt.model.to(device)
        for batch in loader:
            damaged += batch.damaged
            if len(batch.targets):
                with torch.no_grad(), autocast(device, precision):
                    values = look(model, batch.images.to(device))
                rows += zip(batch.indices.tolist(), values, strict=True)
    rows = sorted((row for share in processes.gather(rows) for row in share), key=lambda row: row[0])
    lost = sorted(message for share in processes.gather(damaged) for message in share)
    if not rows:
        raise processes.everywhere(DataError(f"all {len(source)} images are damaged: {lost[0]} ..."))
    about = {
        "images": len(rows),
        **({"damaged": len(lost)} if config.on_damaged == "exclude" else {}),
        "data": rebuilt.data.name,
        "root": rebuilt.data.root,
        "split": rebuilt.data.val_split,
        **settings(config, rebuilt),
    }
    return Samples([value for _, value in rows], about)
