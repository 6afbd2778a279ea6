"""Trains this experiment in Python: what `etude train EXPERIMENT_NAME/baseline` does, step by step.

python experiments/EXPERIMENT_NAME/examples/train.py [training.epochs=1 …]
"""

import sys
from pathlib import Path

from etude import load_experiment_config, train_experiment

CONFIG = Path(__file__).parents[1] / "configs" / "baseline.yaml"


def main(overrides: list[str]) -> None:
    """Train, and print the last metrics."""
    config = load_experiment_config(CONFIG, overrides=overrides)
    outcome = train_experiment(config)
    print(outcome.status, outcome.metrics)


if __name__ == "__main__":
    main(sys.argv[1:])
