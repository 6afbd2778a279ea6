"""Names in error messages: the closest match, the available names, shortened values."""

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from etude.core.errors import ConfigError

_MANY = 8
"""Longer lists of names are shortened if there is a close match."""


def suggest(word: str, names: Iterable[str], *, label: str = "there are") -> str:
    """Return the end of a message about an unknown name: the closest name, if any, and the available names.

    >>> suggest("adamm", ["sgd", "adamw"])
    "; did you mean 'adamw'? (there are: sgd, adamw)"
    >>> suggest("colour", [])
    ' (there are: none)'
    """
    names = list(names)
    hint = did_you_mean(word, names)
    return f"{hint} ({label}: {listed(names, shorten=bool(hint))})"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return the closest name as a question, or nothing if no name is close.

    >>> did_you_mean("adamm", ["sgd", "adamw"])
    "; did you mean 'adamw'?"
    """
    close = nearest(word, names)
    return f"; did you mean '{shorten(close)}'?" if close else ""


def nearest(word: str, names: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the name most similar to `word`, or None if no similarity reaches `cutoff` (1 means equal).

    >>> nearest("batch_sise", ["epochs", "batch_size"])
    'batch_size'
    >>> nearest("colour", ["epochs"]) is None
    True
    >>> nearest("f1", ["val_loss", "val_f1"])
    'val_f1'
    """
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    close = close or [name for name in by_lower if name.endswith(f"_{word.lower()}")]
    return by_lower[close[0]] if close else None


def as_patterns(patterns: Any, where: str) -> list[str]:
    """Return one pattern of names, or several, as a list; raise ConfigError, with the place `where`, for others.

    >>> as_patterns("head", "freeze")
    ['head']
    """
    found = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(found, Iterable) or isinstance(found, Mapping | bytes):
        found = [found]
    found = list(found)
    for one in found or [None]:
        if not isinstance(one, str) or not one:
            raise ConfigError(
                f"{where} is {patterns!r:.60}; it must be a pattern of parameter names, such as 'backbone.*', or a "
                "list of them"
            )
    return found


def names_matching(patterns: str | Iterable[str], names: Iterable[str], where: str) -> list[str]:
    """Return the names, such as those of parameters, that match a pattern, or are inside a module that does.

    Raises ConfigError, with the place `where`, for a pattern that matches nothing.

    >>> names_matching(["body.*.weight", "head"], ["body.0.weight", "body.0.bias", "head.bias"], "freeze")
    ['body.0.weight', 'head.bias']
    """
    names, found = list(names), set()
    for pattern in as_patterns(patterns, where):
        if not (matched := {one for one in names if fnmatchcase(one, pattern) or fnmatchcase(one, f"{pattern}.*")}):
            parts = dict.fromkeys(".".join(one.split(".")[:end]) for one in names for end in range(1, 9))
            close = nearest(pattern.rstrip(".*"), parts, cutoff=0.5)
            hint = f"; did you mean '{close}'?" if close else ""
            raise ConfigError(
                f"{where}: no parameter matches '{pattern}'{hint} (there are: {listed(names, shorten=True)})"
            )
        found |= matched
    return [one for one in names if one in found]


def listed(names: Iterable[str], *, shorten: bool = False) -> str:
    """Join names for a message; with a limit, a long list is shortened.

    >>> listed(["a", "b"])
    'a, b'
    """
    words = list(names)
    if shorten and len(words) > _MANY:
        words = [*words[:_MANY], "…"]
    return ", ".join(words) or "none"


def shorten(text: str, length: int = 60) -> str:
    """Shorten a text quoted in a message to `length` characters.

    >>> shorten("x" * 100, 5)
    'xxxx…'
    """
    return text if len(text) <= length else f"{text[: length - 1]}…"


def printable(text: str, length: int = 200) -> str:
    """Return a text of others for a terminal: without control characters, and shortened.

    >>> printable("a\\x1b[31mb"), printable("x" * 9, 4)
    ('a�[31mb', 'xxx…')
    """
    return shorten("".join(one if one.isprintable() else "\ufffd" for one in text[: length + 1]), length)


def a(noun: str) -> str:
    """Return the noun with its indefinite article.

    >>> a("model"), a("optimizer")
    ('a model', 'an optimizer')
    """
    return f"{'an' if noun[:1] in 'aeiou' else 'a'} {noun}"
