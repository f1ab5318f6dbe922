"""`convert` and `revert`: another attention mechanism inside a model that somebody else wrote."""

import re
import sys
import warnings
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from infvit.attention import AttentionLayer, LinearInfSA, Mechanism
from infvit.attention.mechanism import with_defaults
from infvit.convert import torch as torch_modules
from infvit.convert.call import follow_dropout
from infvit.convert.release import translate
from infvit.convert.report import ConversionReport, Entry
from infvit.convert.site import Library, Site, build_core, check_mechanism, converted_core, library_class
from infvit.errors import ConfigError

Model = TypeVar("Model", bound=nn.Module)
Patterns = str | re.Pattern[str] | Iterable[str | re.Pattern[str]] | None
REPORT = "conversion_report"
PARAMETRIZED = (
    "is parametrized, which gave it a class of its own: torch.nn.utils.parametrize.remove_parametrizations first"
)
LINEAR_NOTE = (
    "Linear InfSA gives every token the same output. On tasks that need one per token it fails: reversing and shifting "
    "16 symbols it scores 0.43 and 0.36 where softmax and Pure InfSA reach 1.00. Consider infsa_pure."
)
PER_TOKEN = re.compile(
    "CausalLM|MaskedLM|LMHead|ForTokenClassification|ForQuestionAnswering|ForConditionalGeneration|ObjectDetection"
    "|Detr(?!ansformer)|DETR|Segment|DepthEstimation|MaskedImageModeling|Bert|GPT|Llama|Mistral|Qwen|Gemma"
    "|^Feature(List|Dict|Hook|Getter)Net$"  # timm's features_only=True
)
PER_TOKEN_PACKAGES = re.compile(r"torchvision\.models\.(detection|segmentation)")
OPTIONAL = {
    "torchvision": "infvit.convert.torchvision",
    "timm": "infvit.convert.timm",
    "transformers": "infvit.convert.transformers",
}
WRAPPERS = {"OptimizedModule", "DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "ScriptModule"}


def libraries() -> list[Library]:
    """Returns the libraries that are known and loaded; a model of one that is not loaded cannot exist."""
    known = [torch_modules.LIBRARY]
    for package, module in OPTIONAL.items():
        if package in sys.modules:
            known.append(import_module(module).LIBRARY)
    return known


def convert(
    model: Model,
    mechanism: str | None = None,
    *,
    gamma: float | None = None,
    gamma_trainable: bool | None = None,
    activation: str | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
    target_types: type[nn.Module] | Iterable[type[nn.Module]] | None = None,
    inplace: bool = False,
    **hyperparameters: Any,
) -> Model:
    """Puts an attention mechanism into a model of torch, torchvision, timm or transformers.

    Projections, position encodings, masks, caches, weights, dtype, device, mode, hooks and names stay; only how values
    are mixed changes. What cannot be converted exactly is refused by name. Converting again with the same arguments
    changes nothing; with others, it replaces the mechanism and its parameters.

    Args:
        model: the model, or one module of attention.
        mechanism: name of a registered mechanism; None: infsa_pure.
        gamma: start value of the path decay of InfSA, in (0, 1); None: 0.7.
        gamma_trainable: whether it is learned; None: yes.
        activation: relu, gelu or abs; None: relu.
        include: names of modules to convert: a part of the name, a pattern with `*`, or a compiled regular expression.
        exclude: names of modules to leave alone.
        target_types: classes of modules; only these are converted.
        inplace: change the model itself; otherwise a copy.
        **hyperparameters: others of the mechanism. The names of the InfSA release (`variant`, `rho_init`,
            `rho_trainable`, `include_patterns`, `exclude_patterns`, `copy_weights`, `verbose`) work, too.

    Returns:
        The model, with `conversion_report`.

    Raises:
        ConfigError: nothing to convert, unknown mechanism, hyperparameter or value, or a model that was wrapped or
            compiled.
    """
    verbose = hyperparameters.pop("verbose", False)
    _check_switches(
        inplace=inplace, verbose=verbose, gamma_trainable=True if gamma_trainable is None else gamma_trainable
    )
    named = {"mechanism": mechanism, "gamma": gamma, "gamma_trainable": gamma_trainable, "activation": activation}
    args = translate({**named, "include": include, "exclude": exclude, **hyperparameters})
    mechanism = args.pop("mechanism", "infsa_pure")
    include, exclude = (_patterns(name, args.pop(name, None)) for name in ("include", "exclude"))
    types = _classes(target_types)
    args = {name: value.item() if isinstance(value, np.generic) else value for name, value in args.items()}
    cls = check_mechanism(mechanism, args)
    _check_model(model)
    if not inplace:
        model = _copied(model)
    known = libraries()
    sites = _sites(model, known)
    converted, kept, refused = [], [], _unknown(model, sites)
    for site in sites:
        entry = Entry(site.name, library_class(site.module).__name__)
        if not _wanted(site.name, include, exclude) or (types and not issubclass(library_class(site.module), types)):
            kept.append(_noted(entry, "not asked for"))
            continue
        if site.refusal is None and _same(site, cls, args):
            kept.append(_noted(entry, f"is {mechanism} already"))
            continue
        core, reason = _core(cls, site, args)
        if core is None:
            refused.append(_noted(entry, reason))
            continue
        site.install(core)
        added = ", and a new projection infsa.extra" if core.extra_dim else ""
        converted.append(_noted(entry, f"{site.num_heads} heads of {site.head_dim} channels{added}"))
    notes = (LINEAR_NOTE,) if converted and cls is LinearInfSA and per_token(model, sites) else ()
    report = ConversionReport(mechanism, tuple(converted), tuple(kept), tuple(refused), not inplace, notes)
    if not converted and not any("already" in entry.note for entry in kept):
        raise ConfigError(f"nothing to convert in {type(model).__name__}. {_looked_for(known)}\n{report}")
    _settle(model, known)
    if verbose:
        print(report)
    for note in report.warnings:
        warnings.warn(note, stacklevel=2)
    setattr(model, REPORT, report)  # an attribute of the user's model
    return model


def revert(model: Model) -> Model:
    """Gives a converted model, in place, its own attention back. Weights stay as trained; the mechanisms' own go.

    Raises:
        ConfigError: nothing in the model is converted, or something that was is parametrized.
    """
    known = libraries()
    sites = [site for site in _sites(model, known) if converted_core(site.module)]
    for site in sites:
        if site.refusal == PARAMETRIZED:
            raise ConfigError(f"{site.name or 'the model'} cannot be reverted: it {PARAMETRIZED}.")
    sites = [site for site in sites if not site.refusal]
    if not sites:
        raise ConfigError(f"nothing in {type(model).__name__} is converted.")
    for site in sites:
        site.remove()
    _settle(model, known)
    if hasattr(model, REPORT):
        delattr(model, REPORT)
    return model


def per_token(model: nn.Module, sites: Iterable[Site]) -> bool:
    """Whether a model seems to need an output of its own for each token: language, detection, dense prediction."""
    classes = [type(module) for module in model.modules()]
    return (
        any("causal" in site.needs for site in sites)
        or any(issubclass(kind, nn.TransformerDecoderLayer) for kind in classes)
        or any(PER_TOKEN.search(kind.__name__) or PER_TOKEN_PACKAGES.match(kind.__module__) for kind in classes)
    )


def _sites(model: nn.Module, known: Iterable[Library]) -> list[Site]:
    """Returns what the libraries know in a model; modules with parametrizations of their own as refused."""
    sites = [site for library in known for site in library.find(model)]
    return [replace(site, refusal=PARAMETRIZED) if is_parametrized(site.module) else site for site in sites]


def _settle(model: nn.Module, known: Iterable[Library]) -> None:
    for library in known:
        if library.settle is not None:
            library.settle(model)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"convert takes a torch.nn.Module, not {type(model).__name__}.")
    for parent in type(model).__mro__:
        if parent.__name__ in WRAPPERS:
            raise ConfigError(f"the model is wrapped in {parent.__name__}: convert it first, then wrap or compile it.")


def _check_switches(**switches: Any) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r} must be True or False.")


def _patterns(name: str, given: Any) -> tuple[str | re.Pattern[str], ...] | None:
    for pattern in (patterns := _listed(given)):
        if not isinstance(pattern, str | re.Pattern):
            raise ConfigError(
                f"{name} takes a part of a name, a pattern or a compiled regular expression, or several of them, "
                f"not {pattern!r}."
            )
    return None if given is None else patterns


def _classes(given: Any) -> tuple[type[nn.Module], ...]:
    for kind in (types := _listed(given)):
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise ConfigError(f"target_types takes classes of modules, not {kind!r}.")
    return types


def _listed(given: Any) -> tuple[Any, ...]:
    """Returns one thing, several or none as a tuple."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str | type) else (given,)


def _copied(model: Model) -> Model:
    try:
        return deepcopy(model)
    except Exception as error:
        raise ConfigError(f"{type(model).__name__} cannot be copied ({error}); use inplace=True.") from error


def _wanted(
    name: str, include: tuple[str | re.Pattern[str], ...] | None, exclude: tuple[str | re.Pattern[str], ...] | None
) -> bool:
    return (include is None or _matches(name, include)) and not _matches(name, exclude or ())


def _matches(name: str, patterns: tuple[str | re.Pattern[str], ...]) -> bool:
    for pattern in patterns:
        if isinstance(pattern, re.Pattern):
            found = pattern.search(name) is not None
        else:
            found = fnmatchcase(name, pattern) if "*" in pattern else pattern in name
        if found:
            return True
    return False


def _noted(entry: Entry, note: str) -> Entry:
    return Entry(entry.name, entry.kind, note)


def _looked_for(known: Iterable[Library]) -> str:
    return f"Looked for: {'; '.join(library.name for library in known)}."


def _same(site: Site, cls: type[Mechanism], args: dict[str, Any]) -> bool:
    """Whether a site has the mechanism that is asked for; it then drops what the module drops, and in its mode."""
    core = converted_core(site.module)
    if core is None or type(core) is not cls:
        return False
    built = core.__dict__.get("built_with")
    if built is None or with_defaults(cls, built) != with_defaults(cls, args):
        return False
    follow_dropout(core, site.dropout)
    core.train(site.module.training)
    return True


def _core(cls: type[Mechanism], site: Site, args: dict[str, Any]) -> tuple[Mechanism | None, str]:
    """Returns the mechanism for a site, or None and why there is none."""
    if site.refusal is not None:
        return None, site.refusal
    missing = sorted(need for need in site.needs if not getattr(cls.capabilities, need))
    if missing:
        return None, f"{cls.name} does not support what it needs: {', '.join(missing)}"
    try:
        factory = site.factory()
        return build_core(cls, site.num_heads, site.head_dim, site.dropout, factory, args, site.projection), ""
    except ConfigError as error:
        return None, str(error)


def _unknown(model: nn.Module, sites: list[Site]) -> list[Entry]:
    """Returns modules whose class name says attention and that no library knows: outermost, and not around a site."""
    names = [site.name for site in sites]
    found: list[Entry] = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if not any(word in kind.lower() for word in ("attention", "attn")) or any(
            _inside(name, other) for other in names
        ):
            continue
        if any(_inside(other, name) for other in names) or any(_inside(name, entry.name) for entry in found):
            continue
        if isinstance(module, AttentionLayer):
            note = "infvit's own: its mechanism is an argument of the model (attention=...)"
        else:
            note = f"infvit does not know {type(module).__module__}.{kind}"
        found.append(Entry(name, kind, note))
    return found


def _inside(name: str, other: str) -> bool:
    return name == other or other == "" or name.startswith(f"{other}.")
