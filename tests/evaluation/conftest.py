"""One run on the digits, of seconds, that all evaluations share."""

from pathlib import Path

import pytest

from infvit.config import DataConfig, EngineConfig, ModelConfig, RecipeConfig, TrainConfig
from infvit.engine import train


def configuration(folder: Path) -> TrainConfig:
    """Six short epochs of a one-layer model; the average of the weights lags far behind them."""
    return TrainConfig(
        model=ModelConfig(name="infvit_linear_mini", args={"depth": 1, "embed_dim": 24, "num_heads": 2}),
        data=DataConfig(name="digits", img_size=16, num_workers=0, mean=[0.5] * 3, std=[0.5] * 3),
        recipe=RecipeConfig(
            lr=0.01, lr_base_batch=None, sched_on_updates=True, warmup_epochs=0, smoothing=0.0, mixup=0.0, cutmix=0.0,
            repeated_aug=1, auto_augment=None, color_jitter=None, hflip=0.0, scale=[0.9, 1.0], reprob=0.0,
            drop_path=0.2, drop=0.1, ema_decay=0.97, crop_pct=0.9,
        ),
        engine=EngineConfig(device="cpu", precision="fp32"),
        epochs=6,
        batch_size=64,
        run_dir=str(folder),
    )  # fmt: skip


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run. Tests only read it."""
    folder = tmp_path_factory.mktemp("run")
    train(configuration(folder))
    return folder
