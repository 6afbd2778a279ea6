"""Overrides from the command line: `training.batch_size=128`, `scheduler=null`, `model.dims=[1, 2]`."""

import copy
import re
from collections.abc import Iterable
from typing import Any

from etude.config.dialect import parse_value
from etude.config.document import COMMAND_LINE, Document, Location, join
from etude.config.messages import show
from etude.core.errors import ConfigError
from etude.core.spelling import shorten

_PATH = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")
_INDEX = re.compile(r"[0-9]{1,18}")


def apply_overrides(document: Document, overrides: Iterable[str]) -> Document:
    """Return the document with each `section.key=value` set, in the order given.

    A value is written as in YAML; `null` disables a section. List elements are numbered from 0:
    `callbacks.0.patience=3`. Naming another component (`optimizer.name=sgd`) drops the arguments of the previous one.
    Keys are checked later against the schema, like those of a file.

    >>> document = Document({"optimizer": {"name": "adamw", "betas": [0.9, 0.95]}})
    >>> apply_overrides(document, ["optimizer.lr=3e-4", "optimizer.name=sgd"]).data
    {'optimizer': {'lr': 0.0003, 'name': 'sgd'}}
    """
    result = Document(copy.deepcopy(document.data), document.path, dict(document.locations))
    layer = 1 + max((location.layer for location in result.locations.values()), default=0)
    for text in overrides:
        path, value = parse_override(text)
        _assign(result, path.split("."), value, text)
        result.forget(path)
        here = Location(COMMAND_LINE, layer=layer)
        _locate(result, path, value, here)
        while path := path.rpartition(".")[0]:
            result.locations.setdefault(path, here)  # a section that is given only on the command line
    return result


def parse_override(text: str) -> tuple[str, Any]:
    """Split `section.key=value` into its dotted path and its value.

    >>> parse_override("optimizer.lr=3e-4")
    ('optimizer.lr', 0.0003)
    """
    path, equals, written = text.partition("=")
    path, text = path.strip(), shorten(text)
    if not equals or not _PATH.fullmatch(path):
        hint = ""
        if path[:1] in ("+", "-", "~") and _PATH.fullmatch(path.lstrip("+-~")):
            hint = f", without the leading '{shorten(path[: len(path) - len(path.lstrip('+-~'))])}'"
        raise ConfigError(f"{COMMAND_LINE}: cannot read '{text}' as an override: write section.key=value{hint}")
    if not written.strip():
        path = shorten(path)
        raise ConfigError(
            f"{COMMAND_LINE}: '{text}' has no value; write {path}=null to disable it, {path}='' for an empty string"
        )
    try:
        return path, parse_value(written)
    except ConfigError as error:
        raise ConfigError(f"{COMMAND_LINE}: {shorten(path)}: {error}") from error


def _assign(document: Document, keys: list[str], value: Any, text: str) -> None:
    """Set the value, creating sections as needed; a section given as a bare name becomes `name:` first."""
    target: Any = document.data
    path = ""
    for key in keys[:-1]:
        slot = _slot(target, key, path, text)
        inside = target[slot] if isinstance(target, list) else target.get(slot)
        if inside is None or isinstance(inside, str):
            inside = {} if inside is None else {"name": inside}
            target[slot] = inside
        path = join(path, key)
        if not isinstance(inside, (dict, list)):
            raise ConfigError(f"{COMMAND_LINE}: '{shorten(text)}': {shorten(path)} is {show(inside)}, not a section")
        target = inside
    slot = _slot(target, keys[-1], path, text)
    if slot == "name" and path and target.get("name", value) != value:
        for key in [key for key in target if not _from_command_line(document, join(path, key))]:
            del target[key]
            document.forget(join(path, key))
    target[slot] = value


def _slot(target: Any, key: str, path: str, text: str) -> Any:
    """Return the key as written in a mapping, or the index of a list."""
    if isinstance(target, dict):
        if key not in target and _INDEX.fullmatch(key) and int(key) in target:
            return int(key)
        return key
    if not _INDEX.fullmatch(key) or int(key) >= len(target):
        last = f"0 to {len(target) - 1}" if target else "none: the list is empty"
        raise ConfigError(
            f"{COMMAND_LINE}: '{shorten(text)}': {shorten(path)} is a list; number its element ({last})"
        )
    return int(key)


def _from_command_line(document: Document, path: str) -> bool:
    location = document.locations.get(path)
    return location is not None and location.file == COMMAND_LINE


def _locate(document: Document, path: str, value: Any, location: Location) -> None:
    document.locations[path] = location
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in items:
        _locate(document, join(path, key), inside, location)
