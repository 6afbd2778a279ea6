"""Nearest spellings and short lists of names, for error messages."""

import difflib
from collections.abc import Iterable

MANY = 8
"""Beyond this many names a list is shortened where a suggestion already answers the question."""


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that looks most like `word`, or None if none is close.

    >>> nearest("batch_sise", ["epochs", "batch_size"])
    'batch_size'
    >>> nearest("colour", ["epochs"]) is None
    True
    """
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
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


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return "; did you mean '…'?", or nothing if no candidate is close.

    >>> did_you_mean("adamm", ["sgd", "adamw"])
    "; did you mean 'adamw'?"
    """
    close = nearest(word, candidates)
    return f"; did you mean '{close}'?" if close else ""
