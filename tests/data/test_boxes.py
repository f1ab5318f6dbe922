"""Boxes: as files hold them, and as the evaluation transform moves the pixels under them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision import transforms

from infvit.config import DataConfig
from infvit.data import build_source, eval_transform
from infvit.data.boxes import find_annotation, geometry, image_size, inside, open_boxes, read_coco, read_voc
from infvit.data.source import FileSource, Selection
from infvit.errors import ConfigError, DataError

REAL = Path(__file__).resolve().parents[3] / "shared/data/imagenet_boxes"  # beside the checkout
PLAIN = DataConfig(name="folder", mean=[0.0] * 3, std=[1.0] * 3)


def xml(boxes: list[tuple[float, ...]], size: tuple[int, int] = (500, 375), name: str = "a") -> str:
    """Writes an annotation as ImageNet's are: the file name without extension."""
    objects = "".join(
        "<object><name>n1</name><bndbox>"
        + "".join(f"<{key}>{value}</{key}>" for key, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))
        + "</bndbox></object>"
        for box in boxes
    )
    sides = f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    return f"<annotation><filename>{name}</filename>{sides}{objects}</annotation>"


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize("size", [(500, 375), (333, 500), (64, 48), (225, 225), (500, 20), (1000, 301)])
def test_boxes_go_where_the_pixels_go(crop_mode: str, size: tuple[int, int]) -> None:
    """A white rectangle is sent through the real transform; the box covers the pixels that come out white."""
    width, height = size
    rng = np.random.default_rng(width + height)
    centres = np.arange(224) + 0.5
    for crop_pct in (0.875, 0.95, 1.0):
        x0, y0 = rng.integers(0, width // 2), rng.integers(0, height // 2)
        x1, y1 = rng.integers(x0 + 1, width + 1), rng.integers(y0 + 1, height + 1)
        pixels = np.zeros((height, width, 3), dtype=np.uint8)
        pixels[y0:y1, x0:x1] = 255
        transform = eval_transform(crop_pct, "nearest", PLAIN, 224, crop_mode)
        white = transform(Image.fromarray(pixels)).numpy()[0] > 0.5
        moved = geometry(transform, size).apply(np.array([[x0, y0, x1, y1]], dtype=np.float64))
        covered, edge = np.zeros((224, 224), dtype=bool), np.zeros((224, 224), dtype=bool)
        for a0, b0, a1, b1 in moved:
            covered = ((b0 <= centres) & (centres < b1))[:, None] & ((a0 <= centres) & (centres < a1))
            on_edge = [np.isclose(centres[:, None], sides, atol=1e-9).any(1) for sides in ((b0, b1), (a0, a1))]
            edge = on_edge[0][:, None] | on_edge[1]  # nearest-neighbour rounding decides these
        assert (covered == white)[~edge].all(), (crop_pct, moved)


def test_the_crop_of_the_field_notes() -> None:
    """500 x 375, resized to 256 and cropped to 224: x = 0..40 lies at -58..-31, wholly cropped away."""
    moved = geometry(eval_transform(0.875, "bicubic", PLAIN, 224), (500, 375))
    assert moved.shift == (-58, -16)
    assert moved.scale == pytest.approx((341 / 500, 256 / 375))
    assert len(moved.apply(np.array([[0.0, 0, 40, 40]]))) == 0
    assert moved.apply(np.array([[0.0, 0, 500, 375]])).tolist() == [[0, 0, 224, 224]]


def test_a_step_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="RandomHorizontalFlip"):
        geometry(transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor()]), (4, 4))


def test_boxes_that_are_none_are_dropped_and_counted() -> None:
    """Two overlapping ones stay both, one over the edge is cut, one outside and one inside out go."""
    boxes = [(10, 10, 100, 100), (50, 50, 200, 200), (480, 300, 700, 500), (600, 0, 700, 10), (90, 10, 20, 60)]
    dropped: Counter[str] = Counter()
    kept = inside(np.array(boxes, dtype=float), (500, 375), dropped)
    assert kept.tolist() == [[10, 10, 100, 100], [50, 50, 200, 200], [480, 300, 500, 375]]
    assert +dropped == {"inside out": 1, "outside the image": 1}
    assert len(inside(np.array([[0, 0, np.nan, 5]]), (9, 9), dropped)) == 0
    assert +dropped == {"inside out": 1, "outside the image": 1, "not finite": 1}


def test_parts_of_objects_are_no_objects_and_sides_may_have_a_point(tmp_path: Path) -> None:
    box = "<bndbox><xmin>{0}</xmin><ymin>2</ymin><xmax>30</xmax><ymax>40</ymax></bndbox>"
    part = f"<part><name>head</name>{box.format(5)}</part>"
    size = "<size><width>50.0</width><height>60</height></size>"
    file = tmp_path / "a.xml"
    file.write_text(f"<annotation>{size}<object><name>dog</name>{box.format(1)}{part}</object></annotation>")
    found = read_voc(file)
    assert found.boxes.tolist() == [[1, 2, 30, 40]]
    assert found.size == (50, 60)


@pytest.mark.parametrize(("content", "message"), [
    ([], "a list and no object"), ({"images": []}, "'annotations' is missing"),
    ({"images": [], "annotations": [{"image_id": 9, "bbox": [1, 2, 3, 4]}]}, r"annotations\[0\] has image_id 9"),
    ({"images": [{"id": 9, "file_name": "a"}], "annotations": [{"image_id": 9, "bbox": [1, 2, 3]}]},
     r"annotations\[0\] has bbox \[1, 2, 3\], not"),
])  # fmt: skip
def test_what_is_wrong_in_a_coco_file_is_named(content: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "boxes.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"boxes\.json is not a COCO annotation file \({message}"):
        read_coco(tmp_path / "boxes.json")


def test_voc_files(tmp_path: Path) -> None:
    """All objects are read, the coordinates as they stand; what is no annotation is named."""
    path = tmp_path / "a.xml"
    path.write_text(xml([(10, 20, 30, 40), (1, 2, 3, 4)]))
    read = read_voc(path)
    assert read.boxes.tolist() == [[10, 20, 30, 40], [1, 2, 3, 4]]
    assert read.size == (500, 375)
    path.write_text(xml([(1, 2, 3, 4)], size=(0, 0)))
    assert read_voc(path).size is None
    for damaged in ("<annotation><object><bndbox><xmin>1</xmin></bndbox></object></annotation>", "<annotation>", "",
                    xml([("x", 1, 2, 3)])):  # fmt: skip
        path.write_text(damaged)
        with pytest.raises(DataError, match=r"a\.xml"):
            read_voc(path)


@pytest.mark.skipif(not REAL.is_dir(), reason="ImageNet's annotations are not here")
def test_real_annotations_of_imagenet() -> None:
    """Each has a size, and boxes inside it."""
    boxes = open_boxes(str(REAL))
    names = [path.stem for path in REAL.glob("*.xml")]
    assert len(names) == len(boxes.entries) == 10
    for name in names:
        found = boxes.find(f"/data/val/n01440764/{name}.JPEG")
        assert found is not None
        dropped: Counter[str] = Counter()
        assert len(inside(found.boxes, found.size, dropped)) == len(found.boxes) > 0
        assert not +dropped
    assert boxes.find("/data/val/n01440764/ILSVRC2012_val_99999999.JPEG") is None


def test_files_of_one_name_in_several_folders(tmp_path: Path) -> None:
    """The folder decides; where it does not, or a file is there twice, that is an error and no guess."""
    for number, folder in enumerate(("cat", "dog")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.xml").write_text(xml([(number, 0, 9, 9)]))
    boxes = open_boxes(str(tmp_path))
    assert [boxes.find(f"/val/{folder}/1.jpg").boxes[0, 0] for folder in ("cat", "dog")] == [0, 1]
    with pytest.raises(DataError, match=r"/val/cow/1\.jpg"):
        boxes.find("/val/cow/1.jpg")
    (tmp_path / "dog" / "1.xml").unlink()
    boxes = open_boxes(str(tmp_path))
    assert boxes.find("/val/cow/1.jpg") is not None  # of the one image of this name
    assert boxes.find("/val/cow/1.jpg", namesakes=True) is None
    assert boxes.find("/val/cat/1.jpg", namesakes=True).boxes[0, 0] == 0


def test_coco_files(tmp_path: Path) -> None:
    path = tmp_path / "instances.json"
    images = [{"id": 7, "file_name": "val/x.jpg", "width": 50, "height": 40}, {"id": 8, "file_name": "y.jpg"}]
    path.write_text(json.dumps({"images": images, "annotations": [{"image_id": 7, "bbox": [1, 2, 10, 20]}]}))
    boxes = open_boxes(str(path))
    found, empty = boxes.find("/data/x.png"), boxes.find("/data/y.jpg")
    assert (found.boxes.tolist(), found.size) == ([[1, 2, 11, 22]], (50, 40))
    assert (empty.boxes.shape, empty.size) == ((0, 4), None)
    for damaged in ("{}", "[]", json.dumps({"images": [], "annotations": [{"image_id": 1, "bbox": [1, 2, 3, 4]}]})):
        path.write_text(damaged)
        with pytest.raises(DataError, match=r"instances\.json"):
            open_boxes(str(path))


def test_a_place_without_annotations(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(DataError, match="annotations"):
            open_boxes(str(path))


def test_images_know_their_size_and_scenes_their_box(tmp_path: Path) -> None:
    Image.new("L", (31, 17)).save(tmp_path / "a.png")
    files = FileSource([str(tmp_path / "a.png")], [0], ["a"], 3)
    assert image_size(Selection(files, [0], [0], ["a"]), 0) == (31, 17)
    assert find_annotation(files, 0, None) is None
    scenes = build_source(DataConfig(name="digit_scenes", num_samples=50, img_size=40), "val")
    chosen = Selection(scenes, [5, 3], [0, 0], scenes.classes)
    assert image_size(chosen, 1) == (40, 40)
    assert find_annotation(chosen, 1, None).boxes.tolist() == [list(scenes.box(3))]
