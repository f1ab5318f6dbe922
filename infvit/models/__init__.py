"""Models in timm's registry. Importing this module registers them."""

from infvit.models.infvit import InfViT, reparameterize

__all__ = ["InfViT", "reparameterize"]
