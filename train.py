"""Trains a model: `python train.py model=infvit_linear_4l data=imagenet recipe=deit data.root=/path`.

Every key is in docs/configuration.md. The same command goes on with an interrupted run.
"""

import hydra
from omegaconf import DictConfig

from infvit import cli
from infvit.config import TrainConfig
from infvit.engine import train
from infvit.reports import draw_curves

cli.register_configs()


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> int:
    """Runs one job."""
    return cli.run_job(cfg, TrainConfig, lambda config: train(config, after_epoch=[draw_curves]))


if __name__ == "__main__":
    cli.launch(main)
