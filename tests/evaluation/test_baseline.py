"""Models of timm's registry beside ours: the same predictions and scores, image by image, as timm's own code gives."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from imagenet_trees import WNIDS
from PIL import Image
from timm.data import create_dataset, create_loader, resolve_data_config

from infvit.config import EvalConfig, ModelConfig
from infvit.data.ground_truth import imagenet_classes
from infvit.errors import CheckpointError, ConfigError, DataError
from infvit.evaluation import evaluate


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A noisy JPEG in every class folder of val and of ImageNet-A, of changing shape; some are grey."""
    root, draw = tmp_path_factory.mktemp("noise"), np.random.default_rng(0)
    places = [f"val/{wnid}" for wnid in WNIDS] + [f"imagenet-a/{wnid}" for wnid in imagenet_classes("imagenet_a")]
    for at, place in enumerate(places):
        (root / place).mkdir(parents=True)
        pixels = draw.integers(0, 256, (3 + at % 5, 4 + at % 7, 3)).astype(np.uint8)
        image = Image.fromarray(pixels).resize((20 + at % 40, 50 - at % 30), Image.Resampling.BICUBIC)
        (image.convert("L") if at % 9 == 0 else image).save(root / place / "x.JPEG")
    return root


def save_weights(name: str, path: Path, **arguments: Any) -> None:
    """Random weights, large enough for predictions that differ from image to image."""
    torch.manual_seed(1)
    model = timm.create_model(name, **arguments)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=2.0 / parameter[0].numel() ** 0.5)
    torch.save({"state_dict": model.state_dict()}, path)


def config(name: str, checkpoint: Path | None, output: Path, eval: Any, root: Path, **keys: Any) -> EvalConfig:
    return EvalConfig(
        model=ModelConfig(name=name), checkpoint=None if checkpoint is None else str(checkpoint), eval=eval,
        output=str(output), device="cpu", precision="fp32",
        **{**keys, "data": {"root": str(root), "num_workers": 0, **keys.get("data", {})}},
    )  # fmt: skip


def by_timm(
    name: str, weights: Path, folder: Path, valid: list[int] | None = None
) -> tuple[np.ndarray, list[str], Any]:
    """Logits, file names and targets, by what timm's validation script calls."""
    model = timm.create_model(name, checkpoint_path=str(weights)).eval()
    data_config = resolve_data_config({}, model=model, use_test_size=True)
    dataset = create_dataset(root=str(folder), name="", split="validation")
    loader = create_loader(
        dataset, input_size=data_config["input_size"], batch_size=64, use_prefetcher=False, num_workers=0,
        interpolation=data_config["interpolation"], mean=data_config["mean"], std=data_config["std"],
        crop_pct=data_config["crop_pct"], crop_mode=data_config["crop_mode"], device=torch.device("cpu"),
    )  # fmt: skip
    with torch.no_grad():
        batches = [(model(images), targets) for images, targets in loader]
    logits = torch.cat([out for out, _ in batches]).double()
    logits = logits if valid is None else logits[:, valid]
    return logits.numpy(), dataset.filenames(basename=False, absolute=False), torch.cat([t for _, t in batches]).numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "set_name"),
    [("test_vit", "imagenet"), ("test_vit", "imagenet_a"), ("test_resnet", "imagenet"), ("test_nfnet", "imagenet_a")],
)
def test_every_image_as_timm_has_it(root: Path, tmp_path: Path, name: str, set_name: str) -> None:
    """`test_resnet` normalises otherwise than the two others; the logits of `test_nfnet` are so large that most
    probabilities are 0."""
    save_weights(name, tmp_path / "weights.pt")
    folder, valid = root / "val", None
    if set_name == "imagenet_a":
        folder, valid = root / "imagenet-a", [WNIDS.index(wnid) for wnid in imagenet_classes(set_name)]
    classes = WNIDS if valid is None else imagenet_classes(set_name)
    logits, files, targets = by_timm(name, tmp_path / "weights.pt", folder, valid)
    row = evaluate(config(name, tmp_path / "weights.pt", tmp_path, set_name, root))[set_name]
    (path,) = tmp_path.glob(f"predictions_{set_name}_*.csv")
    with path.open(newline="") as file:
        ours = {line["image"]: line for line in csv.DictReader(file)}
    assert sorted(ours) == sorted(files)
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    order = np.argsort(-logits, 1)[:, :5]
    for at, file_name in enumerate(files):
        line = ours[file_name]
        assert line["label"] == classes[targets[at]]
        assert line["prediction"] == classes[order[at, 0]]
        assert line["top5_classes"].split("|") == [classes[i] for i in order[at]]
        assert float(line["probability"]) == pytest.approx(probabilities[at, order[at, 0]], rel=1e-4)
    assert len(set(order[:, 0].tolist())) > 3  # the model does not say the same of all
    assert row["top1"] == pytest.approx(100 * np.mean(order[:, 0] == targets))
    assert row["top5"] == pytest.approx(100 * np.mean([t in o for t, o in zip(targets, order, strict=True)]))
    assert row["images"] == len(files)
    expected = timm.get_pretrained_cfg(name)
    assert (row["crop_pct"], row["resolution"]) == (expected.crop_pct, expected.input_size[1])


def test_our_own_models_by_name(root: Path, tmp_path: Path) -> None:
    save_weights("infvit_linear_mini", tmp_path / "w.pt", num_classes=1000)
    keys = {"data": {"img_size": 16}, "batch_size": 500}
    with pytest.raises(CheckpointError, match="does not fit the model"):
        evaluate(config("infvit_pure_mini", tmp_path / "w.pt", tmp_path, "imagenet_a", root, **keys))
    row = evaluate(config("infvit_linear_mini", tmp_path / "w.pt", tmp_path, "imagenet_a", root, **keys))["imagenet_a"]
    assert (row["images"], row["resolution"]) == (200, 16)


def test_accuracy_of_a_timm_model(root: Path, tmp_path: Path) -> None:
    """`eval=accuracy` reads the same val folder."""
    save_weights("test_resnet", tmp_path / "w.pt")
    keys = {"data": {"img_size": 32}, "batch_size": 500}
    results = evaluate(config("test_resnet", tmp_path / "w.pt", tmp_path, ["accuracy", "imagenet"], root, **keys))
    for name in ("top1", "top5", "images", "resolution", "crop_pct"):
        assert results["accuracy"][name] == results["imagenet"][name]


def test_a_head_of_chosen_classes(root: Path, tmp_path: Path) -> None:
    """100 logits: which classes they are is said by the list, or else not guessed."""
    chosen = [WNIDS[i] for i in range(999, 0, -10)]
    (tmp_path / "list.txt").write_text("\n".join(chosen))
    save_weights("test_resnet", tmp_path / "w.pt", num_classes=100)
    data = {"img_size": 32, "classes": str(tmp_path / "list.txt")}
    result = evaluate(config("test_resnet", tmp_path / "w.pt", tmp_path, "imagenet", root, data=data))["imagenet"]
    assert (result["images"], result["classes"], result["outside"]) == (100, 100, 900)
    model = timm.create_model("test_resnet", num_classes=100, checkpoint_path=str(tmp_path / "w.pt")).eval()
    (path,) = tmp_path.glob("predictions_imagenet_*.csv")
    with path.open(newline="") as file:
        line = next(line for line in csv.DictReader(file) if line["label"] == chosen[0])
    cfg = resolve_data_config({"img_size": 32}, model=model)
    transform = timm.data.create_transform(**{**cfg, "input_size": (3, 32, 32)})
    with Image.open(root / "val" / chosen[0] / "x.JPEG") as image, torch.no_grad():
        assert line["prediction"] == chosen[int(model(transform(image.convert("RGB"))[None]).argmax())]
    with pytest.raises(ConfigError, match=r"which 100 classes does the model have\? .*data.classes=FILE"):
        evaluate(config("test_resnet", tmp_path / "w.pt", tmp_path, "imagenet", root, data={"img_size": 32}))
    (tmp_path / "list.txt").write_text("\n".join(chosen[1:]))
    with pytest.raises(ConfigError, match="lists 99 classes, but the model has 100"):
        evaluate(config("test_resnet", tmp_path / "w.pt", tmp_path, "imagenet", root, data=data))


def test_pretrained_weights(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a file timm's own are fetched: named by the model or by the checkpoint. Here they come from a patch."""
    asked = []
    save_weights("test_resnet", tmp_path / "w.pt")

    def fetched(name: str, key: str) -> dict[str, torch.Tensor]:
        asked.append((name, key))
        return torch.load(tmp_path / "w.pt")["state_dict"]

    monkeypatch.setattr("infvit.evaluation.baseline.pretrained_state", fetched)
    monkeypatch.chdir(tmp_path)
    keys = {"eval": "imagenet_a", "device": "cpu", "data": {"root": str(root), "num_workers": 0, "img_size": 32}}
    by_model = evaluate(EvalConfig(model=ModelConfig(name="test_resnet"), **keys))
    by_checkpoint = evaluate(EvalConfig(checkpoint="timm/test_resnet", **keys))
    assert by_model == by_checkpoint
    assert asked == [("test_resnet", "model"), ("test_resnet", "model")]
    assert by_model["imagenet_a"]["checkpoint"] == "timm/test_resnet"
    assert list((tmp_path / "runs/timm-test_resnet").glob("table_imagenet_*.csv"))


def test_what_is_refused(root: Path, tmp_path: Path, run: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown model=test_resnett. Did you mean 'test_resnet'"):
        evaluate(config("test_resnett", None, tmp_path, "imagenet", root))
    with pytest.raises(ConfigError, match="is of a run, which knows its model; leave out model=test_vit"):
        evaluate(config("test_vit", run, tmp_path, "imagenet", root))
    with pytest.raises(ConfigError, match="name different models; leave one out"):
        evaluate(EvalConfig(model=ModelConfig(name="test_vit"), checkpoint="timm/test_resnet", eval="imagenet"))
    with pytest.raises(CheckpointError, match=r"model=timm/test_resnet.nowhere: timm has no such weights"):
        evaluate(config("test_resnet.nowhere", None, tmp_path, "imagenet", root))
    evaluate_run = EvalConfig(checkpoint=str(run), eval="imagenet", data={"name": "folder", "root": str(root)})
    with pytest.raises(DataError, match=r"no image is of a class that the model has .*'0', '1'"):
        evaluate(evaluate_run)
