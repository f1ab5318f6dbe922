"""Another attention mechanism in a model that somebody else wrote. See `docs/convert.md`."""

from infvit.convert.api import convert, revert
from infvit.convert.report import ConversionReport

__all__ = ["ConversionReport", "convert", "revert"]
