"""Attention mechanisms: one file each, one registration line each. See `docs/add-a-mechanism.md`."""

from infvit.attention.agf import AGF
from infvit.attention.auxiliary import AuxiliaryLoss, auxiliary_losses, collect_losses
from infvit.attention.cosformer import CosFormer
from infvit.attention.efficient import EfficientAttention
from infvit.attention.layer import AttentionLayer
from infvit.attention.linear import LinearInfSA, linear_infsa, linear_infsa_weights
from infvit.attention.linear_transformer import LinearTransformer
from infvit.attention.linformer import Linformer
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
from infvit.attention.nystromformer import Nystromformer
from infvit.attention.performer import Performer
from infvit.attention.pure import PureInfSA, pure_infsa, pure_infsa_matrix
from infvit.attention.singularformer import Singularformer
from infvit.attention.softmax import SoftmaxAttention, UnfusedSoftmaxAttention

register_mechanism(SoftmaxAttention)
register_mechanism(UnfusedSoftmaxAttention)
register_mechanism(PureInfSA)
register_mechanism(LinearInfSA)
register_mechanism(LinearTransformer)
register_mechanism(Performer)
register_mechanism(Linformer)
register_mechanism(Nystromformer)
register_mechanism(EfficientAttention)
register_mechanism(CosFormer)
register_mechanism(AGF)
register_mechanism(Singularformer)

__all__ = [
    "AGF",
    "NO_MASK",
    "AttentionLayer",
    "AuxiliaryLoss",
    "Capabilities",
    "CosFormer",
    "EfficientAttention",
    "LinearInfSA",
    "LinearTransformer",
    "Linformer",
    "Mask",
    "Mechanism",
    "Nystromformer",
    "Performer",
    "Projections",
    "PureInfSA",
    "Singularformer",
    "SoftmaxAttention",
    "UnfusedSoftmaxAttention",
    "auxiliary_losses",
    "collect_losses",
    "get_mechanism",
    "hyperparameters",
    "linear_infsa",
    "linear_infsa_weights",
    "list_mechanisms",
    "pure_infsa",
    "pure_infsa_matrix",
    "register_mechanism",
]
