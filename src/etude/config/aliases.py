"""Other spellings of keys: renaming them, and what happens when two spellings of one key meet."""

from collections.abc import Mapping
from typing import Any

from etude.config.document import Document, join
from etude.config.shapes import Shape, shape_at
from etude.core.errors import ConfigError


def canonical_keys(
    data: Mapping[str, Any], aliases: Mapping[str, str], path: str = "", document: Document | None = None
) -> dict[str, Any]:
    """Return the section with its keys under their canonical names; messages keep showing what was written.

    If two spellings come from different files, the one given later wins, as with any key. In the same file they
    contradict each other: ConfigError.

    >>> canonical_keys({"log_every": 50, "epochs": 3}, {"log_every": "log_interval"})
    {'log_interval': 50, 'epochs': 3}
    """
    origin = document or Document({})
    data = later_spelling(data, aliases, path, document)
    result = {}
    for key, value in data.items():
        name = aliases.get(key, key)
        if name in result or (name != key and name in data):
            first = next(other for other in data if other != key and aliases.get(other, other) == name)
            raise ConfigError(
                f"{origin.place(join(path, key))}: means the same as '{first}', which is given too; keep one of them"
            )
        result[name] = value
    for key in data:
        if key in aliases:
            origin.renamed(join(path, key), join(path, aliases[key]))
    return result


def later_spelling(
    data: Mapping[str, Any], aliases: Mapping[str, str], path: str, document: Document | None
) -> dict[str, Any]:
    """Return the section without those spellings of a key that a later file, or the command line, has replaced."""
    if document is None:
        return dict(data)
    layers = {key: document.layer(join(path, key)) for key in data}
    latest: dict[str, int] = {}
    for key, layer in layers.items():
        name = aliases.get(key, key)
        latest[name] = max(latest.get(name, 0), layer)
    return {key: value for key, value in data.items() if layers[key] == latest[aliases.get(key, key)]}


def settle_spellings(hint: Any, data: Any, path: str, document: Document | None, provided: frozenset[str]) -> Any:
    """Apply `later_spelling` to a section and to all sections inside it, by the schema."""

    def settle(value: Any, loc: tuple[Any, ...], where: str) -> Any:
        if not isinstance(value, Mapping):
            return value
        shape = shape_at(hint, loc, data, provided) or Shape()
        kept = later_spelling(value, shape.spellings, where, document)
        return {key: settle(item, (*loc, key), join(where, key)) for key, item in kept.items()}

    return data if document is None else settle(data, (), path)
