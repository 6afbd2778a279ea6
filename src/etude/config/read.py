"""Finding and reading a config file: `lenet5/baseline` by name, YAML or JSON, with `extends:` resolved."""

import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.config.dialect import parse_yaml
from etude.config.document import Document, Location, display, merge
from etude.config.messages import show
from etude.core.errors import ConfigError
from etude.core.spelling import did_you_mean, listed, shorten, suggest

SUFFIXES = (".yaml", ".yml", ".json")
_PAIR = re.compile(r"(\\u[dD][89abAB]..)(\\u[dD][c-fC-F]..)")
"""A JSON surrogate pair: a character beyond 16 bits, written as two escapes."""


def read_config(path: str | os.PathLike[str]) -> Document:
    """Read a YAML or JSON file and the files it extends; return plain data with the line of every value.

    `extends: base.yaml` (or a list of files, later ones override) names files relative to the extending file. Raises
    ConfigError in one line if a file is missing, empty, not valid, or extends itself.
    """
    return _load(Path(path), (), itertools.count(), "")


def _load(path: Path, chain: tuple[Path, ...], layers: Iterator[int], said_at: str) -> Document:
    own = _parse(path, said_at)
    real = path.resolve()  # only for a file that exists: other names may be invalid on this system
    if real in chain:
        circle = " → ".join(display(step) for step in (*chain[chain.index(real) :], real))
        raise ConfigError(f"{said_at}files extend each other in a circle: {circle}; remove one extends")
    parents = own.data.pop("extends", None)
    result: Document | None = None
    for number, name in enumerate(_parent_names(parents, own)):
        key = "extends" if isinstance(parents, str) else f"extends.{number}"
        parent = _load(path.parent / name, (*chain, real), layers, f"{own.place(key)}: ")
        result = parent if result is None else merge(result, parent)
    own.forget("extends")
    layer = next(layers)
    own.locations = {known: location._replace(layer=layer) for known, location in own.locations.items()}
    return own if result is None else merge(result, own)


def _parent_names(parents: Any, own: Document) -> list[str]:
    names = [parents] if isinstance(parents, str) else [] if parents is None else parents
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{own.place('extends')}: expected a file name or a list of file names, got {show(parents)}"
        )
    return names


def _parse(path: Path, said_at: str) -> Document:
    shown, text = display(path), _read_text(path, said_at)
    if path.suffix == ".json":  # JSON is YAML except for surrogate pairs
        text = _PAIR.sub(lambda pair: json.loads(f'"{pair[0]}"'), text.expandtabs(2))
    data, lines = parse_yaml(text, shown)
    if data is None:
        raise ConfigError(f"{shown}: the file is empty; write sections such as 'model:' and 'training:'")
    if not isinstance(data, dict):
        found = "a list" if isinstance(data, list) else f"the single value {show(data)}"
        raise ConfigError(f"{shown}: expected sections such as 'model:' and 'training:' at the top, found {found}")
    if odd := [key for key in data if not isinstance(key, str)]:
        raise ConfigError(f"{shown}: the name of a section must be text, found {show(odd[0])}")
    return Document(data, path, {known: Location(shown, line) for known, line in lines.items()})


def _read_text(path: Path, said_at: str) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{said_at}{missing_file(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{said_at}'{display(path)}' is a folder; name a file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{display(path)}: not a text file in UTF-8 (byte {error.start})") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{said_at}cannot read {display(path)!r}: {why}") from error


def is_file(path: Path) -> bool:
    """Return whether the file exists; False also for an invalid name, where pathlib raises."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def missing_file(path: Path) -> str:
    """Return a message that a file does not exist, with similar names in its folder."""
    folder = path.parent
    if not folder.is_dir():
        return f"no file '{display(path)}': its folder does not exist"
    suffixes = (*SUFFIXES, path.suffix)
    there = sorted(file.name for file in folder.iterdir() if file.suffix in suffixes and file.is_file())
    return f"no file '{display(path)}'{suggest(path.name, there, label=f'in {display(folder)}')}"


DEFAULT = "baseline"
"""The config used for an experiment named without a config."""


def find_config(experiment: str, config_name: str | None = None) -> Path:
    """Return the config file of an experiment.

    `experiment` is `lenet5/baseline`, or `lenet5` with a `config_name` (by default its only config, or `baseline`),
    or the path of a file. Experiments are searched in the folder `experiments` of the current folder and its parents,
    and among those shipped with Etude. Raises ConfigError with the available ones.
    """
    path = Path(experiment)
    if config_name is None and is_file(path):
        return path
    if config_name is None and path.suffix in SUFFIXES:
        raise ConfigError(missing_file(path))
    name = experiment.strip("/") if config_name is None else f"{experiment.strip('/')}/{config_name}"
    known = dict(list_experiments())
    if name in known:
        return known[name]
    if config_name is None and is_file(own := path / "config.yaml"):
        raise ConfigError(
            f"{path} is a run folder: name its config, {own}, for a new run; continue it with: etude resume {path}"
        )
    configs = [each for each in known if each.rpartition("/")[0] == name]
    if len(configs) == 1 or f"{name}/{DEFAULT}" in configs:
        return known[configs[0] if len(configs) == 1 else f"{name}/{DEFAULT}"]
    raise ConfigError(_unknown(name, configs, list(known)))


def list_experiments() -> list[tuple[str, Path]]:
    """Return every config that can be used by name, as (`lenet5/baseline`, path), sorted by name."""
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
    package = Path(__file__).resolve().parents[1]
    checkout = package.parents[1] / "experiments"
    installed = checkout if package.parent.name == "src" and checkout.is_dir() else package / "experiments"
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
