"""One experiment with several weightings of its tasks, over seeds."""

from collections.abc import Callable, Sequence
from pathlib import Path

from etude.config import lookup
from etude.core import ConfigError
from etude.experiment.compare import Numbers, chosen_seeds, measured, ready, trained, with_training, write_tables
from etude.experiment.comparison import ComparedRun, WeightingComparison, make_weighting_rows
from etude.experiment.config import load_experiment_config


def compare_weightings(
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
    own = load_experiment_config(experiment, overrides=overrides)
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
        else load_experiment_config(experiment, overrides=[*overrides, f"weighting={name}"])
        for name in weightings
    }
    data = ready(own)
    root = Path(out) if out is not None else Path("runs") / own.name / "compare-weightings"
    chosen = chosen_seeds(own, seeds)
    runs: list[ComparedRun] = []
    found: dict[str, list[Numbers]] = {name: [] for name in configs}
    for seed in chosen:
        for name, config in configs.items():
            tell(f"seed {seed}: {name}")
            seeded = with_training(config, seed=seed)
            numbers, run = measured(name, seeded, trained(seeded, root / f"seed-{seed}" / name, progress), data)
            found[name].append(numbers)
            runs.append(run)
    rows = make_weighting_rows(list(own.tasks), found)
    comparison = WeightingComparison(own.name, tuple(configs), chosen, tuple(runs), rows)
    write_tables(root, comparison)
    return comparison
