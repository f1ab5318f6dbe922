"""One update and five, against straight-line computations written here."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from steps import awake, first_updates
from torch.nn import functional as F
from torch.testing import assert_close

from infvit.config import TrainConfig
from infvit.data import TrainSampler
from infvit.engine import train
from infvit.engine.loop import Run

AUGMENTED: dict[str, Any] = {
    "recipe.mixup": 0.8,
    "recipe.cutmix": 1.0,
    "recipe.smoothing": 0.1,
    "recipe.repeated_aug": 3,
    "recipe.auto_augment": "rand-m9-mstd0.5-inc1",
    "recipe.hflip": 0.5,
    "recipe.scale": [0.3, 1.0],
    "recipe.reprob": 0.5,
}
DIGITS = {"data.name": "digits", "data.root": None}
Tiny, Built = Callable[..., TrainConfig], Callable[[TrainConfig], Run]


def gradients(run: Run) -> dict[str, torch.Tensor]:
    """Gradients of the run's first update."""
    return first_updates(run).gradients


@pytest.mark.parametrize("recipe", [{"recipe.smoothing": 0.1}, AUGMENTED], ids=["plain", "augmented"])
@pytest.mark.parametrize("micro", [None, 64, 16, 6], ids=lambda micro: f"micro-{micro}")
def test_micro_batches_give_the_gradient_of_the_global_batch(
    tiny: Tiny, built: Built, recipe: dict[str, Any], micro: int | None
) -> None:
    """16 divides the batch of 64, 6 leaves a rest of 4. The reference sees the whole batch at once."""
    config = tiny({**DIGITS, **recipe, "data.micro_batch_size": micro}, batch_size=64)
    loss, _, seen, found, _ = first_updates(awake(built(config)))
    assert seen == 64

    whole = awake(built(tiny({**DIGITS, **recipe}, batch_size=64)))
    whole.sampler.start(0, 0)
    images, targets, damaged = next(iter(whole.train_loader))
    assert (len(images), damaged) == (64, [])
    smoothing = 0.1
    if whole.mixup is not None:
        images, targets = whole.mixup(images, targets, 0)
        smoothing = 0.0
    model = whole.state.model.train()
    expected_loss = F.cross_entropy(model(images), targets, label_smoothing=smoothing)
    expected_loss.backward()
    assert loss == pytest.approx(expected_loss.item(), rel=1e-5)
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        assert scale > 0, name
        assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * scale, msg=lambda text, n=name: f"{n}: {text}")


def read_images(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Decodes class folders without any of our code: normalised images and labels, in the order of the names."""
    images, labels = [], []
    for label, name in enumerate(sorted(path.name for path in folder.iterdir())):
        for path in sorted((folder / name).iterdir()):
            pixels = np.asarray(Image.open(path).convert("RGB"), dtype=np.float32) / 255
            images.append(torch.from_numpy((pixels - 0.5) / 0.5).permute(2, 0, 1))
            labels.append(label)
    return torch.stack(images), torch.tensor(labels)


def test_five_updates_are_those_of_a_straight_line_program(tiny: Tiny, load: Any, rows: Any, digit_folders: Path):
    """Plain AdamW, a cosine and an average written by hand; equal weights, average, losses and rates."""
    train(tiny(max_steps=5))
    last = load(Path(tiny().run_dir) / "last.pt")

    torch.manual_seed(0)
    model = timm.create_model("infvit_linear_mini", num_classes=3, img_size=16, depth=1, embed_dim=24, num_heads=2)
    skip = model.no_weight_decay()
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[parameter.ndim > 1 and name not in skip].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": 0.05}, {"params": groups[False], "weight_decay": 0.0}],
        betas=(0.9, 0.999),
        eps=1e-8,
    )
    images, labels = read_images(digit_folders / "train")
    average: dict[str, torch.Tensor] = {}
    losses, rates = [], []
    for update in range(5):
        epoch, position = divmod(update, 3)
        order = [view.index for batch in start(TrainSampler(26, 8, None, 1, 0), epoch) for view in batch]
        batch = order[8 * position : 8 * position + 8]
        rates.append(1e-4 + 0.5 * (0.01 - 1e-4) * (1 + math.cos(math.pi * update / 6)))
        for group in optimizer.param_groups:
            group["lr"] = rates[-1]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for name, value in model.state_dict().items():  # timm's average starts from the weights after two updates
            old = average.get(name)
            average[name] = value.clone() if update < 2 or old is None else 0.8 * old + 0.2 * value

    assert_close(last["state_dict"], dict(model.state_dict()), rtol=1e-4, atol=1e-5)
    assert_close(last["ema_state_dict"], average, rtol=1e-4, atol=1e-5)
    # Both tests have teeth: the average is not the weights.
    assert any((average[n] - value).abs().max() > 1e-3 for n, value in last["state_dict"].items())
    first, second = rows(Path(tiny().run_dir))
    assert first["train_loss"] == pytest.approx(sum(losses[:3]) / 3, rel=1e-4)
    assert second["train_loss"] == pytest.approx(sum(losses[3:]) / 2, rel=1e-4)
    assert [first["lr"], second["lr"]] == pytest.approx([rates[2], rates[4]])
    assert [(row["epoch"], row["update"]) for row in (first, second)] == [(1, 3), (2, 5)]
    model.eval()
    held_out, targets = read_images(digit_folders / "validation")
    with torch.no_grad():
        logits = model(held_out)
        assert second["loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-4)
        assert second["top1"] == pytest.approx(100 * (logits.argmax(1) == targets).float().mean().item())
        model.load_state_dict(average)
        assert second["ema_loss"] == pytest.approx(F.cross_entropy(model(held_out), targets).item(), rel=1e-4)
    assert (second["images"], second["top5"], second["ema_top5"]) == (11, 100.0, 100.0)


def start(sampler: TrainSampler, epoch: int) -> TrainSampler:
    sampler.start(epoch)
    return sampler


def first_steps(run: Run) -> dict[str, torch.Tensor]:
    """How far the first update moves each parameter."""
    before = {name: value.detach().clone() for name, value in run.state.model.named_parameters()}
    gradients(run)
    return {name: (value - before[name]).detach() for name, value in run.state.model.named_parameters()}


def test_clip_grad_bounds_the_gradient_and_reports_its_norm_before(tiny: Tiny, built: Built, rows: Any) -> None:
    free = gradients(built(tiny()))
    clipped = gradients(built(tiny({"recipe.clip_grad": 0.01})))
    norm = math.sqrt(sum(float(g.square().sum()) for g in free.values()))
    assert norm > 0.1
    assert math.sqrt(sum(float(g.square().sum()) for g in clipped.values())) == pytest.approx(0.01, rel=1e-3)
    for name, gradient in free.items():
        assert_close(clipped[name], gradient * (0.01 / norm), rtol=1e-3, atol=1e-8)
    train(tiny({"recipe.clip_grad": 0.01}, max_steps=1))
    assert rows(Path(tiny().run_dir))[0]["grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_layer_decay_slows_the_early_layers(tiny: Tiny, built: Built) -> None:
    """The first step of SGD is the rate times the gradient, whose scale per layer is the decay's."""
    sgd = {"recipe.opt": "sgd", "recipe.weight_decay": 0.0}
    even = first_steps(awake(built(tiny(sgd))))
    decayed = first_steps(awake(built(tiny({**sgd, "recipe.layer_decay": 0.5}))))
    ratio = {name: float(decayed[name].norm() / even[name].norm()) for name in even}
    assert ratio["head.weight"] == pytest.approx(1.0, rel=1e-3)
    assert ratio["blocks.0.mlp.fc1.weight"] == pytest.approx(0.5, rel=1e-3)
    assert ratio["patch_embed.proj.weight"] == pytest.approx(0.25, rel=1e-3)


def test_each_update_starts_from_no_gradient(tiny: Tiny, built: Built) -> None:
    run = awake(built(tiny({"recipe.lr": 1e-12, "recipe.weight_decay": 0.0, "recipe.min_lr": 0.0})))
    once = gradients(run)
    again = gradients(run)
    for name, gradient in once.items():
        assert_close(again[name], gradient, rtol=1e-3, atol=1e-6)
