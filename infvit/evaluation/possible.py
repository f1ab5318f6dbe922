"""Whether a model has what the analyses asked for look at: refused on one blank image, before any of them runs."""

from collections.abc import Callable, Iterable, Sequence

import torch

from infvit.attention import SoftmaxAttention
from infvit.config import EvalConfig
from infvit.errors import ConfigError
from infvit.evaluation.alignment import linear_calls
from infvit.evaluation.rebuild import Rebuilt
from infvit.evaluation.relevance import relevance
from infvit.models.inspect import AttentionCall, attention_calls

Need = Callable[[Sequence[AttentionCall], EvalConfig, str], object]
"""Given what the layers were given, the configuration and the model's name; raises where an analysis makes no sense."""


def _a_matrix(calls: Sequence[AttentionCall], config: EvalConfig, model: str) -> None:
    for call in calls:
        call.matrix()


def _paths_that_converge(calls: Sequence[AttentionCall], config: EvalConfig, model: str) -> None:
    _a_matrix(calls, config, model)
    for call in calls:
        if isinstance(call.mechanism, SoftmaxAttention):
            raise ConfigError(
                f"eval=markov sums over all paths; under softmax ({call.name} of {model}) rows sum to 1, so the "
                "spectral radius is 1, not below 1, and there is no sum. Take markov out of eval=[...]."
            )


NEEDS: dict[str, Need] = {
    "alignment": lambda calls, config, model: linear_calls(calls, model),
    "attention_quality": lambda calls, config, model: relevance(calls, config),
    "health": _a_matrix,
    "maps": lambda calls, config, model: relevance(calls, config),
    "markov": _paths_that_converge,
}


def require_possible(config: EvalConfig, rebuilt: Rebuilt, names: Iterable[str]) -> None:
    """Refuses analyses that a model cannot have, whatever the images.

    Raises:
        ConfigError: attention that cannot be read; or no matrix, no map, no layer of Linear InfSA, no sum over paths,
            where an analysis is about it.
    """
    needs = [NEEDS[name] for name in names if name in NEEDS]
    if needs:
        side = rebuilt.img_size
        calls = attention_calls(rebuilt.model, torch.zeros(1, rebuilt.data.in_chans, side, side))
        for need in needs:
            need(calls, config, str(rebuilt.path))
