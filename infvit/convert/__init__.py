"""Another attention mechanism in a model that somebody else wrote. See `docs/convert.md`."""

from infvit.convert.api import convert, revert
from infvit.convert.attention import InfSAAttention
from infvit.convert.functional import infsa_attention, linear_infsa_scores, pure_infsa_scores
from infvit.convert.report import ConversionReport

replace_attention = convert  # the release's name

__all__ = [
    "ConversionReport",
    "InfSAAttention",
    "convert",
    "infsa_attention",
    "linear_infsa_scores",
    "pure_infsa_scores",
    "replace_attention",
    "revert",
]
