"""infvit: train and measure vision transformers with infinite self-attention. Importing registers all models."""

from infvit import attention, models
from infvit.models import reparameterize
from infvit.version import __version__

__all__ = ["__version__", "attention", "models", "reparameterize"]
