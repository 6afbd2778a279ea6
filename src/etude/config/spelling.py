"""Nearest spellings and short lists of names, for error messages."""

import difflib
from collections.abc import Iterable

MANY = 8
"""Beyond this many names a list is shortened where a suggestion already answers the question."""


def nearest(word: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the candidate that looks most like `word`, or None if none is as close as `cutoff` (1 is equal).

    >>> nearest("batch_sise", ["epochs", "batch_size"])
    'batch_size'
    >>> nearest("colour", ["epochs"]) is None
    True
    """
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def listed(names: Iterable[str], *, shorten: bool = False) -> str:
    """Join names for a message; a long list is cut short if asked.

    >>> listed(["a", "b"])
    'a, b'
    """
    words = list(names)
    if shorten and len(words) > MANY:
        words = [*words[:MANY], "…"]
    return ", ".join(words) or "none"


def shorten(text: str, length: int = 60) -> str:
    """Cut a text that a message repeats to `length` characters.

    >>> shorten("x" * 100, 5)
    'xxxx…'
    """
    return text if len(text) <= length else f"{text[: length - 1]}…"


def a(noun: str) -> str:
    """Return the noun with its article.

    >>> a("model"), a("optimizer")
    ('a model', 'an optimizer')
    """
    return f"{'an' if noun[:1] in 'aeiou' else 'a'} {noun}"


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return "; did you mean '…'?", or nothing if no candidate is close.

    >>> did_you_mean("adamm", ["sgd", "adamw"])
    "; did you mean 'adamw'?"
    """
    close = nearest(word, candidates)
    return f"; did you mean '{close}'?" if close else ""
