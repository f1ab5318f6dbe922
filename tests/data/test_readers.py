"""data=timm: torchvision and Hugging Face names, WebDataset shards, and what is refused."""

import importlib.util
import io
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import ImageFolder

from infvit.config import DataConfig
from infvit.data import build_source, preflight
from infvit.data.readers import TorchSource
from infvit.errors import ConfigError, DataError, MissingExtraError

Write = Callable[..., Path]


def config(reader: str | None, root: Path | None = None, **kwargs: object) -> DataConfig:
    root_name = None if root is None else str(root)
    return DataConfig(name="timm", reader=reader, root=root_name, **kwargs)  # type: ignore[arg-type]


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """Files in MNIST's format: image i is of the grey value i and class i mod 10."""
    folder = tmp_path / "MNIST/raw"
    folder.mkdir(parents=True)
    for prefix, count in (("train", 20), ("t10k", 10)):
        pixels = np.repeat(np.arange(count, dtype=np.uint8), 28 * 28)
        header = struct.pack(">BBBBIII", 0, 0, 8, 3, count, 28, 28)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        labels = bytes(i % 10 for i in range(count))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, count) + labels)
    return tmp_path


def test_torchvision_by_name(mnist: Path) -> None:
    check = preflight(config("torch/mnist", mnist), batch_size=20)
    assert (len(check.train), len(check.val)) == (20, 10)
    assert check.classes[:2] == ("0 - zero", "1 - one")
    assert [check.train.target(i) for i in range(20)] == [i % 10 for i in range(20)]
    assert check.train.image(13).mode == "RGB"
    assert np.unique(np.asarray(check.train.image(13))).tolist() == [13]
    assert check.val.locate(3) == "torch/mnist, split validation[3]"
    grey = build_source(config("torch/mnist", mnist, in_chans=1, mean=[0.5], std=[0.5]), "val")
    assert grey.image(3).mode == "L"
    swapped = build_source(config("torch/mnist", mnist), "val", check.classes[::-1])
    assert [swapped.target(i) for i in range(10)] == list(range(9, -1, -1))
    with pytest.raises(DataError, match=r"'0 - zero'.* known classes"):
        build_source(config("torch/mnist", mnist), "val", ["cat"])


def test_classes_that_share_a_name_stay_apart() -> None:
    """torchvision's ImageNet: classes are tuples of names, `crane` is there twice, images are files."""
    dataset = SimpleNamespace(targets=[0, 2, 1], classes=[("crane",), ("cock", "rooster"), ("crane",)])
    source = TorchSource(dataset, "torch/imagenet", config("torch/imagenet"), None)
    assert source.classes == ("crane (0)", "cock, rooster", "crane (2)")
    assert [source.target(i) for i in range(3)] == [0, 2, 1]


def test_files_of_torchvision_go_through_our_decoder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.fromarray(np.full((8, 8), 40000, np.uint16)).save(tmp_path / "a/deep.png")
    (tmp_path / "a/empty.png").touch()
    source = TorchSource(ImageFolder(str(tmp_path)), "torch/imagenet", config("torch/imagenet"), None)
    assert np.unique(np.asarray(source.image(0))).tolist() == [156]
    assert source.locate(1) == str(tmp_path / "a/empty.png")
    with pytest.raises(DataError, match=f"{tmp_path}/a/empty.png: this image cannot be decoded"):
        source.image(1)


def test_labels_out_of_range(mnist: Path) -> None:
    path = mnist / "MNIST/raw/t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + b"\x0a")
    with pytest.raises(DataError, match=r"torch/mnist, split validation: image 9 has label 10, .*10 classes"):
        preflight(config("torch/mnist", mnist))


def test_torchvision_mistakes(tmp_path: Path, mnist: Path) -> None:
    with pytest.raises(DataError, match=r"torch/cifar10, split train cannot be opened .*data.download=true"):
        preflight(config("torch/cifar10", tmp_path))
    with pytest.raises(DataError, match=r"torch/nonsense, split train cannot be opened .*check data.reader"):
        preflight(config("torch/nonsense", tmp_path))
    with pytest.raises(ConfigError, match=r"data.root is missing.*torch/cifar10"):
        preflight(config("torch/cifar10"))
    with pytest.raises(ConfigError, match=r"data.train_split=trian .*'train'"):  # would be the test split
        preflight(config("torch/mnist", mnist, train_split="trian"))


@pytest.mark.parametrize("reader", ["torch/image_folder", "folder"])
def test_folder_names_go_to_our_class_folders(tmp_path: Path, image: Write, reader: str) -> None:
    for name in ("2", "10", ".hidden"):
        image(f"train/{name}/x.jpg")
        image(f"val/{name}/x.jpg")
    assert preflight(config(reader, tmp_path)).classes == ("2", "10")


@pytest.mark.parametrize("reader", ["hfids/NAME", "tfds/mnist", "wds/https://host/x.tar", "wds/pipe:cat x.tar"])
def test_streams_are_refused_with_the_reason(tmp_path: Path, reader: str) -> None:
    with pytest.raises(ConfigError, match=rf"data.reader={reader}.* only .*stream.* random access"):
        build_source(config(reader, tmp_path), "train")


def test_unknown_and_missing_readers() -> None:
    with pytest.raises(ConfigError, match=r"data.reader is missing.*torch/cifar10"):
        build_source(config(None), "train")
    with pytest.raises(ConfigError, match=r"data.reader=torchvision/x must begin with torch/, hfds/, wds/"):
        build_source(config("torchvision/x"), "train")


def test_hugging_face_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infvit.data.readers.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"data.reader=hfds/x .*pip install 'infvit\[hf\]'"):
        build_source(config("hfds/x"), "train")


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs the extra hf (package datasets)")
def test_hugging_face_data_set(tmp_path: Path, image: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("train/a/0", "train/b/1", "train/c/2", "validation/a/0", "validation/b/1", "validation/c/2"):
        image(f"hub/{name}.png", colour=(50 * int(name[-1]),) * 3)
    (tmp_path / "hub/validation/b/1.png").write_bytes(b"not an image")
    check = preflight(config(f"hfds/{tmp_path / 'hub'}", tmp_path / "cache"))
    assert check.classes == ("a", "b", "c")
    assert [check.train.target(i) for i in range(3)] == [check.val.target(i) for i in range(3)] == [0, 1, 2]
    assert np.unique(np.asarray(check.val.image(2))).tolist() == [100]
    assert check.val.locate(2).endswith("split validation[2]")
    with pytest.raises(DataError, match=r"split validation\[1\]: this image cannot be decoded"):
        check.val.image(1)


# WebDataset shards


def shard(path: Path, labels: dict[str, bytes | None]) -> None:
    """Writes `KEY.png` of the grey value int(KEY), and `KEY.cls`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, label in labels.items():
            stream = io.BytesIO()
            Image.new("RGB", (8, 8), (int(key),) * 3).save(stream, "PNG")
            for name, content in ((f"{key}.png", stream.getvalue()), (f"{key}.cls", label), (f"{key}.json", b"{}")):
                if content is not None:
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize("pattern", ["{split}-*.tar", "{split}-{000..001}.tar"])
def test_shards(tmp_path: Path, pattern: str) -> None:
    shard(tmp_path / "train-000.tar", {"11": b"0", "12": b"2"})
    shard(tmp_path / "train-001.tar", {"11": b"1"})
    shard(tmp_path / "validation-000.tar", {"31": b"2\n"})
    check = preflight(config(f"wds/{pattern}", tmp_path))
    assert check.classes == ("0", "1", "2")
    assert [check.train.target(i) for i in range(3)] == [0, 2, 1]
    assert [np.asarray(check.train.image(i))[0, 0, 0] for i in range(3)] == [11, 12, 11]
    assert check.train.locate(1) == str(tmp_path / "train-000.tar/12.png")
    assert check.val.target(0) == 2
    assert len(preflight(config(f"wds/{pattern}", tmp_path, num_classes=10)).classes) == 10


def test_shards_in_a_folder_per_split(tmp_path: Path) -> None:
    shard(tmp_path / "train/x.tar", {"1": b"0", "2": b"1"})
    shard(tmp_path / "validation/x.tar", {"3": b"1"})
    check = preflight(config("wds/*.tar", tmp_path))
    assert (len(check.train), len(check.val)) == (2, 1)


def test_shard_mistakes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"No shards match {tmp_path}/train-\*.tar.*correct data.root"):
        preflight(config("wds/{split}-*.tar", tmp_path))
    shard(tmp_path / "train/x.tar", {"1": b"0", "2": b"1"})
    shard(tmp_path / "validation/x.tar", {"3": b"5"})
    with pytest.raises(DataError, match=r"image 0 has label 5, but there are 2 classes"):
        preflight(config("wds/*.tar", tmp_path))
    shard(tmp_path / "validation/x.tar", {"3": None})
    with pytest.raises(DataError, match=rf"{tmp_path}/validation/x.tar/3.png has no label.*\.cls"):
        preflight(config("wds/*.tar", tmp_path))
    shard(tmp_path / "validation/x.tar", {"3": b"cat"})
    with pytest.raises(DataError, match=r"x.tar/3.cls is not an integer class index"):
        preflight(config("wds/*.tar", tmp_path))
    shard(tmp_path / "validation/x.tar", {})
    with pytest.raises(DataError, match=r"x.tar .*no images"):
        preflight(config("wds/*.tar", tmp_path))
