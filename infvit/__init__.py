"""infvit: train and measure vision transformers with infinite self-attention. Importing registers all models."""

from infvit import attention, models
from infvit.convert import convert, revert
from infvit.models import attention_maps, mixing_matrices, reparameterize
from infvit.version import __version__

__all__ = [
    "__version__",
    "attention",
    "attention_maps",
    "convert",
    "mixing_matrices",
    "models",
    "reparameterize",
    "revert",
]
