"""Ways to run that must not change what is learned, and seeds, which must."""

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from infvit.config import TrainConfig
from infvit.data import Batch
from infvit.engine import loop, train
from infvit.engine.device import autocast, backend_settings, seed_update, select_device, select_precision
from infvit.engine.plan import import_modules, make_plan
from infvit.engine.validate import validate
from infvit.errors import ConfigError

Config = Callable[..., TrainConfig]
CPU = torch.device("cpu")


@pytest.fixture
def weights(load: Any) -> Callable[[TrainConfig], dict[str, Tensor]]:
    """Trains, and returns the weights."""

    def run(config: TrainConfig) -> dict[str, Tensor]:
        train(config)
        return load(Path(str(config.run_dir)) / "last.pt")["state_dict"]

    return run


@pytest.mark.parametrize(
    ("changes", "top"),
    [
        ({"engine.compile_backend": "aot_eager"}, {"compile": True}),
        ({"engine.channels_last": True}, {}),
        ({"engine.grad_checkpointing": True}, {}),
        ({}, {"deterministic": True}),
    ],
    ids=["compile", "channels_last", "grad_checkpointing", "deterministic"],
)
def test_the_same_is_learned(tiny: Config, weights: Any, load: Any, changes: dict[str, Any], top: dict[str, Any]):
    plain = weights(tiny(run="plain"))
    other = weights(tiny(changes, **top))
    assert not any("_orig_mod" in name for name in other)
    assert_close(other, plain, rtol=1e-3, atol=1e-4)
    a, b = (load(Path(str(tiny(run=run).run_dir)) / "last.pt") for run in ("plain", "run"))
    assert_close(b["ema_state_dict"], a["ema_state_dict"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("switch", ["compile", "channels_last", "grad_checkpointing"])
def test_the_setting_is_used(tiny: Config, built: Any, switch: str) -> None:
    where = {} if switch == "compile" else {f"engine.{switch}": True}
    run = built(tiny({**where, "engine.compile_backend": "eager"}, compile=switch == "compile"))
    images = next(iter(run.train_loader)).images
    seen: list[Tensor] = []
    run.state.model.patch_embed.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    run.sampler.start(0, 0)
    loop.train_update(run, iter([Batch(images, torch.zeros(8, dtype=torch.int64), [])]))
    assert isinstance(run.forward, torch._dynamo.OptimizedModule) == (switch == "compile")
    weight = run.state.model.patch_embed.proj.weight
    assert weight.is_contiguous(memory_format=torch.channels_last) == (switch == "channels_last")
    if switch != "compile":  # a hook inside a graph sees no real tensors
        assert seen[0].is_contiguous(memory_format=torch.channels_last) == (switch == "channels_last")
    assert run.state.model.grad_checkpointing == (switch == "grad_checkpointing")


def test_compiled_models_are_put_into_training_mode_and_back(tiny: Config, built: Any) -> None:
    """The wrapper and the model inside have a mode of their own."""
    run = built(tiny({"engine.compile_backend": "eager"}, compile=True))
    run.forward.train()
    assert run.state.model.training
    modes: list[bool] = []
    run.state.model.patch_embed.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    validate(run.forward, run.val_loader, CPU)
    assert not any(modes)
    assert run.state.model.training


def test_a_model_without_gradient_checkpointing_is_refused(tiny: Config) -> None:
    config = tiny({"model.name": "test_mambaout", "model.args": {}, "data.img_size": 32})
    config.engine.grad_checkpointing = True
    with pytest.MonkeyPatch.context() as patch:

        def refuse(self: Any, enable: bool = True) -> None:
            assert not enable, "gradient checkpointing not supported"

        import timm

        model = type(timm.create_model("test_mambaout", num_classes=3))
        patch.setattr(model, "set_grad_checkpointing", refuse)
        with pytest.raises(ConfigError, match=r"engine.grad_checkpointing=true: test_mambaout does not support it"):
            train(config)


def test_one_seed_one_run(rich: Config, outcome: Any, same: Any, weights: Any) -> None:
    first = weights(rich(deterministic=True, run="a"))
    random.random(), np.random.rand(), torch.rand(3)
    again = weights(rich(deterministic=True, run="b"))
    assert same(first, again)
    assert same(*(outcome(Path(str(rich(run=run).run_dir))) for run in "ab"))
    other = weights(rich(deterministic=True, run="c", seed=1))
    assert not any(torch.equal(first[name], value) for name, value in other.items() if value.ndim > 1)


def recorded(run: loop.Run) -> list[Tensor]:
    run.sampler.start(0, 0)
    return [batch.images for batch in run.train_loader]


def test_a_seed_decides_weights_order_augmentation_and_dropout(tiny: Config, built: Any) -> None:
    """Each by itself."""
    plain = [built(tiny(seed=seed, run=f"p{seed}")) for seed in (0, 1)]
    assert not torch.equal(*(run.state.model.pos_embed for run in plain))
    assert not torch.equal(recorded(plain[0])[0], recorded(plain[1])[0])
    flips = [built(tiny({"recipe.scale": [0.2, 1.0]}, seed=seed, run=f"f{seed}")) for seed in (0, 1)]
    pools = [torch.cat(recorded(run)).flatten(1) for run in flips]
    assert torch.cdist(*pools).min() > 0  # no view of the one is a view of the other
    draws = []
    for seed, update in ((0, 0), (0, 0), (0, 1), (1, 0), (2**40, 0)):
        seed_update(seed, update, CPU)
        draws.append(torch.rand(4).tolist())
    assert draws[0] == draws[1]
    assert len({tuple(draw) for draw in draws}) == 4


def test_dropout_is_drawn_anew_for_each_update(rich: Config) -> None:
    seeds: list[float] = []
    original = loop.train_update

    def spy(run: Any, batches: Iterator[Batch]) -> Any:
        state = torch.get_rng_state()
        seeds.append(torch.rand(()).item())
        torch.set_rng_state(state)
        return original(run, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_update", spy)
        train(rich())
    assert len(seeds) == len(set(seeds)) == 6


def test_global_switches_are_put_back(tiny: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep runs many jobs in one process; also after a failure."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    def switches() -> tuple[bool, ...]:
        cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        return (torch.are_deterministic_algorithms_enabled(), cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark)

    before = switches()
    seen: list[tuple[bool, ...]] = []
    train(tiny({"engine.tf32": True}, deterministic=True, max_steps=1), after_epoch=[lambda _: seen.append(switches())])
    assert seen == [(True, True, True, False)]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert switches() == before
    with contextlib.suppress(ZeroDivisionError), backend_settings(False, True, True):
        seen.append(switches())
        raise ZeroDivisionError
    assert seen[1] == (False, True, True, True)
    assert switches() == before


def test_devices_and_precisions() -> None:
    assert select_device("cpu") == CPU
    assert select_device("auto").type in ("cpu", "cuda", "mps")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"engine.device=cuda is not available on this machine; available: cpu"):
            select_device("cuda")
    assert [select_precision(name, CPU) for name in ("auto", "fp32", "bf16", "fp16")] == [
        torch.float32,
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with autocast(CPU, dtype):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


@pytest.mark.parametrize("code", ["raise ValueError('mine')", "this is no Python", "import sys; sys.exit(0)"])
def test_user_modules_that_fail_are_named(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    (tmp_path / "fails_in_test_settings.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"imports: 'fails_in_test_settings' fails \((ValueError: mine|Syntax|System)"
    ):
        train(tiny(imports=["fails_in_test_settings"]))
    assert not Path(str(tiny().run_dir)).exists()


def test_user_modules_are_imported_first(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_models_of_test_settings.py").write_text(
        "import timm, timm.models\n"
        "@timm.models.register_model\n"
        "def my_own_vit(pretrained=False, **kwargs):\n"
        "    return timm.create_model('infvit_linear_mini', **kwargs)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = {"model.name": "my_own_vit"}
    with pytest.raises(ConfigError, match="unknown model 'my_own_vit'"):
        train(tiny(config, max_steps=1))
    train(tiny(config, max_steps=1, imports=["my_models_of_test_settings"]))
    with pytest.raises(ConfigError, match=r"imports: cannot import 'no_such_module_here' .*PYTHONPATH"):
        train(tiny(config, max_steps=1, imports=["no_such_module_here"]))


@pytest.mark.parametrize("place", ["/dev/null/run", "file"])
def test_a_folder_that_cannot_be_written_is_refused(tiny: Config, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir=.* cannot be written: .*Choose another run_dir"):
        train(tiny(run_dir=str(tmp_path / place)))


def test_what_does_not_fit_is_found_before_the_first_update(tiny: Config) -> None:
    """Bad augmentation, too large a batch, a size the patches do not divide."""
    for changes, top, message in (
        ({"recipe.auto_augment": "rnd-m9"}, {}, "recipe.auto_augment"),
        ({"data.img_size": 18}, {}, "not divisible by the model's patch size 4"),
        ({}, {"batch_size": 64}, "fewer than one batch"),
        ({"recipe.sched": "step"}, {}, "unknown recipe.sched"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "train_update", None)
            with pytest.raises(Exception, match=message):
                train(tiny(changes, run=message[:8].replace(" ", ""), **top))


def test_evaluation_rhythm(tiny: Config, rows: Any) -> None:
    """Every second epoch, and the last one whatever its number."""
    train(tiny({"engine.eval_every": 2}, epochs=5, batch_size=26))
    assert ["top1" in row for row in rows(Path(str(tiny().run_dir)))] == [False, True, False, True, True]


def test_imports_are_found_in_the_folder_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("VALUE = 3\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match="cannot import 'only_here'"):
        import_modules(["only_here"])
    monkeypatch.chdir(tmp_path)
    import_modules(["only_here"])
    assert sys.modules.pop("only_here").VALUE == 3


def test_another_precision_on_a_finished_run_is_said(tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Engine keys do not make another run, so a changed one must not pass in silence."""
    train(tiny())
    with caplog.at_level("INFO", logger="infvit"):
        train(tiny({"engine.precision": "bf16"}))
    assert "engine.precision was fp32 when this run started and is bf16 now." in caplog.messages


def test_data_keys_without_use_are_on_record(tiny: Any) -> None:
    config = tiny({"data.name": "digits", "data.reader": "torch/cifar10", "data.num_samples": 3})
    inactive = make_plan(config).inactive
    assert {key for key in inactive if key.startswith("data.")} == {"data.root", "data.reader", "data.num_samples"}
    assert set(inactive.values()) >= {"data=digits does not use it"}
