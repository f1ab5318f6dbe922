"""eval=alignment, health, markov and oversmoothing: against values worked out from the model by hand."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import timm
import torch
from PIL import Image

from infvit.attention import AttentionLayer
from infvit.config import DataConfig, EvalConfig, ModelConfig, QualityConfig, RecipeConfig
from infvit.data import build_source, eval_transform
from infvit.engine.checkpoint import read
from infvit.engine.processes import ALONE, Processes
from infvit.errors import ConfigError, DataError
from infvit.evaluation import evaluate
from infvit.evaluation.alignment import evaluate_alignment
from infvit.evaluation.markov import evaluate_markov
from infvit.evaluation.matrices import evaluate_health
from infvit.evaluation.oversmoothing import evaluate_oversmoothing
from infvit.evaluation.rebuild import Rebuilt, rebuild
from infvit.metrics.markov import DivergenceError

KEYS: dict[str, Any] = {"device": "cpu", "precision": "fp32", "data": {"num_workers": 0}}
EVALUATIONS = {
    "alignment": evaluate_alignment, "health": evaluate_health, "markov": evaluate_markov,
    "oversmoothing": evaluate_oversmoothing,
}  # fmt: skip


def asked(output: Path, **keys: Any) -> EvalConfig:
    return EvalConfig(**{"checkpoint": "x", "output": str(output), **KEYS, **keys})


def built(name: str, tmp_path: Path, img_size: int = 16, **arguments: Any) -> Rebuilt:
    """A model as it was initialised, on the digits."""
    torch.manual_seed(0)
    if "vit_mini" in name or "pure" in name or "linear" in name:
        arguments = {"depth": 2, "embed_dim": 24, "num_heads": 2, **arguments}
    model = timm.create_model(name, num_classes=10, img_size=img_size, **arguments).eval()
    data = DataConfig(name="digits", num_workers=0, mean=[0.5] * 3, std=[0.5] * 3, img_size=img_size)
    return Rebuilt(
        path=tmp_path / name / "best.pt", model=model, data=data, recipe=RecipeConfig(),
        classes=tuple("0123456789"), img_size=img_size, notes=[], folder=tmp_path,
    )  # fmt: skip


def images_of(rebuilt: Rebuilt, indices: list[int]) -> torch.Tensor:
    source = build_source(rebuilt.data, "val")
    transform = eval_transform(
        rebuilt.recipe.crop_pct, rebuilt.recipe.interpolation, rebuilt.data, rebuilt.img_size, "center"
    )
    return torch.stack([transform(source.image(index)) for index in indices])


def inputs_of(model: torch.nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """What enters each attention layer."""
    seen: list[torch.Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, AttentionLayer)]
    hooks = [layer.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for layer in layers]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return seen


def table_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def test_alignment_by_hand(tmp_path: Path) -> None:
    rebuilt = built("infvit_linear_mini", tmp_path)
    result = evaluate_alignment(asked(tmp_path, num_images=3), rebuilt)
    assert result["images"] == 3
    assert result["samples"] == 3 * 2 * 2
    expected: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for layer, x in enumerate(inputs_of(rebuilt.model, images_of(rebuilt, [0, 120, 240]))):
        w, b = (value.detach() for value in rebuilt.model.blocks[layer].attn.qkv.parameters())
        q = (x @ w[:24].T + b[:24]).unflatten(-1, (2, 12)).double()
        for image in range(3):
            for head in range(2):
                s = q[image, :, head] / 12**0.5
                matrix = (s @ s.T).relu().numpy()
                v = scipy.linalg.eigh(matrix)[1][:, -1]
                v = v * np.sign(v.sum())
                norms = s.norm(dim=-1)
                a = (s @ ((norms / norms.sum()) @ s)).relu().numpy()
                pair = (v @ a / np.linalg.norm(a), scipy.stats.spearmanr(np.round(v, 9), a).statistic)
                expected.setdefault((layer, head), []).append(pair)
    for row in result["heads"]:
        cosines, ranks = np.array(expected[row["layer"], row["head"]]).T
        assert row["cosine"]["mean"] == pytest.approx(cosines.mean(), abs=1e-6)
        assert row["cosine"]["sd"] == pytest.approx(cosines.std(ddof=1), abs=1e-6)
        assert row["spearman"]["mean"] == pytest.approx(ranks.mean(), abs=1e-2)  # single precision may swap neighbours
    everything = [pair[0] for pairs in expected.values() for pair in pairs]
    assert result["cosine"]["mean"] == pytest.approx(np.mean(everything), abs=1e-6)
    assert result["layers"][1]["cosine"]["count"] == 6
    assert result["published"]["cosine"] == {"mean": 0.985, "sd": 0.036}
    rows = table_of(only(tmp_path, "alignment_*.csv"))
    assert [(row["layer"], row["head"]) for row in rows] == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert float(rows[2]["cosine_mean"]) == result["heads"][2]["cosine"]["mean"]
    text = only(tmp_path, "alignment_*.md").read_text()
    assert "| published | 512 | 0.985 ± 0.036 | 0.937 ± 0.132 |" in text
    with Image.open(only(tmp_path, "alignment_*.png")) as picture:
        assert picture.width > 1000


def test_dead_heads_are_excluded_from_alignment(tmp_path: Path) -> None:
    rebuilt = built("infvit_linear_mini", tmp_path)
    with torch.no_grad():
        for parameter in rebuilt.model.blocks[0].attn.qkv.parameters():
            parameter[:12] = 0  # the queries of head 0, which are its keys
    result = evaluate_alignment(asked(tmp_path, num_images=2), rebuilt)
    assert result["heads"][0]["cosine"] == {"mean": None, "sd": None, "count": 0}
    assert result["heads"][0]["excluded"] == {"no weights": 2, "no eigenvector": 0}
    assert result["cosine"]["count"] == result["samples"] - 2
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("infvit_pure_mini", {}, r"about the weights of Linear InfSA; .* has infsa_pure"),
        ("infvit_linear_mini", {"tie_key": False}, r"the keys of blocks.0.attn are not its queries"),
        ("infvit_linear_mini", {"qk_norm": True}, r"the keys of blocks.0.attn are not its queries"),
    ],
)
def test_alignment_is_refused_where_it_makes_no_sense(
    name: str, arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    rebuilt = built(name, tmp_path, **arguments)
    if "qk_norm" in arguments:
        torch.nn.init.uniform_(rebuilt.model.blocks[0].attn.k_norm.weight)
    with pytest.raises(ConfigError, match=message):
        evaluate_alignment(asked(tmp_path, num_images=1), rebuilt)


@pytest.mark.parametrize("name", ["infvit_pure_mini", "infvit_linear_mini"])
def test_markov_and_health_by_hand(name: str, tmp_path: Path) -> None:
    rebuilt = built(name, tmp_path, gamma=0.6)
    config = asked(tmp_path, num_images=2)
    markov, health = evaluate_markov(config, rebuilt), evaluate_health(config, rebuilt)
    for layer, x in enumerate(inputs_of(rebuilt.model, images_of(rebuilt, [0, 180]))):
        m = rebuilt.model.blocks[layer].attn.matrix(x).detach().double().numpy()  # (2, H, N, N), gamma included
        radius = np.abs(np.linalg.eigvals(m)).max(-1)
        rest = 1 - m.sum(-1)
        row = markov["layers"][layer]
        assert row["graphs"] == 4
        assert row["spectral radius, mean"] == pytest.approx(radius.mean(), abs=1e-6)
        assert row["largest"] == pytest.approx(radius.max(), abs=1e-6)
        assert row["least absorption"] == pytest.approx(rest.min(), abs=1e-6)
        assert row["tokens with R < 0"] == (rest < 0).sum()
        assert row["Markov chains (%)"] == pytest.approx(100 * (rest >= 0).all(-1).mean())
        assert row["gamma"] == pytest.approx(0.6, abs=1e-6)
        visits, walked = np.zeros_like(m), np.broadcast_to(np.eye(m.shape[-1]), m.shape)
        for _ in range(500):  # step by step, where the walk may be
            visits, walked = visits + walked, walked @ m
        chain = (rest >= 0).all(-1)
        if chain.any():
            assert row["visits until absorbed"] == pytest.approx(visits.sum(-1)[chain].mean(), rel=1e-5)
            back = (visits * np.eye(m.shape[-1])).sum(-1) * rest
            assert row["absorbed where begun (%)"] == pytest.approx(100 * back[chain].mean(), rel=1e-5)
        else:
            assert row["visits until absorbed"] is row["absorbed where begun (%)"] is None
        paths = np.linalg.inv(np.eye(m.shape[-1]) - m).sum(-2)
        values, vectors = np.linalg.eig(m.swapaxes(-1, -2))
        leading = np.abs(np.take_along_axis(vectors, np.abs(values).argmax(-1)[..., None, None], -1)[..., 0].real)
        agree = [scipy.stats.spearmanr(paths[at].round(9), leading[at].round(9)).statistic for at in np.ndindex(2, 2)]
        assert row["Katz ~ eigenvector"] == pytest.approx(np.mean(agree), abs=1e-3)
        row = health["layers"][layer]
        assert row["dead heads (%)"] == pytest.approx(100 * (m == 0).all((-1, -2)).mean())
        assert row["dead query rows (%)"] == pytest.approx(100 * (m == 0).all(-1).mean())
        assert row["spectral radius, mean"] == pytest.approx(radius.mean(), abs=1e-6)
    for pattern in ("markov_layers_*.png", "markov_example_*.png", "markov_layers_*.md", "health_heads_*.csv"):
        assert only(tmp_path, pattern).stat().st_size
    json.dumps([markov, health], allow_nan=False)


def test_softmax_diverges_and_is_healthy(tmp_path: Path) -> None:
    rebuilt = built("vit_tiny_patch16_224", tmp_path, img_size=32, depth=1)
    config = asked(tmp_path, num_images=1)
    with pytest.raises(DivergenceError, match=r"M = gamma A of blocks.0.attn \(softmax\) is 1, not below 1"):
        evaluate_markov(config, rebuilt)
    (row,) = evaluate_health(config, rebuilt)["layers"]
    assert row["dead heads (%)"] == row["dead query rows (%)"] == 0
    assert row["spectral radius, largest"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("model", "names", "message"),
    [
        ("vit_mini", ["health", "markov"], r"under softmax \(blocks.0.attn of .*\) rows sum to 1"),
        ("vit_mini", ["oversmoothing", "alignment"], r"about the weights of Linear InfSA; .* has softmax"),
        ("vit_mini", ["oversmoothing", "maps"], r"quality.block=7: the model has 2 attention layers"),
        ("infvit_pure_mini", ["health", "attention_quality"], r"quality.block=7: the model has 2 attention layers"),
    ],
)
def test_what_a_model_cannot_have_is_refused_before_anything_is_measured(
    model: str, names: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rebuilt = built(model, tmp_path)
    monkeypatch.setattr("infvit.evaluation.run.open_model", lambda config: rebuilt)
    with pytest.raises(ConfigError, match=message):
        evaluate(asked(tmp_path, eval=names, num_images=1, quality=QualityConfig(block=7)))
    assert not list(tmp_path.glob("*.*"))


def test_oversmoothing_by_hand(tmp_path: Path) -> None:
    rebuilt = built("vit_tiny_patch16_224", tmp_path, img_size=32, depth=2, class_token=False, global_pool="avg")
    result = evaluate_oversmoothing(asked(tmp_path, num_images=3), rebuilt)
    (model,) = result["models"]
    model_, images = rebuilt.model, images_of(rebuilt, [0, 120, 240])
    with torch.no_grad():
        x = model_.norm_pre(model_.patch_drop(model_.pos_drop(model_.patch_embed(images) + model_.pos_embed)))
        shares = []
        for layer in range(3):
            tokens = x.double().numpy()
            energy = np.abs(np.fft.fft(tokens, axis=1)) ** 2
            shares.append(energy[:, 1:].sum((1, 2)) / energy.sum((1, 2)))
            row = model["layers"][layer]
            assert row["layer"] == layer
            assert row["high_frequency"]["mean"] == pytest.approx(shares[-1].mean(), rel=1e-4)
            amplitude = np.log(np.sqrt(shares[-1] / shares[0]))
            assert row["log_amplitude"]["mean"] == pytest.approx(amplitude.mean(), abs=1e-4)
            assert row["log_amplitude"]["sd"] == pytest.approx(amplitude.std(ddof=1), abs=1e-4)
            unit = tokens / np.linalg.norm(tokens, axis=-1, keepdims=True)
            gram = unit @ unit.swapaxes(1, 2)
            n = gram.shape[-1]
            cosine = (gram.sum((1, 2)) - n) / (n * (n - 1))
            assert row["token_cosine"]["mean"] == pytest.approx(cosine.mean(), abs=1e-5)
            s = np.linalg.svd(tokens, compute_uv=False)
            p = s / s.sum(-1, keepdims=True)
            assert row["effective_rank"]["mean"] == pytest.approx(np.exp(-(p * np.log(p)).sum(-1)).mean(), rel=1e-4)
            if layer < 2:
                x = model_.blocks[layer](x)


def test_prefix_tokens_are_not_smoothed(tmp_path: Path) -> None:
    """A model whose five prefix tokens are enormous: the patches are measured without them."""
    rebuilt = built("vit_tiny_patch16_224", tmp_path, img_size=32, depth=1, reg_tokens=4)
    assert rebuilt.model.num_prefix_tokens == 5
    with torch.no_grad():
        rebuilt.model.reg_token.fill_(1e6)
        rebuilt.model.blocks[0].attn.proj.weight.zero_()
    (model,) = evaluate_oversmoothing(asked(tmp_path, num_images=1), rebuilt)["models"]
    assert model["layers"][0]["effective_rank"]["mean"] > 1.5


def test_several_models_in_one_figure(run: Path, tmp_path: Path) -> None:
    """Runs by name, the first of them in place of `checkpoint`; each is what it is alone."""
    keys = {**KEYS, "eval": "oversmoothing", "num_images": 4}
    best = len(read(run / "best.pt")["history"])
    other = next(run / name for name in ("last.pt", "previous.pt") if len(read(run / name)["history"]) != best)
    both = evaluate(EvalConfig(runs=[str(run), str(other)], output=str(tmp_path / "both"), **keys))
    alone = evaluate(EvalConfig(checkpoint=str(other), output=str(tmp_path / "alone"), **keys))
    first, second = both["oversmoothing"]["models"]
    assert [row["model"] for row in (first, second)] == [str(run / "best.pt"), str(other)], "alike but for this"
    assert second["layers"] == alone["oversmoothing"]["models"][0]["layers"]
    assert first["layers"] != second["layers"]
    assert len(table_of(only(tmp_path / "both", "oversmoothing_*.csv"))) == 4
    assert only(tmp_path / "both", "oversmoothing_*.png").stat().st_size


@pytest.mark.parametrize("name", ["resnet18", "swin_tiny_patch4_window7_224"])
@pytest.mark.parametrize("evaluation", ["health", "oversmoothing"])
def test_models_without_tokens_are_refused_by_name(name: str, evaluation: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        kind = type(timm.create_model(name)).__name__
    model = type(kind, (torch.nn.Module,), {"forward": lambda self, x: x})()  # known by its class only
    rebuilt = replace(built("vit_mini", tmp_path, depth=1), model=model)
    with pytest.raises(ConfigError, match=kind):
        EVALUATIONS[evaluation](asked(tmp_path, num_images=1), rebuilt)


@pytest.mark.parametrize("evaluation", ["alignment", "health", "markov"])
def test_the_same_at_every_batch_size_and_number_of_processes(
    evaluation: str, run: Path, tmp_path: Path, ranks: Any
) -> None:
    def work(folder: str, **keys: Any) -> Any:
        config = asked(tmp_path / folder, num_images=5, **keys)
        return config, rebuild(str(run), "raw", {"num_workers": 0})

    results = []
    for batch_size in (2, 5):
        config, rebuilt = work(str(batch_size), batch_size=batch_size)
        (tmp_path / str(batch_size)).mkdir()
        results.append(EVALUATIONS[evaluation](config, rebuilt, ALONE))

    def share(rank: int) -> Any:
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
        config, rebuilt = work("two")
        (tmp_path / "two").mkdir(exist_ok=True)
        return EVALUATIONS[evaluation](config, rebuilt, Processes(rank, 2, rank))

    shares = ranks(2, share)
    assert not any(isinstance(other, SimpleNamespace) for other in shares), shares
    for other in (results[1], *shares):
        assert numbers(other) == pytest.approx(numbers(results[0]), abs=1e-4, nan_ok=True)


def numbers(tree: Any) -> list[float]:
    if isinstance(tree, dict):
        return [number for value in tree.values() for number in numbers(value)]
    if isinstance(tree, list):
        return [number for value in tree for number in numbers(value)]
    return [math.nan if tree is None else tree] if tree is None or isinstance(tree, int | float) else []


def test_images_are_spread_over_the_split_and_labels_play_no_part(tmp_path: Path) -> None:
    """A folder of class names that the model has never heard of, sorted by class, and an image of no class at all."""
    for label in ("ant", "bee", "cat"):
        folder = tmp_path / "data" / "validation" / label
        folder.mkdir(parents=True)
        for at in range(4):
            Image.new("RGB", (20, 20), (60 * at, 90, 30)).save(folder / f"{at}.png")
    rebuilt = built("infvit_pure_mini", tmp_path)
    data = replace(rebuilt.data, name="folder", root=str(tmp_path / "data"))
    result = evaluate_health(asked(tmp_path, num_images=6), replace(rebuilt, data=data))
    assert result["images"] == 6
    Image.new("RGB", (20, 20)).save(tmp_path / "data" / "validation" / "stray.png")
    everything = evaluate_health(asked(tmp_path, num_images=99), replace(rebuilt, data=data))
    assert everything["images"] == 13


def test_a_damaged_image_is_an_error_or_counted(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "validation" / "a"
    folder.mkdir(parents=True)
    Image.new("RGB", (20, 20)).save(folder / "0.png")
    (folder / "1.png").write_bytes(b"no image")
    rebuilt = built("infvit_pure_mini", tmp_path)
    rebuilt = replace(rebuilt, data=replace(rebuilt.data, name="folder", root=str(tmp_path / "data")))
    with pytest.raises(DataError, match=r"1\.png"):
        evaluate_health(asked(tmp_path), rebuilt)
    result = evaluate_health(asked(tmp_path, on_damaged="exclude"), rebuilt)
    assert (result["images"], result["damaged"]) == (1, 1)


@pytest.mark.parametrize("evaluation", ["alignment", "health", "markov"])
def test_weights_that_are_not_finite_are_an_error(evaluation: str, tmp_path: Path) -> None:
    rebuilt = built("infvit_linear_mini", tmp_path)
    with torch.no_grad():
        rebuilt.model.blocks[0].attn.qkv.weight[0, 0] = torch.nan
    with pytest.raises(DataError, match="not finite"):
        EVALUATIONS[evaluation](asked(tmp_path, num_images=1), rebuilt)


def test_keys() -> None:
    with pytest.raises(ConfigError, match="num_images=0 must be at least 1"):
        EvalConfig(checkpoint="x", num_images=0)
    with pytest.raises(ConfigError, match=r"runs=\.\.\. is for eval=compare, maps and oversmoothing"):
        EvalConfig(checkpoint="x", eval="markov", runs=["a", "b"])
    config = EvalConfig(eval="oversmoothing", runs=["a", "b"], model=ModelConfig(name=""))
    assert (config.checkpoint, config.runs) == ("a", ["b"])
