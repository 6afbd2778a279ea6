"""A config as read: plain data, and for every value the file and line it came from."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from etude.core.errors import ConfigError
from etude.core.spelling import shorten

_MAX_FILE, _MAX_PATH = 300, 120
"""Length limits of file names and dotted paths in messages."""
COMMAND_LINE = "command line"
"""Used as the file name of values given as overrides."""


class Location(NamedTuple):
    """Where a value was written."""

    file: str
    line: int | None = None
    layer: int = 0
    """Later layers override earlier ones: extending files, then the command line."""
    written: str = ""
    """The dotted path as the user wrote it, if the key has since been renamed."""

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(slots=True)
class Document:
    """Data of a config with its origins; from `read_config`, or from a dict for configs made in Python.

    >>> Document({"training": {"epochs": 3}}).place("training.epochs")
    'training.epochs'
    """

    data: dict[str, Any]
    path: Path | None = None
    locations: dict[str, Location] = field(default_factory=dict)
    """Dotted path to origin; list elements are numbered: `callbacks.0.patience`."""

    def where(self, path: str) -> Location | None:
        """Return the origin of a value, or that of the nearest enclosing section."""
        while path:
            if path in self.locations:
                return self.locations[path]
            path = path.rpartition(".")[0]
        return Location(display(self.path)) if self.path else None

    def place(self, path: str) -> str:
        """Return "file:line: dotted.path" as the start of a message."""
        location = self.where(path)
        if location is None:
            return shorten(path, _MAX_PATH)
        exact = self.locations.get(path)
        shown = shorten(exact.written if exact and exact.written else path, _MAX_PATH)
        return f"{location}: {shown}" if shown else str(location)

    def layer(self, path: str) -> int:
        """Return the layer that set the value; 0 if unknown."""
        location = self.where(path)
        return location.layer if location else 0

    def renamed(self, old: str, new: str) -> None:
        """Record that the value at `new` was written as `old`, so that messages show what the user wrote."""
        for path, location in list(self.locations.items()):
            if path == old or path.startswith(f"{old}."):
                moved = self.locations.pop(path)
                self.locations[new + path[len(old) :]] = moved._replace(written=location.written or path)

    def forget(self, path: str) -> None:
        """Drop the origins of a value and of everything below it."""
        for known in [known for known in self.locations if known == path or known.startswith(f"{path}.")]:
            del self.locations[known]


def join(path: str, key: object) -> str:
    """Return the dotted path of `key` below `path`.

    >>> join("", "model"), join("callbacks", 0)
    ('model', 'callbacks.0')
    """
    return f"{path}.{key}" if path else str(key)


def display(path: Path) -> str:
    """Return the path as a user would type it: relative to the current folder if it is inside."""
    try:
        shown = str(path.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError, RuntimeError):  # outside the current folder, or not a valid name
        shown = str(path)
    return shorten("".join(one if one.isprintable() else ascii(one)[1:-1] for one in shown), _MAX_FILE)


def merge(base: Document, top: Document) -> Document:
    """Merge `top` over `base`: sections are merged key by key, everything else is replaced.

    A section that names another component replaces the whole section, because components have different arguments. A
    section given as a bare name (`optimizer: sgd`) counts as `name: sgd`.

    >>> merge(Document({"a": {"x": 1, "y": 2}}), Document({"a": {"y": 3}})).data
    {'a': {'x': 1, 'y': 3}}
    >>> merge(Document({"o": {"name": "sgd", "momentum": 0.9}}), Document({"o": {"name": "adamw"}})).data
    {'o': {'name': 'adamw'}}
    """
    merged = Document({}, top.path, dict(base.locations))
    merged.data = _merge(base.data, top.data, "", merged)
    merged.locations.update(top.locations)
    return merged


def _merge(base: Mapping[str, Any], top: Mapping[str, Any], path: str, merged: Document) -> dict[str, Any]:
    result = {key: copy.deepcopy(value) for key, value in base.items() if key not in top}
    for key, value in top.items():
        below, where = base.get(key), join(path, key)
        if isinstance(below, str) and isinstance(value, Mapping) and "name" not in value:
            below = {"name": below}
        names = [one["name"] for one in (below, value) if isinstance(one, Mapping) and "name" in one]
        if isinstance(below, Mapping) and isinstance(value, Mapping) and names[:1] == names[-1:]:
            result[key] = _merge(below, value, where, merged)
        else:
            merged.forget(where)
            result[key] = copy.deepcopy(value)
    # Keep the order of the base, then append new keys: a resolved config reads like the file it extends.
    return {key: result[key] for key in [*base, *(key for key in top if key not in base)]}


def put_setting(
    document: Document,
    target: dict[str, Any],
    value: Any,
    *,
    here: str,
    section: str,
    spellings: Iterable[str],
    name: str,
) -> None:
    """Set `section.name` from the value at `here`, unless a later file or the command line already sets it.

    Arguments:
        target: the section in the document.
        value: the value at `here`, a path in the document.
        spellings: the names that the section may use for the setting.

    Raises ConfigError if one file sets both to different values.
    """
    for spelling in (one for one in spellings if one in target):
        there = f"{section}.{spelling}"
        if document.layer(there) > document.layer(here):
            return
        if document.layer(there) == document.layer(here) and target[spelling] != value:
            raise ConfigError(
                f"{document.place(here)}: {value!r} contradicts {there}, which is {target[spelling]!r}; keep one"
            )
        del target[spelling]
    target[name] = value
    document.renamed(here, f"{section}.{name}")
