"""Finding an experiment's config: `lenet5/baseline` is `experiments/lenet5/configs/baseline.yaml`."""

from pathlib import Path

from etude.config.dialect import text_problem
from etude.config.document import display, is_file
from etude.config.read import SUFFIXES, missing_file
from etude.core.errors import ConfigError
from etude.core.spelling import did_you_mean, listed, shorten

DEFAULT = "baseline"
"""The config that an experiment's bare name stands for."""


def find_config(experiment: str, config_name: str | None = None) -> Path:
    """Return the config file of an experiment.

    `experiment` is `lenet5/baseline`, or `lenet5` with a `config_name` (its only config or `baseline` without
    one), or the path of a file. Experiments are looked for in the folder `experiments` of the current folder, of
    the folders above it, and beside the sources of an editable install. Raises ConfigError with what there is.
    """
    path = Path(experiment)
    if problem := text_problem(experiment) or text_problem(config_name or ""):
        raise ConfigError(f"the name of the experiment: {problem}")
    if config_name is None and (path.suffix in SUFFIXES or is_file(path)):
        if is_file(path):
            return path
        raise ConfigError(missing_file(path))
    name = experiment.strip("/") if config_name is None else f"{experiment.strip('/')}/{config_name}"
    known = dict(list_experiments())
    if name in known:
        return known[name]
    configs = [each for each in known if each.rpartition("/")[0] == name]
    if len(configs) == 1 or f"{name}/{DEFAULT}" in configs:
        return known[configs[0] if len(configs) == 1 else f"{name}/{DEFAULT}"]
    raise ConfigError(_unknown(name, configs, list(known)))


def list_experiments() -> list[tuple[str, Path]]:
    """Return every config that can be named, as (`lenet5/baseline`, path), sorted by name."""
    found: dict[str, Path] = {}
    for root in experiment_roots():
        for folder in sorted([*root.glob("*/configs"), *root.glob("*/*/configs")]):
            for suffix in SUFFIXES:
                for file in sorted(folder.glob(f"*{suffix}")):
                    found.setdefault(f"{folder.parent.relative_to(root).as_posix()}/{file.stem}", file)
    return sorted(found.items())


def experiment_roots() -> list[Path]:
    """Return the `experiments` folders, the nearest first."""
    here = Path.cwd()
    roots = [folder / "experiments" for folder in (here, *here.parents)]
    nearest_root = next((root for root in roots if root.is_dir()), None)
    source = Path(__file__).resolve().parents[2]
    installed = source.parent / "experiments" if source.name == "src" else None
    found = [root for root in (nearest_root, installed) if root is not None and root.is_dir()]
    return list(dict.fromkeys(root.resolve() for root in found))


def _unknown(name: str, configs: list[str], known: list[str]) -> str:
    name = shorten(name, 100)
    if configs:
        return f"experiment '{name}' has several configs; name one of {listed(configs)}"
    if not known:
        here = display(Path.cwd())
        return f"no experiment '{name}': no folder 'experiments' with configs in {here} or above; name a file instead"
    hint = did_you_mean(name, known) or did_you_mean(name, {each.rpartition("/")[0] for each in known})
    return f"no experiment '{name}'{hint} (there are: {listed(known, shorten=bool(hint))})"
