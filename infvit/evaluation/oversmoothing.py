"""`eval=oversmoothing`: how alike the tokens become, layer by layer, of one or several models (AGF, Fig. 3)."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from infvit.config import EvalConfig, ModelConfig
from infvit.engine.processes import ALONE, Processes
from infvit.evaluation.baseline import open_model
from infvit.evaluation.files import result_path
from infvit.evaluation.rebuild import Rebuilt, model_labels
from infvit.evaluation.samples import examine
from infvit.evaluation.spectral_figures import draw_smoothing
from infvit.evaluation.tables import mean_sd, to_markdown, write_csv
from infvit.metrics.smoothing import effective_rank, high_frequency_share, token_cosine
from infvit.models.features import block_tokens

IMAGES = 64
COLUMNS = ("high_frequency", "log_amplitude", "token_cosine", "effective_rank")


def evaluate_oversmoothing(config: EvalConfig, rebuilt: Rebuilt, processes: Processes = ALONE) -> dict[str, Any]:
    """Measures the patch tokens before the first block (layer 0) and after each, of this model and those of `runs`.

    Each model sees images of its own data set, unless `data.*` names one for all.

    Returns:
        `models`: for each its `layers`, with mean, standard deviation and count over images of the share of high
        frequencies, of its amplitude against that of layer 0 (natural logarithm), of the cosine between two tokens and
        of the effective rank; and what they depend on. Written too: `oversmoothing_*.csv`, `.md`, `.png`.

    Raises:
        ConfigError: a model without blocks of tokens.
    """
    with processes.together():
        others = [
            open_model(replace(config, checkpoint=run, model=ModelConfig(name=""), runs=[])) for run in config.runs
        ]
    models = [rebuilt, *others]
    results = [_measure(config, model, processes) for model in models]
    labels = model_labels(models)
    rows = [
        {"model": label, "layer": layer["layer"]}
        | {f"{name}{part}": layer[name][key] for name in COLUMNS for part, key in (("", "mean"), ("_sd", "sd"))}
        for label, result in zip(labels, results, strict=True) for layer in result["layers"]
    ]  # fmt: skip
    if processes.first:
        table = to_markdown([{name: row[name] for name in ("model", "layer", *COLUMNS)} for row in rows])
        print(table)
        path = result_path(config, rebuilt, "oversmoothing", "layers", ".csv")
        write_csv(path, rows)
        path.with_suffix(".md").write_text(table + "\n")
        draw_smoothing({label: result["layers"] for label, result in zip(labels, results, strict=True)},
                       path.with_suffix(".png"))  # fmt: skip
    return {"models": [{"model": label, **result} for label, result in zip(labels, results, strict=True)]}


def _measure(config: EvalConfig, rebuilt: Rebuilt, processes: Processes) -> dict[str, Any]:
    def look(model: nn.Module, images: Tensor) -> list[Tensor]:
        layers = []
        for tokens in block_tokens(model, images):
            tokens = tokens.cpu()  # float64 is not everywhere
            layers.append(torch.stack([high_frequency_share(tokens), token_cosine(tokens), effective_rank(tokens)]))
        return list(torch.stack(layers).permute(2, 0, 1))  # an image each: (layers, 3)

    samples = examine(config, rebuilt, processes, IMAGES, look)
    share, cosine, rank = torch.stack(samples.found).unbind(-1)  # each (images, layers)
    amplitude = 0.5 * (share / share[:, :1]).log()  # the share is one of energy
    amplitude = amplitude.masked_fill(~amplitude.isfinite(), math.nan)
    columns = zip(COLUMNS, (share, amplitude, cosine, rank), strict=True)
    summaries = {name: [mean_sd(layer) for layer in values.T.tolist()] for name, values in columns}
    layers = [
        {"layer": at, **{name: summary[at] for name, summary in summaries.items()}} for at in range(share.shape[1])
    ]
    return {**samples.about, "layers": layers}
