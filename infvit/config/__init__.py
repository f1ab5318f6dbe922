"""The one vocabulary of configuration: typed dataclasses, checked where Hydra's output enters the program.

`configs/*.yaml` compose these; `infvit.cli.from_hydra` turns the composed tree into a `TrainConfig` or `EvalConfig`,
and every rule that needs more than one field is checked in `__post_init__`. `docs/configuration.md` is generated from
them.
"""

from infvit.config.evaluation import STANDALONE, WEIGHTS, EfficiencyConfig, EvalConfig, QualityConfig
from infvit.config.keys import DEVICES, PRECISIONS, key, leaf_keys
from infvit.config.training import (
    CHANGEABLE,
    ELSEWHERE,
    RESIZES,
    TORCH_FILTERS,
    DataConfig,
    EngineConfig,
    LoggerConfig,
    ModelConfig,
    RecipeConfig,
    TrainConfig,
)

__all__ = [
    "CHANGEABLE",
    "DEVICES",
    "ELSEWHERE",
    "PRECISIONS",
    "RESIZES",
    "STANDALONE",
    "TORCH_FILTERS",
    "WEIGHTS",
    "DataConfig",
    "EfficiencyConfig",
    "EngineConfig",
    "EvalConfig",
    "LoggerConfig",
    "ModelConfig",
    "QualityConfig",
    "RecipeConfig",
    "TrainConfig",
    "key",
    "leaf_keys",
]
