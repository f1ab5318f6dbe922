"""How a converted model that was saved by `save_pretrained` comes back from `from_pretrained` as it was.

transformers lets other packages change a model between its construction and the loading of its weights through one
door, made for quantisation: a configuration with `quantization_config` names a registered `HfQuantizer`. Ours converts
the modules that the configuration lists. Where this file was not imported, `attn_implementation` in the saved
configuration makes transformers raise instead.
"""

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

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        from infvit.convert.api import convert

        prefix = f"{model.base_model_prefix}."
        del model.config.quantization_config  # a configuration that is quantised is refused; `settle` writes it again
        assert isinstance(self.quantization_config, SavedConversions)
        for group in deepcopy(self.quantization_config.conversions):
            names = {re.escape(name) for full in group["modules"] for name in (full, full.removeprefix(prefix))}
            names_here = re.compile(rf"(^|\.)({'|'.join(sorted(names))})$")  # with or without a head
            convert(model, group["mechanism"], include=names_here, inplace=True, **group["arguments"])

    def postprocess_model(self, model: PreTrainedModel, **kwargs: Any) -> None:
        for name in ("hf_quantizer", "quantization_method", "is_quantized"):
            if name in vars(model):
                delattr(model, name)
