"""Creating a new experiment: from the template, with a module for its own code, or for existing data."""

import keyword
import shutil
from importlib.resources import files
from pathlib import Path

from etude.core import ConfigError

README = """# {name}

What this experiment asks, in a sentence or two.

| config | what it is | result |
|---|---|---|
| `baseline` | {model} on {data} | |

```
etude train {name}/baseline
etude evaluate runs/{name}/baseline/…
```
"""


def new_experiment(name: str, root: str | Path = "experiments") -> Path:
    """Create `root/name` from the template and return it; raise ConfigError if it exists or the name is invalid."""
    folder = _new_folder(name, root)
    template = Path(str(files("etude.experiment") / "template_files"))
    try:
        shutil.copytree(template, folder, ignore=shutil.ignore_patterns("__pycache__"))
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                path.write_text(path.read_text(encoding="utf-8").replace("EXPERIMENT_NAME", name), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot create {folder}: {error.strerror or error}; choose another --root") from error
    return folder


def new_experiment_from(
    name: str, data: str | Path, root: str | Path = "experiments", target: str | None = None
) -> tuple[Path, list[str]]:
    """Create `root/name` with a config for a file or folder; return it, and messages about what was found.

    Raises ConfigError if the folder exists or the name is invalid, DataError if there is no data.
    """
    from etude.experiment.from_data import config_text, look_at

    folder = _new_folder(name, root)
    finding = look_at(Path(data).expanduser(), target)
    readme = README.format(name=name, model=finding.model["name"], data=Path(data).name)
    try:
        (folder / "configs").mkdir(parents=True)
        (folder / "configs" / "baseline.yaml").write_text(config_text(name, finding), encoding="utf-8")
        (folder / "README.md").write_text(readme, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot create {folder}: {error.strerror or error}; choose another --root") from error
    return folder, finding.words


def _new_folder(name: str, root: str | Path) -> Path:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(
            f"'{name}' is not a valid experiment name; use letters, digits and _, such as my_experiment"
        )
    folder = Path(root) / name
    if folder.exists():
        raise ConfigError(f"{folder} exists already; choose another name")
    return folder
