"""One experiment with several weightings of its tasks, over seeds."""

from collections.abc import Sequence
from pathlib import Path

from etude.config import lookup
from etude.core import ConfigError
from etude.multitask.compare.runs import ComparedRuns, Runner, Tell, chosen_seeds, folder_of, with_training
from etude.multitask.compare.tables import Comparison, make_rows


def compare_weightings(
    runner: Runner,
    experiment: str | Path,
    weightings: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    seeds: Sequence[int] | int | None = None,
    progress: bool = True,
    tell: Tell = lambda _words: None,
) -> Comparison:
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
    runs = ComparedRuns(runner, own, folder_of(own, out, "compare-weightings"), progress, tell)
    for seed in chosen_seeds(own, seeds):
        for name, config in configs.items():
            runs.add(name, with_training(config, seed=seed), runs.data, name)
    rows = [row for task in own.tasks for row in make_rows(task, runs.found)]
    return runs.write({"weightings": tuple(configs)}, rows, "every model after its last step")
