"""One experiment with several weightings of its tasks, over seeds."""

from collections.abc import Callable, Sequence
from pathlib import Path

from etude.config import lookup
from etude.core import ConfigError
from etude.multitask.compare.runs import (
    Numbers,
    Runner,
    chosen_seeds,
    ready,
    train_and_measure,
    with_training,
    write_tables,
)
from etude.multitask.compare.tables import ComparedRun, WeightingComparison, make_weighting_rows


def compare_weightings(
    runner: Runner,
    experiment: str | Path,
    weightings: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    seeds: Sequence[int] | int | None = None,
    progress: bool = True,
    tell: Callable[[str], None] = lambda _words: None,
) -> WeightingComparison:
    """Train the experiment with every weighting and seed, evaluate all runs and write `compare.json` and `compare.md`.

    A weighting is a name; the one that the experiment itself names keeps its settings, others have their defaults.
    Every run has a folder `seed-<seed>/<weighting>` in `out` (`runs/<experiment>/compare-weightings` by default).
    Finished runs are not trained again, one that was stopped goes on. Raises ConfigError, before anything is trained,
    for a weighting that is not known or cannot be made, and for the reasons of `compare_tasks`.
    """
    own = runner.load(experiment, overrides)
    if not own.tasks:
        raise ConfigError(f"{own.document.place('tasks')}: there are no tasks whose losses could be weighed")
    if len(set(weightings)) < len(weightings) or not weightings:
        raise ConfigError(
            f"weightings {', '.join(weightings) or '(none)'}: name each once, such as static,uncertainty"
        )
    for name in weightings:
        lookup("weighting", name)
    selected = own.selection("weighting")
    configs = {
        name: own
        if selected is not None and selected.component.name == name
        else runner.load(experiment, [*overrides, f"weighting={name}"])
        for name in weightings
    }
    data = ready(runner, own)
    root = Path(out) if out is not None else Path("runs") / own.name / "compare-weightings"
    chosen = chosen_seeds(own, seeds)
    runs: list[ComparedRun] = []
    found: dict[str, list[Numbers]] = {name: [] for name in configs}
    for seed in chosen:
        for name, config in configs.items():
            tell(f"seed {seed}: {name}")
            seeded = with_training(config, seed=seed)
            numbers, run = train_and_measure(runner, name, seeded, data, root, progress=progress)
            found[name].append(numbers)
            runs.append(run)
    rows = make_weighting_rows(list(own.tasks), found)
    comparison = WeightingComparison(own.name, tuple(configs), chosen, tuple(runs), rows)
    write_tables(root, comparison)
    return comparison
