"""`data.classes`: a subset of the classes, in training and in the evaluation of what was trained."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from timm.data import ImageNetInfo

from infvit.config import DataConfig, EngineConfig, EvalConfig, ModelConfig, RecipeConfig, TrainConfig
from infvit.data import build_source, preflight
from infvit.data.class_list import read_class_list
from infvit.data.digits import digit_arrays
from infvit.engine import train
from infvit.errors import ConfigError, DataError
from infvit.evaluation import evaluate


@pytest.fixture
def chosen(tmp_path: Path) -> DataConfig:
    """Three digits, not in order, in a file as Windows writes it."""
    (tmp_path / "list.txt").write_bytes("8\r\n\r\n# a comment\r\n 1\r\n5\r\n".encode("utf-8-sig"))
    return DataConfig(name="digits", img_size=16, num_workers=0, classes=str(tmp_path / "list.txt"))


def test_images_and_labels(chosen: DataConfig) -> None:
    for split in ("train", "val"):
        source = build_source(chosen, split)
        images, labels = digit_arrays(split)
        kept = [i for i, label in enumerate(labels) if label in (8, 1, 5)]
        assert source.classes == ("8", "1", "5")
        assert [source.classes[source.target(i)] for i in range(len(source))] == [str(labels[i]) for i in kept]
        for i in (0, 7, len(kept) - 1):
            pixels = np.asarray(source.image(i).convert("L")).astype(float)
            assert np.abs(pixels - images[kept[i]] * 255).max() <= 1
    assert preflight(chosen).classes == ("8", "1", "5")


def test_a_run_keeps_its_classes(chosen: DataConfig, tmp_path: Path) -> None:
    """Its evaluation needs the file no more."""
    train(TrainConfig(
        model=ModelConfig(name="infvit_linear_mini", args={"depth": 1, "embed_dim": 24, "num_heads": 2}), data=chosen,
        recipe=RecipeConfig(warmup_epochs=0, repeated_aug=1, auto_augment=None, mixup=0.0, cutmix=0.0),
        engine=EngineConfig(device="cpu"), epochs=1, max_steps=2, batch_size=32, run_dir=str(tmp_path / "run"),
    ))  # fmt: skip
    Path(str(chosen.classes)).unlink()
    result = evaluate(EvalConfig(checkpoint=str(tmp_path / "run"), device="cpu"))["accuracy"]
    labels = digit_arrays("val")[1]
    assert result["classes"] == 3
    assert result["images"] == int(np.isin(labels, (8, 1, 5)).sum())
    with pytest.raises(ConfigError, match=r"data.classes=... is for eval=imagenet"):
        evaluate(EvalConfig(checkpoint=str(tmp_path / "run"), device="cpu", data={"classes": "x"}))


def test_the_list_that_comes_along() -> None:
    """ImageNet-100 by its name: a hundred classes in the order of ImageNet-1K."""
    known = ImageNetInfo().label_names()
    classes = read_class_list("imagenet100", known)
    assert len(classes) == 100
    assert list(classes) == [name for name in known if name in classes]
    assert (classes[0], classes[-1]) == ("n01558993", "n13040303")  # of the published list, the first and last WNID
    for outside in ("../class_lists/imagenet100", "imagenet101"):
        with pytest.raises(DataError, match=r"data.classes=.* cannot be read .*or imagenet100"):
            read_class_list(outside, known)


def test_folders_of_imagenet(tmp_path: Path, image: object) -> None:
    """A root of all classes serves a list of some; a class without a folder keeps its place."""
    wnids = [ImageNetInfo().label_names()[i] for i in (5, 2, 900, 7)]
    for split in ("train", "val"):
        for wnid in wnids:
            image(f"{split}/{wnid}/x.jpg")  # type: ignore[operator]
    shutil.rmtree(tmp_path / "val" / wnids[1])
    (tmp_path / "list.txt").write_text("\n".join(wnids[:3]))
    data = DataConfig(name="imagenet", root=str(tmp_path), val_split="val", classes=str(tmp_path / "list.txt"))
    source = build_source(data, "train")
    found = {Path(source.locate(i)).parent.name: source.target(i) for i in range(len(source))}
    assert found == {wnid: i for i, wnid in enumerate(wnids[:3])}
    held_out = build_source(data, "val")
    assert held_out.classes == tuple(wnids[:3])
    assert sorted(held_out.target(i) for i in range(len(held_out))) == [0, 2]
    for wrong, message in (
        ("n01440765", "line 1: 'n01440765' is not among the 1000 classes .*Did you mean .*'n01440764'"),
        (wnids[0] + "\n" + wnids[0], "line 2: .* stands in line 1 already"),
        ("n01440764", "no image is of a class listed"),
    ):
        (tmp_path / "list.txt").write_text(wrong)
        with pytest.raises(DataError, match=message) as info:
            build_source(data, "train")
        assert "\n" not in str(info.value)
