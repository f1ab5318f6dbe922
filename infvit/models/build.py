"""From a typed configuration to a model of timm's registry, with the errors a user can act on."""

from typing import Any

import timm
import torch
from timm.layers import PatchEmbed
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from infvit.attention import PureInfSA
from infvit.config import ModelConfig
from infvit.convert import convert
from infvit.errors import ConfigError, did_you_mean

ATTENTION_KEYS = ("attention", "gamma", "gamma_trainable", "gamma_per_head", "activation")


def model_arguments(config: ModelConfig) -> dict[str, Any]:
    """Returns the constructor arguments that a model configuration asks for; keys left at null are not among them."""
    named = {} if config.convert else _attention_arguments(config)
    twice = sorted(named.keys() & config.args.keys())
    if twice:
        raise ConfigError(f"model.{twice[0]} and model.args.{twice[0]} are both set; keep one.")
    return {**named, **config.args}


def convert_arguments(config: ModelConfig) -> dict[str, Any]:
    """Returns the arguments of the conversion that a model configuration asks for; nothing where it asks for none."""
    return {"mechanism": config.convert, **_attention_arguments(config)} if config.convert else {}


def _attention_arguments(config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ATTENTION_KEYS if getattr(config, name) is not None}


def build_model(
    config: ModelConfig,
    num_classes: int,
    in_chans: int = 3,
    img_size: int | None = None,
    drop_path: float = 0.0,
    drop: float = 0.0,
) -> tuple[nn.Module, dict[str, str]]:
    """Builds the model of a configuration.

    Args:
        config: name and attention.
        num_classes: classes of the head.
        in_chans: image channels.
        img_size: image side in pixels; left out for models that take any size.
        drop_path: stochastic depth rate.
        drop: dropout rate before the head.

    Returns:
        The model, and the arguments that it has no use for with the reason.

    Raises:
        ConfigError: unknown name, or arguments that the model does not take.
    """
    known = timm.list_models()
    if not timm.is_model(config.name):
        raise ConfigError(f"unknown model {config.name!r}. {did_you_mean(config.name, known)}")
    arguments: dict[str, Any] = {"num_classes": num_classes, "in_chans": in_chans, **model_arguments(config)}
    optional: dict[str, Any] = {"img_size": img_size, "drop_path_rate": drop_path or None, "drop_rate": drop or None}
    optional = {name: value for name, value in optional.items() if value is not None and name not in arguments}
    inactive: dict[str, str] = {}
    while True:
        try:
            model = timm.create_model(config.name, **arguments, **optional)
            break
        except TypeError as error:
            rejected = next((name for name in optional if f"'{name}'" in str(error)), None)
            if rejected is None:
                raise ConfigError(f"model {config.name}: {_one_line(error)}. Check model.* and model.args.") from error
            optional.pop(rejected)
            inactive[rejected] = f"{config.name} takes no {rejected}"
        except (AssertionError, AttributeError, ArithmeticError, LookupError, RuntimeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            hint = f" at data.img_size={img_size}" if img_size else ""
            raise ConfigError(f"model {config.name} cannot be built{hint}: {_one_line(error)}") from error
    if config.convert:
        convert(model, inplace=True, **convert_arguments(config))
    return model, inactive


def patch_size(config: ModelConfig) -> int | None:
    """Returns the side of the model's patches in pixels, or None for models without a patch grid."""
    with torch.device("meta"):
        model, _ = build_model(config, num_classes=1)
    # Other stems have a `patch_size` too, but overlapping patches, which do not have to fit.
    embed = next((module for module in model.modules() if isinstance(module, PatchEmbed)), None)
    return None if embed is None else max(embed.patch_size)


def check_forward(model: nn.Module, name: str, in_chans: int, img_size: int) -> None:
    """Lets a model on the meta device take images of this size.

    Raises:
        ConfigError: it cannot.
    """
    try:
        model(torch.empty(2, in_chans, img_size, img_size, device="meta"))
    except (RuntimeError, AssertionError, ValueError) as error:
        if "meta" not in str(error):  # a model that cannot run there may still run elsewhere
            raise ConfigError(
                f"model {name} cannot take images of {img_size} px ({_one_line(error)}); set data.img_size."
            ) from error


def count_parameters(model: nn.Module) -> int:
    """Returns the number of parameters, trainable or not."""
    return sum(p.numel() for p in model.parameters())


def count_flops(config: ModelConfig, num_classes: int, in_chans: int, img_size: int) -> int:
    """Counts the floating-point operations of one forward pass of one image, 1 MAC = 2 FLOPs.

    Counted on the meta device with torch's counter and unfused softmax attention, which it would otherwise miss on a
    CPU. Matrix products and convolutions count, elementwise operations do not.
    """
    with torch.device("meta"):
        model = build_model(config, num_classes, in_chans, img_size)[0].eval().requires_grad_(False)
        unfuse(model)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.empty(1, in_chans, img_size, img_size))
    return counter.get_total_flops()


def unfuse(model: nn.Module) -> int:
    """Makes every attention layer of a model compute what its formula says in torch's own operations, ours and timm's.

    Softmax and Pure InfSA then hold their score matrix.

    Returns:
        The number of layers; 0 where there is nothing to switch.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, PureInfSA):
            module.path = "plain"
            count += 1
        for switch in ("fused", "fused_attn"):
            if isinstance(getattr(module, switch, None), bool):
                setattr(module, switch, False)
                count += 1
    return count


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
