"""Hugging Face transformers: importing this registers what converted models need, also to be loaded."""

from infvit.convert.transformers import saved
from infvit.convert.transformers.modules import LIBRARY

__all__ = ["LIBRARY", "saved"]
