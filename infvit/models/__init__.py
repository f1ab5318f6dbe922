"""Models in timm's registry. Importing this module registers them."""

from infvit.models.infvit import InfViT, reparameterize
from infvit.models.inspect import AttentionCall, attention_calls, attention_maps, mixing_matrices

__all__ = ["AttentionCall", "InfViT", "attention_calls", "attention_maps", "mixing_matrices", "reparameterize"]
