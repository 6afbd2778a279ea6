"""Ray Train starts the processes and forms their group; each of them trains the experiment as with torchrun.

python ray_train.py lenet5/baseline 8 training.epochs=3
"""

import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(settings: dict) -> None:
    """Train, or continue if the processes have been restarted."""
    from etude.experiment import resume_run, train_experiment

    if Path(settings["run_dir"], "config.yaml").exists():
        resume_run(settings["run_dir"], progress=False)
    else:
        train_experiment(settings["experiment"], settings["overrides"], run_dir=settings["run_dir"], progress=False)


def main(experiment: str, workers: int, overrides: list[str]) -> None:
    """Run on a cluster whose machines share the current folder, with a GPU for each process if there are any."""
    ray.init()
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    settings = {
        "experiment": experiment,
        "overrides": overrides,
        "run_dir": str(Path("runs", "ray", Path(experiment).stem).resolve()),
    }
    trainer = TorchTrainer(
        train,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=has_gpus),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
