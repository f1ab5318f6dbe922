"""The state of a model's attention heads during training, as columns of the metrics."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from infvit.attention import AttentionLayer
from infvit.attention.infsa import InfSA
from infvit.convert.site import converted_core
from infvit.data import EvalBatch
from infvit.data.loader import EvalDataset, collate_eval
from infvit.engine.device import autocast
from infvit.metrics.health import head_health

IMAGES = 4
"""How many held-out images, the first ones: the same at every epoch and on every process."""
TOKENS = 600
"""The most tokens that are looked at; it takes N x N matrices, of which training itself may need none."""


def first_images(dataset: EvalDataset) -> Tensor:
    """Returns the first `IMAGES` images of a data set of evaluation, (n, C, H, W), without those that are damaged."""
    batch: EvalBatch = collate_eval([dataset[index] for index in range(min(IMAGES, len(dataset.source)))])
    return batch.images


@torch.no_grad()
def layer_health(
    model: nn.Module,
    images: Tensor,
    device: torch.device,
    precision: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> dict[str, list[float]]:
    """Looks at what every layer of Pure or Linear InfSA makes of some images.

    Reads only: evaluation mode (and back), no gradient, no random number. Of a sharded model all processes call it.

    Args:
        model: any; other attention than InfSA has no dead heads, and is not looked at.
        images: (B, C, height, width); the same on all processes.
        device: where the model is.
        precision: dtype of matrix products.
        memory_format: layout of the images.

    Returns:
        By name a value per layer: `dead_heads` and `dead_rows`, the shares of heads, and of rows of all heads, that
        give 0; `spectral_radius`, the mean of that of gamma A. Empty without such layers, without images, or with more
        than `TOKENS` tokens.
    """
    layers = [
        module for module in model.modules() if isinstance(module, AttentionLayer) and isinstance(module.core, InfSA)
    ]
    cores = [core for core in map(converted_core, model.modules()) if isinstance(core, InfSA)]
    columns: dict[str, list[float]] = {"dead_heads": [], "dead_rows": [], "spectral_radius": []}
    if not (layers or cores) or not len(images):
        return {}

    def note(matrices: Iterable[Tensor]) -> None:
        found = [head_health(matrix) for matrix in matrices]
        for name, field in zip(columns, ("dead", "dead_rows", "radius"), strict=True):
            columns[name].append(float(torch.cat([getattr(health, field) for health in found]).double().mean()))

    def look(layer: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        # Inside the forward pass, where the parameters of a sharded model are whole; one image at a time saves memory.
        assert isinstance(layer, AttentionLayer)
        if args[0].shape[1] <= TOKENS:
            note(layer.matrix(image[None]) for image in args[0])

    def look_converted(core: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        assert isinstance(core, InfSA)
        q, k, _, mask = args
        if q.shape[-2] == k.shape[-2] <= TOKENS:
            note([core.matrix(q, k, mask)])

    training = model.training
    handles = [layer.register_forward_hook(look) for layer in layers]
    handles += [core.register_forward_hook(look_converted) for core in cores]
    try:
        model.eval()
        with autocast(device, precision):
            model(images.to(device, memory_format=memory_format))
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return columns if columns["dead_heads"] else {}
