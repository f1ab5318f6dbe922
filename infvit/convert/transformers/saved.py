"""How a converted model that was saved by `save_pretrained` comes back from `from_pretrained` as it was.

transformers lets other packages change a model between its construction and the loading of its weights through one
door, made for quantisation: a configuration with `quantization_config` names a registered `HfQuantizer`. Ours converts
the modules that the configuration lists. Where this file was not imported, `attn_implementation` in the saved
configuration makes transformers raise instead.
"""

import inspect
import re
from copy import deepcopy
from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from infvit.convert.transformers.attention import NAME
from infvit.errors import ConfigError


@register_quantization_config(NAME)
class SavedConversions(QuantizationConfigMixin):
    """What was converted to what: `conversions` as `modules._record` writes them."""

    def __init__(self, conversions: list[dict[str, Any]], quant_method: str = NAME, **_: Any) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]
        self.conversions = conversions


def is_ours(quantised: Any) -> bool:
    """Whether a `quantization_config`, a dictionary or an object, says what was converted."""
    method = quantised.get("quant_method") if isinstance(quantised, dict) else getattr(quantised, "quant_method", None)
    return bool(method == NAME)


def check_recorded(name: str) -> None:
    """Checks, where a converted module gives its weights to `save_pretrained`, that the configuration names it.

    Raises:
        ConfigError: it does not, so that the model would come back with its own attention.
    """
    frame, code = inspect.currentframe(), inspect.unwrap(PreTrainedModel.save_pretrained).__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        return
    model = frame.f_locals["self"]
    record = getattr(model.config, "quantization_config", None)
    groups = record["conversions"] if isinstance(record, dict) and is_ours(record) else []
    recorded = {module for group in groups for module in group["modules"]}
    prefix = f"{model.base_model_prefix}."  # the model inside one with a head shares its configuration
    if not recorded & {name, name.removeprefix(prefix), prefix + name}:
        raise ConfigError(
            f"{name} was converted by itself, or the part of the model around it, and the configuration of "
            f"{type(model).__name__} does not say so: it would come back with softmax. Before saving, convert the "
            "model, infvit.convert(model, include=..., inplace=True), with the same arguments."
        )


@register_quantizer(NAME)
class Restorer(HfQuantizer):
    """Converts a model before its weights are loaded, and leaves nothing behind that says it is quantised."""

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            raise ConfigError("these weights were not saved from a converted model: load them, then infvit.convert.")
        if not self.conversions:
            raise ConfigError(
                "a part of the model that was saved here was reverted by itself, so that what is left of it "
                "is not known. Convert or revert the model instead, and save it again."
            )

    @property
    def conversions(self) -> list[dict[str, Any]]:
        assert isinstance(self.quantization_config, SavedConversions)
        return self.quantization_config.conversions

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        from infvit.convert.api import convert

        del model.config.quantization_config  # a configuration that is quantised is refused; `settle` writes it again
        places = [_places(model, group["modules"]) for group in self.conversions]
        if not any(places):
            raise ConfigError(f"none of the modules that had been converted is in {type(model).__name__}.")
        for group, names in zip(deepcopy(self.conversions), places, strict=True):
            if names:
                here = re.compile(f"^({'|'.join(map(re.escape, names))})$")
                convert(model, group["mechanism"], include=here, inplace=True, **group["arguments"])

    def postprocess_model(self, model: PreTrainedModel, **kwargs: Any) -> None:
        for name in ("hf_quantizer", "quantization_method", "is_quantized"):
            if name in vars(model):
                delattr(model, name)


def _places(model: PreTrainedModel, saved: list[str]) -> list[str]:
    """Returns the names that saved modules have in a model with or without a head, or around that which was saved.

    Raises:
        ConfigError: a name may mean several modules.
    """
    known, prefix = dict(model.named_modules()), f"{model.base_model_prefix}."
    places = []
    for name in saved:
        here = [other for other in (name, name.removeprefix(prefix), prefix + name) if other in known][:1]
        here = here or [other for other in known if other.endswith(f".{name}")]
        if len(here) > 1:
            raise ConfigError(
                f"the converted {name} that was saved may be {' or '.join(here)} of {type(model).__name__}. Convert "
                "the whole model, infvit.convert(model, include=...), and save it again."
            )
        places += here
    return places
