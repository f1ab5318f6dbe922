"""Train a small ViT of torchvision or timm on digits, put InfSA into it, and fine-tune it on digit_scenes.

    python examples/finetune_vit.py [--library torchvision|timm] [--mechanism infsa_pure|infsa_linear]

As with published weights, the model has learned from plain images (scikit-learn's digits) before it meets the task,
which is finding a small digit in a scene. Converted, its weights are those of another function, so accuracy falls;
fine-tuning brings it back, and gamma moves. Takes a few minutes on one CPU core. For real work start from published
weights (`weights="DEFAULT"`, `pretrained=True`) or use train.py, see docs/convert.md.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import infvit
from infvit.attention.infsa import path_decays
from infvit.config import DataConfig
from infvit.data.digit_scenes import DigitScenes
from infvit.data.digits import Digits
from infvit.data.source import Split

SIDE, PATCH, WIDTH, DEPTH, HEADS = 32, 4, 48, 2, 4


def scenes(split: Split, count: int) -> tuple[Tensor, Tensor]:
    """Returns images (n, 3, side, side) and labels of generated scenes."""
    return images(DigitScenes(DataConfig(name="digit_scenes", img_size=SIDE, num_samples=count), split, None))


def images(source: DigitScenes | Digits) -> tuple[Tensor, Tensor]:
    """Returns all images of a source (n, 3, side, side) and their labels."""
    pixels = np.stack([np.asarray(source.image(i).resize((SIDE, SIDE))) for i in range(len(source))])
    labels = torch.tensor([source.target(i) for i in range(len(source))])
    return (torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25, labels


def build(library: str) -> nn.Module:
    """Returns a small vision transformer with its own, softmax, attention."""
    if library == "torchvision":
        from torchvision.models import VisionTransformer

        return VisionTransformer(SIDE, PATCH, DEPTH, HEADS, WIDTH, 2 * WIDTH, num_classes=10)
    import timm

    sizes = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
    return timm.create_model("vit_tiny_patch16_224", num_classes=10, mlp_ratio=2, **sizes)


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    """Trains for some epochs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Returns the share of images that are classified right."""
    return (model.eval()(x).argmax(1) == y).double().mean().item()


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Runs the example and returns its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", choices=("torchvision", "timm"), default="torchvision")
    parser.add_argument("--mechanism", default="infsa_pure")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--scenes", type=int, default=2000)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    (x, y), held_out = scenes("train", given.scenes), scenes("validation", given.scenes)
    model = build(given.library)
    train(model, *images(Digits(DataConfig(name="digits", img_size=SIDE), "train", None)), given.epochs)
    train(model, x, y, given.epochs)
    found = {"own attention": accuracy(model, x, y), "own attention, held out": accuracy(model, *held_out)}

    model = infvit.convert(model, given.mechanism)
    print(model.conversion_report)
    found["converted"] = accuracy(model, x, y)
    found["converted, held out"] = accuracy(model, *held_out)
    found["gamma"] = sum(path_decays(model)) / DEPTH
    train(model, x, y, given.epochs)
    found["fine-tuned"] = accuracy(model, x, y)
    found["fine-tuned, held out"] = accuracy(model, *held_out)
    found["gamma, fine-tuned"] = sum(path_decays(model)) / DEPTH
    for name, value in found.items():
        print(f"{name:24} {value:.4f}")
    return found


if __name__ == "__main__":
    main()
