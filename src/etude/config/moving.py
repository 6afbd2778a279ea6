"""A setting that may be written in two places moves to one of them: the later one holds, and one file says it once."""

from collections.abc import Iterable
from typing import Any

from etude.config.document import Document
from etude.core.errors import ConfigError


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
    """Set `section.name` to what `here` says, unless a later file or the command line says it there already.

    Arguments:
        target: the section in the document.
        value: what is said at `here`, a path in the document.
        spellings: the names under which the section may have the setting.

    Raises ConfigError if one file says different things in both places.
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
