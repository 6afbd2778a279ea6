"""A new experiment from the template: a config that trains, a module for code of its own, a README."""

import keyword
import shutil
from importlib.resources import files
from pathlib import Path

from etude.core import ConfigError


def new_experiment(name: str, root: str | Path = "experiments") -> Path:
    """Make `root/name` from the template and return it; raise ConfigError if it exists or the name is unusable."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"'{name}' cannot name an experiment: use letters, digits and _, such as my_experiment")
    folder = Path(root) / name
    if folder.exists():
        raise ConfigError(f"{folder} exists already; choose another name")
    template = Path(str(files("etude.experiment") / "template_files"))
    try:
        shutil.copytree(template, folder, ignore=shutil.ignore_patterns("__pycache__"))
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                path.write_text(path.read_text(encoding="utf-8").replace("EXPERIMENT_NAME", name), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {error.strerror or error}; choose another --root") from error
    return folder
