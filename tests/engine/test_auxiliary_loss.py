"""A model's own loss in the training loop: the gradient of the one large batch, however the update is computed."""

import copy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interruptions import at_call, send
from steps import Steps, awake, build, first_updates
from timm.layers import set_reentrant_ckpt
from torch.nn import functional as F
from torch.testing import assert_close

from infvit.attention import auxiliary_losses, collect_losses
from infvit.attention.agf import Orthogonality
from infvit.config import TrainConfig
from infvit.engine import loop, train
from infvit.engine.loop import Run
from infvit.engine.processes import join_processes
from infvit.engine.signals import Interrupted
from infvit.errors import ConfigError

Config = Callable[..., TrainConfig]
Ranks = Callable[..., list[Any]]
WEIGHT, HEADS, DEPTH = 100.0, 2, 2
AGF = {
    "model.name": "agf_mini",
    "model.args": {"depth": DEPTH, "embed_dim": 24, "num_heads": HEADS, "orthogonality": WEIGHT},
    "recipe.lr": 1e-9,
}


def straight(run: Run) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss of the task, own loss and gradients of the first update, of the whole batch at once, by plain formulas."""
    run.sampler.start(0, 0)
    batches = iter(run.train_loader)
    images, labels, _ = zip(*(next(batches) for _ in range(run.sampler.micro_batches)), strict=True)
    model = copy.deepcopy(run.state.model).train()
    own: list[torch.Tensor] = []

    def look(qkv: torch.nn.Module, args: Any, out: torch.Tensor) -> None:
        u, v, _ = out.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        u, v = u.softmax(-1), v.softmax(-2)
        own.extend((x.mT @ x - torch.eye(x.shape[-1])).abs().mean() for x in (u, v))

    for block in model.blocks:
        block.attn.qkv.register_forward_hook(look)
    task = F.cross_entropy(model(torch.cat(images)), torch.cat(labels))
    auxiliary = WEIGHT * torch.stack(own).sum() / DEPTH
    (task + auxiliary).backward()
    return float(task), float(auxiliary), {name: p.grad for name, p in model.named_parameters()}


def stirred(run: Run) -> Run:
    """Lets theta and the head take part; both start at zero."""
    with torch.no_grad():
        for block in run.state.model.blocks:
            block.attn.core.theta.fill_(0.3)
    return awake(run)


CASES: dict[str, tuple[dict[str, Any], float]] = {
    "whole": ({}, 1e-4),
    "accumulated": ({"data.micro_batch_size": 6}, 1e-4),
    "checkpointed": ({"engine.grad_checkpointing": True}, 1e-4),
    "compiled": ({"compile": True, "engine.compile_backend": "aot_eager", "data.micro_batch_size": 4}, 1e-4),
    "bf16": ({"engine.precision": "bf16"}, 5e-2),
    "fp16": ({"engine.precision": "fp16"}, 2e-2),
}


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_the_plain_formula(tiny: Config, built: Any, case: str) -> None:
    changes, tolerance = CASES[case]
    run = stirred(built(tiny({**AGF, **changes})))
    task, auxiliary, gradients = straight(run)
    if run.state.scaler.is_enabled():
        run.state.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)  # the usual start is infinite, and left out
    got = first_updates(run)
    assert got.loss == pytest.approx(task, rel=tolerance)
    assert run.state.auxiliary == pytest.approx(auxiliary, rel=tolerance)
    assert got.gradients.keys() == gradients.keys()
    for name, expected in gradients.items():
        allowed = 5 * tolerance * float(expected.abs().max())
        assert_close(got.gradients[name], expected, rtol=0, atol=allowed, msg=lambda m, n=name: f"{n}: {m}")
    # It is no small part of the gradient, so that the test would miss it.
    run.state.model.blocks[0].attn.core.orthogonality.weight = 0.0
    run.state.model.blocks[1].attn.core.orthogonality.weight = 0.0
    without = first_updates(run).gradients["blocks.0.attn.qkv.weight"]
    assert (got.gradients["blocks.0.attn.qkv.weight"] - without).norm() > 0.2 * without.norm()
    for term in (m for m in run.state.model.modules() if isinstance(m, Orthogonality)):
        assert not term.values
        assert not term.wanted
    copy.deepcopy(run.state.model)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_is_kept_once_it_was_taken(tiny: Config, built: Any, checkpointing: bool) -> None:
    """Neither until the backward pass is over, nor by it, which repeats the forward pass under checkpointing."""
    model = built(tiny({**AGF, "engine.grad_checkpointing": checkpointing})).state.model.train()
    with collect_losses(model) as take:
        logits = model(torch.randn(2, 3, 16, 16))
        own = take()
        assert not any(term.values for term in auxiliary_losses(model))
        (logits.sum() + own).backward()
        assert not any(term.values for term in auxiliary_losses(model))


def first_of_several(config: TrainConfig) -> tuple[Steps, float]:
    run = awake(build(config, join_processes("cpu", 1)))
    return first_updates(run), run.state.auxiliary


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_processes_give_the_gradient_of_one(tiny: Config, ranks: Ranks, parallel: str) -> None:
    micro = {"data.micro_batch_size": 4, "engine.parallel": parallel, "recipe.ema_decay": None}
    config = tiny({**AGF, **micro}, batch_size=12)
    run = awake(build(config))
    alone = first_updates(run)
    for theirs, auxiliary in ranks(2, lambda rank: first_of_several(config)):
        assert auxiliary == pytest.approx(run.state.auxiliary, rel=1e-5)
        assert theirs.loss == pytest.approx(alone.loss, rel=1e-5)
        assert_close(theirs.gradients, alone.gradients, rtol=1e-3, atol=2e-6)


def test_a_column_of_its_own_and_an_interruption(tiny: Config, rows: Any) -> None:
    """Stopped inside the first epoch and begun again, the rows are those of the unbroken run."""
    changes = {**AGF, "recipe.lr": 0.01}
    unbroken, broken = tiny(changes, run="unbroken", epochs=1), tiny(changes, run="broken", epochs=1)
    train(unbroken)
    with at_call(loop, "train_update", 3, send(signal.SIGTERM)), pytest.raises(Interrupted):
        train(broken)
    train(broken)
    (expected,), (row,) = (rows(Path(str(config.run_dir))) for config in (unbroken, broken))
    assert 0 < row["auxiliary_loss"] == expected["auxiliary_loss"]
    assert row["train_loss"] == expected["train_loss"] < 2.0, "the column of the task is without the model's own loss"
    assert "auxiliary_loss" in (Path(str(broken.run_dir)) / "summary.csv").read_text().splitlines()[0].split(",")


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_it_is_computed_once_a_forward_pass_of_training_and_never_at_weight_0(
    tiny: Config, rows: Any, weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    original = Orthogonality.term

    def counted(self: Orthogonality, *inputs: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return original(self, *inputs)

    monkeypatch.setattr(Orthogonality, "term", counted)
    args = {**AGF["model.args"], "orthogonality": weight}
    config = tiny({**AGF, "model.args": args, "data.micro_batch_size": 4}, epochs=1)
    train(config)
    assert calls == (3 * 2 * DEPTH if weight else 0)  # updates, micro-batches; the evaluation computes none
    assert ("auxiliary_loss" in rows(Path(str(config.run_dir)))[0]) == bool(weight)


def test_a_loss_that_is_not_finite_leaves_the_update_out(tiny: Config, built: Any, monkeypatch: Any) -> None:
    run = built(tiny(AGF))
    monkeypatch.setattr(Orthogonality, "term", lambda self, u, v: u.sum((1, 2, 3)) * 0 + float("inf"))
    run.sampler.start(0, 0)
    run.training.train()
    before = copy.deepcopy(run.state.model.state_dict())
    loss, *_, done = loop.train_update(run, iter(run.train_loader))
    assert loss < 2.0
    assert not done
    assert_close(dict(run.state.model.state_dict()), dict(before), rtol=0, atol=0)


def test_reentrant_checkpointing_is_refused(tiny: Config, built: Any) -> None:
    run = built(tiny({**AGF, "engine.grad_checkpointing": True}))
    set_reentrant_ckpt(True)
    try:
        with pytest.raises(ConfigError, match="unset TIMM_REENTRANT_CKPT"):
            first_updates(run)
    finally:
        set_reentrant_ckpt(False)


def test_models_without_have_none(tiny: Config, built: Any) -> None:
    assert auxiliary_losses(built(tiny()).state.model) == []
