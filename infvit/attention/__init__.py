"""Attention mechanisms: one file each, one registration line each. See `docs/add-a-mechanism.md`."""

from infvit.attention.layer import AttentionLayer
from infvit.attention.linear import LinearInfSA
from infvit.attention.mechanism import (
    NO_MASK,
    Capabilities,
    Mask,
    Mechanism,
    Projections,
    get_mechanism,
    hyperparameters,
    list_mechanisms,
    register_mechanism,
)
from infvit.attention.pure import PureInfSA
from infvit.attention.softmax import SoftmaxAttention

register_mechanism(SoftmaxAttention)
register_mechanism(PureInfSA)
register_mechanism(LinearInfSA)

__all__ = [
    "NO_MASK",
    "AttentionLayer",
    "Capabilities",
    "LinearInfSA",
    "Mask",
    "Mechanism",
    "Projections",
    "PureInfSA",
    "SoftmaxAttention",
    "get_mechanism",
    "hyperparameters",
    "list_mechanisms",
    "register_mechanism",
]
