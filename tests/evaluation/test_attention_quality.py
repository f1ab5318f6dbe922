"""`eval=attention_quality` and `eval=maps`: toy models with known answers, other batches and processes, bad input."""

import csv
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor, nn

from infvit.config import DataConfig, EvalConfig, ModelConfig, QualityConfig, RecipeConfig
from infvit.data import build_source, eval_transform
from infvit.data.boxes import geometry
from infvit.data.digits import NAMES
from infvit.errors import ConfigError, DataError
from infvit.evaluation import evaluate
from infvit.evaluation.attention_quality import evaluate_attention_quality
from infvit.evaluation.chosen import choose
from infvit.evaluation.files import result_path
from infvit.evaluation.maps import evaluate_maps
from infvit.evaluation.rebuild import Rebuilt
from infvit.metrics import patch_labels
from infvit.models import attention_maps
from infvit.models.build import build_model

Ranks = Callable[..., list[Any]]
SCENES = DataConfig(
    name="digit_scenes", img_size=32, num_samples=120, num_workers=0, mean=[0.5] * 3, std=[0.25] * 3
)  # fmt: skip


def small(name: str = "infvit_linear_mini", data: DataConfig = SCENES, classes: int = 10, **args: Any) -> Rebuilt:
    """A model of two layers with random weights that tell images apart."""
    torch.manual_seed(1)
    model, _ = build_model(
        ModelConfig(name, args={"depth": 2, "embed_dim": 24, "num_heads": 2, **args}), classes, 3, 32
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return Rebuilt(Path("best.pt"), model.eval(), data, RecipeConfig(crop_pct=1.0), tuple(NAMES)[:classes], 32, [],
                   Path("nowhere"))  # fmt: skip


def config(output: Path, quality: dict[str, Any] | None = None, **keys: Any) -> EvalConfig:
    return EvalConfig(
        checkpoint="x", output=str(output), device="cpu", precision="fp32", eval="attention_quality",
        quality=QualityConfig(**{"perturbation_images": 12, "localization_images": 20, **(quality or {})}), **keys,
    )  # fmt: skip


def test_against_a_plain_loop(tmp_path: Path) -> None:
    """One image and one step at a time, as the specification reads; scikit-learn for the localisation."""
    rebuilt = small()
    result = evaluate_attention_quality(config(tmp_path, batch_size=7), rebuilt)
    source = build_source(SCENES, "val")
    transform = eval_transform(1.0, "bicubic", SCENES, 32)
    morf, lerf, roc, pr = [], [], [], []
    order = np.random.default_rng(0).permutation(len(source))
    for place, index in enumerate(order.tolist()):
        image = transform(source.image(index))[None]
        relevance = attention_maps(rebuilt.model, image)[-1, 0].mean(0).flatten()
        if place < 20:
            labels = patch_labels(np.array([source.box(index)]), (32, 32), (8, 8))
            roc.append(roc_auc_score(labels, relevance))
            pr.append(average_precision_score(labels, relevance))
        if place >= 12:
            continue
        with torch.no_grad():
            target = rebuilt.model(image).argmax()
            for sign, areas in ((-1, morf), (1, lerf)):
                first = sorted(range(64), key=lambda patch, s=sign, r=relevance: (s * r[patch].item(), patch))
                curve = []
                for share in range(0, 101, 5):
                    removed = image.clone()
                    for patch in first[: int(share * 64 / 100 + 0.5)]:
                        row, column = divmod(patch, 8)
                        removed[..., 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 0
                    curve.append(rebuilt.model(removed).double().softmax(1)[0, target].item())
                areas.append(np.trapezoid(np.clip(np.array(curve) / curve[0], 0, 1), np.linspace(0, 1, 21)))
    assert (result["perturbation_images"], result["localization_images"]) == (12, 20)
    assert result["morf_aoc"] == pytest.approx(100 * (1 - np.mean(morf)), abs=1e-3)
    assert result["lerf_auc"] == pytest.approx(100 * np.mean(lerf), abs=1e-3)
    assert result["lerf_auc_sd"] == pytest.approx(100 * np.std(lerf, ddof=1), abs=1e-3)
    assert result["roc_auc"] == pytest.approx(100 * np.mean(roc), abs=1e-4)
    assert result["pr_auc"] == pytest.approx(100 * np.mean(pr), abs=1e-4)
    assert result["localization_excluded"] == result["perturbation_excluded"] == {}
    (table,) = tmp_path.glob("images_*.csv")
    with table.open() as file:
        rows = {row["image"]: row for row in csv.DictReader(file)}
    assert len(rows) == 20
    first = rows[source.locate(int(order[3]))]
    assert float(first["morf_aoc"]) == pytest.approx(100 * (1 - morf[3]), abs=1e-3)
    assert float(first["roc_auc"]) == pytest.approx(100 * roc[3], abs=1e-4)
    assert json.loads(first["boxes"]) == [list(map(float, source.box(int(order[3]))))]
    assert {path.name.split("_")[0] for path in tmp_path.glob("*.png")} == {"perturbation", "localization"}


@pytest.mark.parametrize("name", ["infvit_pure_mini", "vit_mini"])
def test_the_same_at_every_batch_size_and_on_every_number_of_processes(tmp_path: Path, ranks: Ranks, name: str) -> None:
    def run(batch_size: int, world_size: int) -> dict[str, Any]:
        output = tmp_path / f"{batch_size}-{world_size}"
        asked = config(output, {"localization_images": 24}, batch_size=batch_size)
        output.mkdir()

        def work(rank: int) -> Any:
            from infvit.engine.processes import join_processes

            return evaluate_attention_quality(asked, small(name), join_processes("cpu", 1.0))

        return work(0) if world_size == 1 else ranks(world_size, work)[0]

    results = [run(64, 1), run(1, 1), run(9, 2), run(64, 3)]
    for other in results[1:]:
        assert other["roc_auc"] == results[0]["roc_auc"]  # maps are the same bit for bit
        for key in ("morf_aoc", "lerf_auc", "random_auc", "morf_aoc_sd", "pr_auc"):
            assert other[key] == pytest.approx(results[0][key], abs=1e-4)
        assert other["images_sha1"] == results[0]["images_sha1"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seven 40 x 40 images without classes, and annotations for six: one good, the others each of another kind."""
    images, boxes = tmp_path / "data" / "val", tmp_path / "boxes"
    images.mkdir(parents=True)
    boxes.mkdir()
    rng = np.random.default_rng(0)
    size = "<size><width>{}</width><height>40</height></size>"
    cases = {
        "good": (size.format(40), [(4, 4, 20, 20), (12, 12, 30, 30), (30, 5, 10, 9), (50, 50, 60, 60)]),
        "whole": (size.format(40), [(0, 0, 40, 40)]),
        "thin": (size.format(40), [(0, 0, 1, 1)]),
        "other": (size.format(80), [(4, 4, 20, 20)]),
        "outside": ("", [(41, 0, 50, 50)]),
        "empty": ("", []),
    }
    for name in (*cases, "none"):
        Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(images / f"{name}.png")
    for name, (sides, some) in cases.items():
        objects = "".join(
            "<object><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>".format(
                *box
            )
            for box in some
        )
        (boxes / f"{name}.xml").write_text(f"<annotation>{sides}{objects}</annotation>")
    return tmp_path


def data_of(folder: Path) -> DataConfig:
    return DataConfig(
        name="folder", root=str(folder / "data"), num_workers=0, mean=[0.5] * 3, std=[0.25] * 3, val_split="val"
    )


def test_what_cannot_be_scored_is_counted_by_reason(folder: Path) -> None:
    """Two boxes of the good image count as their union, once where they overlap; two are no boxes."""
    rebuilt = small(data=data_of(folder))
    result = evaluate_attention_quality(config(folder, {"annotations": str(folder / "boxes")}), rebuilt)
    assert result["localization_images"] == 1
    assert result["localization_annotated"] == 6
    assert result["localization_excluded"] == {
        "every patch in a box": 1, "no annotation": 1, "no box in the annotation": 1, "no patch centre in a box": 1,
        "no proper box inside the image": 1, "size differs from the annotation": 1,
    }  # fmt: skip
    assert result["boxes_dropped"] == {"inside out": 1, "outside the image": 2}
    assert result["perturbation_images"] == 7
    moved = geometry(eval_transform(1.0, "bicubic", rebuilt.data, 32), (40, 40))
    union = np.zeros((8, 8))
    for x0, y0, x1, y1 in moved.apply(np.array([[4.0, 4, 20, 20], [12, 12, 30, 30]])):
        centres = 4 * np.arange(8) + 2
        union[np.ix_((y0 <= centres) & (centres < y1), (x0 <= centres) & (centres < x1))] = 1
    assert result["prevalence"] == pytest.approx(100 * union.mean())


def test_a_model_of_timm_on_a_folder_with_boxes(tmp_path: Path) -> None:
    """Weights from a file, images wider than high with a crop: softmax's class-token row by hand, under boxes moved by
    hand. COCO's JSON says the same as VOC's XML."""
    arguments = {"depth": 2, "embed_dim": 24, "num_heads": 2}
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, **arguments).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    images, voc = tmp_path / "data" / "val", tmp_path / "voc"
    images.mkdir(parents=True)
    voc.mkdir()
    boxes = {"a": (30, 10, 70, 41), "b": (5, 0, 40, 60)}
    rng = np.random.default_rng(0)
    coco: dict[str, Any] = {"images": [], "annotations": []}
    for name, (x0, y0, x1, y1) in boxes.items():
        Image.fromarray(rng.integers(0, 255, (80, 120, 3), dtype=np.uint8)).save(images / f"{name}.png")
        corners = f"<xmin>{x0}</xmin><ymin>{y0}</ymin><xmax>{x1}</xmax><ymax>{y1}</ymax>"
        (voc / f"{name}.xml").write_text(f"<annotation><object><bndbox>{corners}</bndbox></object></annotation>")
        coco["images"].append({"id": name, "file_name": f"{name}.png", "width": 120, "height": 80})
        coco["annotations"].append({"image_id": name, "bbox": [x0, y0, x1 - x0, y1 - y0]})
    (tmp_path / "coco.json").write_text(json.dumps(coco))

    def run(annotations: str) -> dict[str, Any]:
        return evaluate(EvalConfig(
            model=ModelConfig("vit_tiny_patch16_224", args=arguments), checkpoint=str(tmp_path / "weights.pth"),
            data={"name": "folder", "root": str(tmp_path / "data"), "img_size": 64, "num_workers": 0}, crop_pct=0.8,
            quality=QualityConfig(annotations=str(tmp_path / annotations)), eval="attention_quality", device="cpu",
            precision="fp32", output=str(tmp_path / annotations.replace(".", "-")),
        ))["attention_quality"]  # fmt: skip

    result = run("voc")
    seen: list[Tensor] = []
    model.blocks[1].attn.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    roc = []
    for name, box in boxes.items():
        with Image.open(images / f"{name}.png") as image:  # the side of 80 becomes 64 / 0.8, so nothing is resized
            pixels = torch.tensor(np.asarray(image)[8:72, 28:92]).permute(2, 0, 1) / 255
        with torch.no_grad():
            model((pixels[None] - 0.5) / 0.5)
            q, k, _ = model.blocks[1].attn.qkv(seen.pop()).unflatten(-1, (3, 2, 12)).permute(2, 0, 3, 1, 4)
            row = (q @ k.mT / 12**0.5).softmax(-1)[0, :, 0, 1:].mean(0)
        centres = 16 * np.arange(4) + 8
        x0, y0, x1, y1 = np.array(box) - [28, 8, 28, 8]
        inside = ((y0 <= centres) & (centres < y1))[:, None] & ((x0 <= centres) & (centres < x1))
        roc.append(roc_auc_score(inside.ravel(), row))
    assert result["roc_auc"] == pytest.approx(100 * np.mean(roc), abs=1e-4)
    assert (result["mechanism"], result["map"], result["grid"]) == ("softmax", "class_token", "4x4")
    assert (result["localization_images"], result["perturbation_images"]) == (2, 2)
    again = run("coco.json")
    assert {**again, "annotations": result["annotations"]} == result


def test_without_boxes_only_the_perturbation_is_measured(folder: Path) -> None:
    result = evaluate_attention_quality(config(folder), small(data=data_of(folder)))
    assert result["roc_auc"] is None
    assert result["localization_excluded"] == {"no annotation": 7}
    assert result["morf_aoc"] is not None


def test_annotations_of_other_images_are_an_error(folder: Path) -> None:
    for path in (folder / "boxes").glob("*.xml"):
        path.rename(path.with_name(f"x{path.name}"))
    with pytest.raises(DataError, match="none of the 7 images"):
        evaluate_attention_quality(config(folder, {"annotations": str(folder / "boxes")}), small(data=data_of(folder)))


def test_a_damaged_image(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = folder / "data" / "val" / "good.png"
    path.write_bytes(path.read_bytes()[:200])
    asked = {"annotations": str(folder / "boxes")}
    with pytest.raises(DataError, match=r"good\.png"):
        evaluate_attention_quality(config(folder, asked), small(data=data_of(folder)))
    caplog.set_level(logging.INFO)
    result = evaluate_attention_quality(config(folder, asked, on_damaged="exclude"), small(data=data_of(folder)))
    assert result["perturbation_excluded"] == {"damaged": 1}
    assert result["localization_excluded"]["damaged"] == 1
    assert result["perturbation_images"] == 6
    assert result["roc_auc"] is None


def test_maps_that_are_not_finite(tmp_path: Path) -> None:
    """A model that has come apart measures nothing, which is an error; a map of NaN is not drawn."""
    rebuilt = small("infvit_pure_mini")
    nn.init.constant_(rebuilt.model.blocks[1].attn.qkv.weight, torch.nan)
    with pytest.raises(DataError, match="20 map not finite"):
        evaluate_attention_quality(config(tmp_path, {"perturbation_images": 0}), rebuilt)
    with pytest.raises(DataError, match="not finite; there is nothing to show"):
        evaluate_maps(config(tmp_path), rebuilt)


def test_constant_maps_are_counted_and_score_as_chance(tmp_path: Path) -> None:
    rebuilt = small("infvit_pure_mini")
    nn.init.zeros_(rebuilt.model.blocks[1].attn.qkv.weight)
    nn.init.zeros_(rebuilt.model.blocks[1].attn.qkv.bias)
    result = evaluate_attention_quality(config(tmp_path), rebuilt)
    assert result["constant_maps"] == 20
    assert result["roc_auc"] == 50
    assert result["pr_auc"] == pytest.approx(result["prevalence"])
    assert result["energy"] is None


def test_the_layer_the_heads_and_the_kind_of_map(tmp_path: Path) -> None:
    rebuilt = small("infvit_pure_mini")
    source = build_source(SCENES, "val")
    index = choose(config(tmp_path), rebuilt).order[0]
    image = eval_transform(1.0, "bicubic", SCENES, 32)(source.image(index))[None]
    labels = patch_labels(np.array([source.box(index)]), (32, 32), (8, 8))
    for quality, relevance in (
        ({"block": 0}, attention_maps(rebuilt.model, image)[0, 0].mean(0)),
        ({"heads": "1"}, attention_maps(rebuilt.model, image)[1, 0, 1]),
        ({"heads": "max", "map": "katz"}, attention_maps(rebuilt.model, image, "katz")[1, 0].amax(0)),
    ):
        asked = config(tmp_path, {"perturbation_images": 0, "localization_images": 1, **quality})
        result = evaluate_attention_quality(asked, rebuilt)
        assert result["roc_auc"] == pytest.approx(100 * roc_auc_score(labels, relevance.flatten()), abs=1e-4)
        assert result["perturbation_images"] == 0
    for quality, message in (
        ({"block": 2}, "2 attention layers"), ({"heads": "2"}, "has 2 heads"), ({"map": "weights"}, "no token map"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            evaluate_attention_quality(config(tmp_path, quality), rebuilt)


def test_a_list_of_images(tmp_path: Path, folder: Path) -> None:
    """By name, stem or an earlier result; a name that is not there, or twice, is an error."""
    rebuilt = small(data=data_of(folder))
    names = tmp_path / "list.txt"
    names.write_text("val/good.png\nthin\n\nnone.png\n")
    asked = {"annotations": str(folder / "boxes"), "image_list": str(names)}
    (folder / "out").mkdir()
    result = evaluate_attention_quality(config(folder / "out", asked), rebuilt)
    assert result["perturbation_images"] == 3
    assert result["localization_excluded"] == {"no annotation": 1, "no patch centre in a box": 1}
    (table,) = (folder / "out").glob("images_*.csv")
    again = evaluate_attention_quality(config(folder / "out", {**asked, "image_list": str(table)}), rebuilt)
    assert again["images_sha1"] == result["images_sha1"]
    assert again["morf_aoc"] == result["morf_aoc"]
    names.write_text("good\nnowhere\n")
    with pytest.raises(DataError, match="'nowhere' not found"):
        evaluate_attention_quality(config(folder, asked), rebuilt)


def test_maps_of_two_models_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure has a row for each image and two panels for each model beside the image; boxes are green."""
    monkeypatch.setattr("infvit.evaluation.maps.open_model", lambda config: small("vit_mini"))
    asked = EvalConfig(checkpoint="x", output=str(tmp_path), device="cpu", precision="fp32", eval="maps",
                       quality=QualityConfig(map_images=2), runs=["other"])  # fmt: skip
    result = evaluate_maps(asked, small())
    assert [model["mechanism"] for model in result["models"]] == ["infsa_linear", "softmax"]
    assert len(result["images"]) == 2
    pixels = np.asarray(Image.open(result["figure"]).convert("RGB")).astype(int)
    assert pixels.shape[1] / pixels.shape[0] > 1.8  # five panels to two rows
    green = (pixels[..., 1] > 200) & (pixels[..., 0] < 120) & (pixels[..., 2] < 120)
    assert green.sum() > 500


def test_boxes_of_maps_are_those_of_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two images of one name the annotated one has a box, where the transform takes it; the other has none."""
    for label in ("cat", "dog"):
        (tmp_path / "data" / "val" / label).mkdir(parents=True)
        Image.new("RGB", (64, 32)).save(tmp_path / "data" / "val" / label / "1.png")
    (tmp_path / "boxes" / "dog").mkdir(parents=True)
    (tmp_path / "boxes" / "dog" / "1.xml").write_text(
        "<a><object><bndbox><xmin>20</xmin><ymin>8</ymin><xmax>64</xmax><ymax>24</ymax></bndbox></object></a>"
    )
    drawn: list[Any] = []
    monkeypatch.setattr("infvit.evaluation.maps.draw_maps", lambda views, names, path: drawn.extend(views))
    asked = config(tmp_path, {"annotations": str(tmp_path / "boxes")})
    result = evaluate_maps(asked, small(data=data_of(tmp_path)))
    boxes = {name: line[0].boxes.tolist() for name, line in zip(result["images"], drawn, strict=True)}
    assert boxes == {"val/cat/1.png": [], "val/dog/1.png": [[4, 8, 32, 24]]}


def test_the_command(run: Path, tmp_path: Path) -> None:
    """From a checkpoint, through `evaluate`: JSON, images, figures, and what is not a known key of `quality`."""
    asked = EvalConfig(checkpoint=str(run), output=str(tmp_path), device="cpu", eval=["attention_quality", "maps"],
                       quality=QualityConfig(perturbation_images=6))  # fmt: skip
    results = evaluate(asked)
    (written,) = tmp_path.glob("eval_attention_quality_*.json")
    assert json.loads(written.read_text()) == results["attention_quality"]
    assert results["attention_quality"]["roc_auc"] is None  # the digits have no boxes
    assert {path.name.split("_")[0] for path in tmp_path.glob("*.png")} == {"perturbation", "figure"}
    for wrong in ({"fill": "grey"}, {"heads": "mode"}, {"seed": -1}, {"blur_sigma": 0.0}):
        with pytest.raises(ConfigError, match=f"quality.{next(iter(wrong))}="):
            QualityConfig(**wrong)


def test_results_of_two_models_in_one_folder_stand_side_by_side(tmp_path: Path) -> None:
    """Both files are called best.pt. In its own folder a run that was moved keeps the names of its results."""
    one, other = (replace(small(), path=tmp_path / name / "best.pt", folder=tmp_path / name) for name in "ab")
    chosen, own = config(tmp_path / "out"), replace(config(tmp_path / "out"), output="")
    assert len({result_path(chosen, model, "eval", "maps", ".json") for model in (one, other)}) == 2
    assert len({result_path(own, model, "eval", "maps", ".json").name for model in (one, other)}) == 1
