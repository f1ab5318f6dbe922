"""One model on several processes: a copy on each (DDP), or a share of every tensor on each (FSDP2)."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from infvit.engine.processes import Processes
from infvit.errors import ConfigError, TrainingError


def shard(model: nn.Module, name: str) -> None:
    """Shards a model in place, block by block, over all processes.

    Raises:
        ConfigError: the model has no blocks, so that nothing would be saved, or statistics that FSDP2 leaves alone.
    """
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise ConfigError(f"engine.parallel=fsdp does not share the batch statistics of {name}; use ddp.")
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.Sequential | nn.ModuleList) or not len(blocks):
        raise ConfigError(f"engine.parallel=fsdp shards a model by its `blocks`, and {name} has none; use ddp.")
    for block in blocks:
        fully_shard(block)
    fully_shard(model)


def replicate(forward: nn.Module, device: torch.device, processes: Processes) -> nn.Module:
    """Returns the module whose backward pass averages gradients over all processes: itself if that is one."""
    if processes.world_size == 1 or isinstance(forward, FSDPModule):
        return forward
    return DistributedDataParallel(
        forward, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )


@contextlib.contextmanager
def _fsdp_sync(module: FSDPModule, now: bool) -> Any:
    module.set_requires_gradient_sync(now)
    yield


def gradient_sync(module: nn.Module, now: bool) -> contextlib.AbstractContextManager[Any]:
    """Returns the context of a forward and backward pass after which gradients are averaged `now`, or stay local."""
    if isinstance(module, FSDPModule):
        return _fsdp_sync(module, now)
    if isinstance(module, DistributedDataParallel) and not now:
        return module.no_sync()
    return contextlib.nullcontext()


def copy_buffers(model: nn.Module, processes: Processes) -> None:
    """Gives every process the buffers of the first, which are those that it saves.

    Each has its own after an update, the statistics of batch normalisation of its own images.
    """
    if processes.world_size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def require_all_gradients(model: nn.Module) -> None:
    """Refuses a model with parameters that got no gradient: on several processes they would differ or hang.

    Raises:
        TrainingError: names the first of them.
    """
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        raise TrainingError(
            f"{len(unused)} parameters get no gradient ({', '.join(unused[:3])}{', ...' if len(unused) > 3 else ''}). "
            "Such a model cannot be trained on several processes: use one, or freeze them (requires_grad=False)."
        )


def is_sharded(model: nn.Module) -> bool:
    """Whether each process holds only a share of the model."""
    return isinstance(model, FSDPModule)


def whole(value: Any) -> Any:
    """Returns a tree with sharded tensors put together, on the CPU; collective, the rest stays as it is."""
    return _map(value, lambda t: t.full_tensor().cpu() if isinstance(t, DTensor) else t)


def local(tensor: Tensor) -> Tensor:
    """Returns the share of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shared_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Returns this process's share of a whole tensor, shared out as the parameter is."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _map(v, change) for name, v in value.items()}
    if isinstance(value, list):
        return [_map(v, change) for v in value]
    return value
