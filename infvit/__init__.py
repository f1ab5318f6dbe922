"""infvit: train and measure vision transformers with infinite self-attention. Importing registers all models."""

from infvit import attention, models
from infvit.convert import (
    ConversionReport,
    InfSAAttention,
    convert,
    infsa_attention,
    linear_infsa_scores,
    pure_infsa_scores,
    replace_attention,
    revert,
)
from infvit.models import attention_maps, mixing_matrices, reparameterize
from infvit.version import __version__

__all__ = [
    "ConversionReport",
    "InfSAAttention",
    "__version__",
    "attention",
    "attention_maps",
    "convert",
    "infsa_attention",
    "linear_infsa_scores",
    "mixing_matrices",
    "models",
    "pure_infsa_scores",
    "reparameterize",
    "replace_attention",
    "revert",
]
