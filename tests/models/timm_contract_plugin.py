"""A pytest plugin: timm's own model tests, on the mini models of this package and on nothing else.

timm picks the models of each test with `list_models` while its test module is imported, so that is where this steps
in: our names join those whose pattern says "transformer", our module joins those with intermediate features.
"""

from collections.abc import Iterable
from typing import Any

import timm

import infvit  # noqa: F401

NAMES, MODULE, TRANSFORMERS = "infvit_*", "infvit", "vit_*"
list_models = timm.list_models


def widened(patterns: str | Iterable[str], marker: str, addition: str) -> list[str]:
    """Adds a pattern of ours to a list that holds timm's own."""
    patterns = [patterns] if isinstance(patterns, str) and patterns else list(patterns)
    return [*patterns, addition] if marker in patterns else patterns


def our_models(
    filter: str | Iterable[str] = "",
    module: str | Iterable[str] = "",
    exclude_filters: str | Iterable[str] = "",
    **kwargs: Any,
) -> list[str]:
    """`timm.list_models`, restricted to the mini models."""
    names = list_models(
        widened(filter, TRANSFORMERS, NAMES),
        widened(module, "vision_transformer", MODULE),
        exclude_filters=widened(exclude_filters, TRANSFORMERS, NAMES),
        **kwargs,
    )
    minis = {name for name in list_models(module=MODULE) if name.endswith("_mini")}
    return [name for name in names if name.split(".")[0] in minis]


timm.list_models = our_models
