"""Compare AdamW, Muon, schedule-free AdamW and SGD with equal tuning budgets, on two problems.

    python experiments/optimizers/race.py [--problems tiny_lm,lenet5] [--workers 2] [--out race]

Every optimizer gets the same number of learning rates, one run each. The best one by validation loss is then trained
with three seeds, one run at a time, so that seconds can be compared. Writes `OUT/results.json`.
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Problem:
    """What is trained, and which rates are tried: six for each optimizer, a factor of two or so apart."""

    experiment: str
    overrides: tuple[str, ...]
    rates: Mapping[str, tuple[float, ...]]
    schedule: str
    """Of all optimizers but the schedule-free one, which only warms up."""
    warmup: int
    arguments: str
    """Further arguments of optimizers with decoupled weight decay."""


PROBLEMS = {
    "tiny_lm": Problem(
        "tiny_lm/baseline",
        ("callbacks=[]", "training.validate_every_steps=100", "training.save_every_steps=1400"),
        {
            "adamw": (1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3),
            "muon": (1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3),
            "schedule_free_adamw": (2e-3, 4e-3, 8e-3, 16e-3, 32e-3, 64e-3),
            "sgd": (0.05, 0.1, 0.2, 0.4, 0.8, 1.6),
        },
        "{name: warmup_cosine, warmup_steps: 80, min_lr_ratio: 0.1}",
        80,
        "betas: [0.9, 0.95], weight_decay: 0.1",
    ),
    "lenet5": Problem(
        "lenet5/lecun1998",
        ("training.epochs=5", "training.checkpoint_interval=5"),
        {
            "adamw": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3),
            "muon": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3),
            "schedule_free_adamw": (1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3),
            "sgd": (0.01, 0.02, 0.04, 0.08, 0.16, 0.32),
        },
        "{name: cosine}",
        100,
        "weight_decay: 0.01",
    ),
}


@dataclass(frozen=True)
class Result:
    """One run: the validation losses by step, and the seconds that training took up to each."""

    problem: str
    optimizer: str
    lr: float
    seed: int
    steps: list[int]
    losses: list[float]
    accuracies: list[float]
    seconds: list[float]

    @property
    def last(self) -> float:
        return self.losses[-1]


def overrides(problem: Problem, optimizer: str, lr: float, seed: int) -> list[str]:
    """Return what a run changes in its experiment, as the command line takes it."""
    arguments = {
        "adamw": problem.arguments,
        "muon": "weight_decay: " + problem.arguments.rpartition(" ")[2],
        "schedule_free_adamw": problem.arguments,
        "sgd": "momentum: 0.9, weight_decay: 5e-4",
    }
    warms_up = f"{{name: warmup, warmup_steps: {problem.warmup}, schedule: constant}}"
    return [
        *problem.overrides,
        f"optimizer={{name: {optimizer}, lr: {lr:g}, {arguments[optimizer]}}}",
        f"scheduler={warms_up if optimizer.startswith('schedule_free') else problem.schedule}",
        f"training.seed={seed}",
    ]


def train(run: tuple[str, str, float, int], out: Path) -> Result | None:
    """Train once and return its curve; None if it diverged."""
    from etude.core import TrainingError
    from etude.experiment import train_experiment

    name, optimizer, lr, seed = run
    problem, folder = PROBLEMS[name], out / f"{name}-{optimizer}-{lr:g}-{seed}"
    try:
        train_experiment(
            problem.experiment,
            overrides(problem, optimizer, lr, seed),
            run_dir=folder,
            overwrite=True,
            progress=False,
        )
    except TrainingError:
        return None
    return read(folder, run)


def read(folder: Path, run: tuple[str, str, float, int]) -> Result:
    """Return the curve of a run folder. Time spent validating and saving is not counted."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {one["step"]: one for one in records if one["split"] == "val"}
    logged = [one for one in records if one["split"] == "train" and "samples_per_s" in one]
    batch_size = logged[0]["samples"] / logged[0]["step"]
    per_step = batch_size / statistics.median(one["samples_per_s"] for one in logged)
    steps = sorted(losses)
    return Result(
        *run,
        steps,
        [losses[step]["val_loss"] for step in steps],
        [losses[step].get("val_accuracy", 0.0) for step in steps],
        [step * per_step for step in steps],
    )


def race(problems: Iterable[str], workers: int, out: Path) -> dict[str, list[dict[str, Any]]]:
    """Run everything; print each stage; return the runs of both stages."""
    tried = [
        (name, optimizer, lr, SEEDS[0])
        for name in problems
        for optimizer, rates in PROBLEMS[name].rates.items()
        for lr in rates
    ]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        tuning = [one for one in pool.map(partial(train, out=out), tried) if one is not None]
    best = {}
    for one in tuning:
        key = one.problem, one.optimizer
        if one.last == one.last and (key not in best or one.last < best[key].last):
            best[key] = one
    final = []
    for (name, optimizer), chosen in best.items():
        results = [train((name, optimizer, chosen.lr, seed), out) for seed in SEEDS]
        mine = [one for one in results if one is not None]
        print(table_row(mine) if mine else f"| {name} | {optimizer} | {chosen.lr:g} | diverged | – | – |", flush=True)
        final += mine
    return {"tuning": [asdict(one) for one in tuning], "final": [asdict(one) for one in final]}


def machine() -> dict[str, str]:
    """Return where the runs were made."""
    import platform

    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    return {"device": device, "torch": torch.__version__, "python": platform.python_version()}


def table_row(results: Sequence[Result]) -> str:
    """Return a row of a Markdown table: mean and range over seeds, and milliseconds per step."""
    first, losses = results[0], [one.last for one in results]
    accuracies = [one.accuracies[-1] for one in results]
    ms = 1e3 * statistics.median(one.seconds[-1] / one.steps[-1] for one in results)
    spread = f"{statistics.mean(losses):.4f} ({min(losses):.4f} … {max(losses):.4f})"
    spread += f", {len(losses)} of {len(SEEDS)} seeds" * (len(losses) < len(SEEDS))
    accuracy = f"{100 * statistics.mean(accuracies):.2f} %"
    return f"| {first.problem} | {first.optimizer} | {first.lr:g} | {spread} | {accuracy} | {ms:.2f} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", default="tiny_lm,lenet5")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("race"))
    options = parser.parse_args(argv)
    problems = options.problems.split(",")
    if unknown := [name for name in problems if name not in PROBLEMS]:
        parser.error(f"unknown problem {unknown[0]!r}; there are: {', '.join(PROBLEMS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    print("| problem | optimizer | best rate | validation loss | accuracy | ms a step |\n|---|---|---|---|---|---|")
    results = race(problems, options.workers, options.out)
    (options.out / "results.json").write_text(json.dumps({**machine(), **results}) + "\n")


if __name__ == "__main__":
    main()
