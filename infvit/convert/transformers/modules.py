"""Which of transformers' modules are attention that another mechanism can compute, and how it gets in and out.

Their forward ends in a call of the function behind `config._attn_implementation`; projections, position encodings and
caches are done before it. Converted modules get a subclass of their class, which hands that function the cache, and
their configuration gets our name, under which `infvit.convert.transformers.attention` registers the functions.
"""

import inspect
import re
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any, cast

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from infvit.convert.site import Converted, Library, Site, library_class
from infvit.convert.transformers.attention import NAME
from infvit.convert.transformers.saved import check_recorded, is_ours
from infvit.errors import ConfigError

VERSION = (5, 24)  # the first whose modules were read for the table below


@dataclass(frozen=True)
class Known:
    """Where a class of attention keeps what a mechanism needs.

    Attributes:
        heads: path of the number of heads of the queries; None: as many as `q_proj` has outputs for.
        head_dim: path of the channels of a head.
        dropout: path of the dropout probability of attention weights.
        window: path of the sliding window, None where there is none.
        groups: whether its masks are those of groups of queries, of which one may see another that does not see it.
        needs: what every call needs of a mechanism, see `infvit.attention.Capabilities`.
    """

    heads: str | None = "num_attention_heads"
    head_dim: str = "head_dim"
    dropout: str = "attention_dropout"
    window: str | None = None
    groups: bool = False
    needs: frozenset[str] = frozenset()

    @property
    def cross(self) -> bool:
        """Whether the queries come from other tokens than the keys."""
        return "cross" in self.needs


VIT = Known()
CLIP = Known("num_heads", dropout="dropout")
DETR = Known(None)
DECODER = Known("config.num_attention_heads")
KNOWN = {
    "vit.modeling_vit.ViTAttention": VIT,
    "deit.modeling_deit.DeiTAttention": VIT,
    "dinov2.modeling_dinov2.Dinov2Attention": VIT,
    "dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersAttention": VIT,
    "clip.modeling_clip.CLIPAttention": CLIP,
    "siglip.modeling_siglip.SiglipAttention": CLIP,
    "rt_detr.modeling_rt_detr.RTDetrSelfAttention": Known(None, groups=True),
    "detr.modeling_detr.DetrSelfAttention": DETR,
    "detr.modeling_detr.DetrCrossAttention": Known(None, needs=frozenset({"cross"})),
    "bert.modeling_bert.BertSelfAttention": Known(head_dim="attention_head_size", dropout="dropout.p"),
    "gpt2.modeling_gpt2.GPT2Attention": Known("num_heads", dropout="attn_dropout.p"),
    "llama.modeling_llama.LlamaAttention": DECODER,
    "mistral.modeling_mistral.MistralAttention": Known("config.num_attention_heads", window="config.sliding_window"),
    "qwen3.modeling_qwen3.Qwen3Attention": Known("config.num_attention_heads", window="sliding_window"),
    "gemma.modeling_gemma.GemmaAttention": DECODER,
    "t5.modeling_t5.T5Attention": Known("n_heads", "key_value_proj_dim", "dropout", needs=frozenset({"bias"})),
}
MODELS = "transformers.models."


class Dispatching(Converted, nn.Module):
    """Base of the converted classes: attention of transformers whose values are mixed by `self.infsa`."""

    config: PreTrainedConfig
    cross = False
    groups = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes what the class of transformers does, by `self.infsa`; arguments and results are its own."""
        if self.config._attn_implementation != NAME:
            raise ConfigError(
                f"the model was converted to {self.infsa.name}, and then its attention was set to "
                f"{self.config._attn_implementation!r}: use infvit.revert(model) for transformers' own."
            )
        result = super().forward(*args, infsa_cache=kwargs.get("cache"), **kwargs)
        if kwargs.get("output_attentions") and result[-1] is None:
            raise ConfigError(f"{type(self).__name__} cannot give output_attentions: leave it out.")
        return result

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        check_recorded(prefix.removesuffix("."))
        super()._save_to_state_dict(destination, prefix, keep_vars)


def converted_class(original: type[nn.Module]) -> type[nn.Module]:
    """Returns the class that converted modules of a known class have; always the same, so that it can be pickled."""
    name = f"InfSA{original.__name__}"
    if name not in globals():
        known = KNOWN[_path(original)]
        doc = f"{original.__name__} whose values are mixed by `self.infsa`."
        body = {"__module__": __name__, "__doc__": doc, "cross": known.cross, "groups": known.groups}
        globals()[name] = type(name, (Dispatching, original), body)
    return globals()[name]


def __getattr__(name: str) -> type[nn.Module]:
    """Makes a converted class that is not there yet: where a converted model is unpickled."""
    for path in KNOWN:
        module, _, original = path.rpartition(".")
        if name == f"InfSA{original}":
            return converted_class(getattr(import_module(MODELS + module), original))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix(MODELS)


def find(model: nn.Module) -> list[Site]:
    """Returns the modules of attention in models of transformers."""
    quantised = [config.quantization_config for config, _ in _configs(model) if _is_quantised(config)]
    sites: list[Site] = []
    for name, module in model.named_modules():
        cls = library_class(module)
        known = KNOWN.get(_path(cls))
        if known is None:
            inside = bool(sites) and name.startswith(f"{sites[-1].name}.")
            samples = re.search("deformable.*attention", cls.__name__, re.IGNORECASE)
            if samples and cls.__module__.startswith(MODELS) and not inside:
                reason = "samples a few points of feature maps: it has no product of queries and keys to replace"
                sites.append(Site(name, module, 0, 0, refusal=reason))
            continue
        heads = (
            module.q_proj.out_features // module.head_dim if known.heads is None else attrgetter(known.heads)(module)
        )
        needs = set(known.needs)
        if getattr(module, "is_causal", False):
            needs.add("causal")
        if known.window is not None and attrgetter(known.window)(module) is not None:
            needs.add("pairwise")
        sites.append(
            Site(
                name,
                module,
                heads,
                attrgetter(known.head_dim)(module),
                converted_class(cls),
                float(attrgetter(known.dropout)(module)),
                frozenset(needs),
                _refusal(module, quantised),
            )
        )
    return sites


def _refusal(module: nn.Module, quantised: list[Any]) -> str | None:
    """Returns why a module of a known class cannot be converted."""
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if found < VERSION:
        return f"needs transformers >= {'.'.join(map(str, VERSION))}, found {transformers.__version__}"
    if quantised:
        return "the model is quantised, and its configuration has no place to say that it was converted"
    if getattr(module, "is_cross_attention", False) or _is_t5_cross(module):
        return "cross-attention of a causal decoder: transformers' caches hold no sums of squares for it"
    if _path(library_class(module)).startswith("gemma.") and not module.is_causal:
        return (
            "use_bidirectional_attention: whether a token then sees later ones differs between transformers' own "
            "attention functions, and with whether there is an attention_mask"
        )
    return None


def _is_t5_cross(module: nn.Module) -> bool:
    return _path(library_class(module)).startswith("t5.") and not (module.is_causal or not module.is_decoder)


def settle(model: nn.Module) -> None:
    """Brings configurations in line with which modules are converted."""
    dispatching = [module for module in model.modules() if _dispatches(module)]
    for module in dispatching:
        module.config = module.__dict__.pop("config_of_model", module.config)
    converted = {id(module.config) for module in dispatching if isinstance(module, Dispatching)}
    own: dict[int, PreTrainedConfig] = {}
    for config, owner in _configs(model):
        if owner is None and id(config) in converted and config._attn_implementation != NAME:
            own[id(config)] = deepcopy(config)
            own[id(config)]._attn_implementation_internal = NAME
        elif id(config) in converted:
            if config._attn_implementation != NAME:
                config.attention_before_infvit = config._attn_implementation
            config._attn_implementation_internal = NAME
        elif config._attn_implementation == NAME and owner is not None:
            default = owner.get_correct_attn_implementation(None)
            config._attn_implementation_internal = config.__dict__.pop("attention_before_infvit", default)
        if owner is None and (id(config) in converted or config._attn_implementation == NAME):
            _write(config, [])  # where the model's names are not known
    for module in dispatching:
        kept = not isinstance(module, Dispatching)
        if not kept and id(module.config) in own:
            # Its model, out of sight here, goes on with its configuration, and its other layers with their attention.
            module.__dict__["config_of_model"] = module.config
            module.config = own[id(module.config)]  # type: ignore[assignment]
        elif kept and _config(module)._attn_implementation == NAME:
            module.__dict__["infsa_kept"] = True
        elif hasattr(module, "infsa_kept"):
            del module.infsa_kept
    for config, owner in _configs(model):
        if owner is not None:
            _record(owner, config)


def _record(owner: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Writes into a model's configuration what makes it come back converted, or fail, when saved; see `saved`."""
    groups = list[dict[str, Any]]()
    for name, module in owner.named_modules():
        core = getattr(module, "infsa", None)
        if core is None:
            continue
        what = {"mechanism": core.name, "arguments": core.__dict__["built_with"]}
        group = next((group for group in groups if what.items() <= group.items()), None)
        if group is None:
            group = {**what, "modules": []}
            groups.append(group)
        group["modules"].append(name)
    if groups:
        _write(config, groups)
    elif is_ours(getattr(config, "quantization_config", None)):
        for name in ("attn_implementation", "quantization_config"):
            config.__dict__.pop(name, None)


def _write(config: PreTrainedConfig, groups: list[dict[str, Any]]) -> None:
    config.quantization_config = {"quant_method": NAME, "conversions": groups}
    config.attn_implementation = NAME


def _configs(model: nn.Module) -> list[tuple[PreTrainedConfig, PreTrainedModel | None]]:
    """Returns the configurations of models and of attention modules, each once, with the model that has it."""
    found: dict[int, tuple[PreTrainedConfig, PreTrainedModel | None]] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            found.setdefault(id(module.config), (module.config, module))
        elif _dispatches(module):
            found.setdefault(id(module.config), (_config(module), None))
    return list(found.values())


def _config(module: nn.Module) -> PreTrainedConfig:
    return cast(PreTrainedConfig, module.config)


def _is_quantised(config: PreTrainedConfig) -> bool:
    quantised = getattr(config, "quantization_config", None)
    return quantised is not None and not is_ours(quantised)


def _dispatches(module: nn.Module) -> bool:
    """Whether a module's forward looks up its function in transformers' attention interface."""
    if isinstance(module, Dispatching):
        return True
    if not type(module).__module__.startswith(MODELS) or not hasattr(module, "config"):
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


LIBRARY = Library("transformers", find, settle)
