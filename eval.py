"""Evaluates a run: `python eval.py checkpoint=runs/my_run`. Every key is in docs/configuration.md."""

import hydra
from omegaconf import DictConfig

from infvit import cli
from infvit.config import EvalConfig
from infvit.evaluation import evaluate
from infvit.reports.efficiency import write_efficiency

cli.register_configs()


@hydra.main(version_base="1.3", config_path="configs", config_name="eval")
def main(cfg: DictConfig) -> int:
    """Runs one job."""
    return cli.run_job(cfg, EvalConfig, lambda config: evaluate(config, report=write_efficiency))


if __name__ == "__main__":
    cli.launch(main)
