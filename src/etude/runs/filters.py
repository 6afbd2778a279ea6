"""Filters of runs as they are written on the command line: a text, `key=value`, `key>number`."""

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from etude.core.errors import ConfigError
from etude.core.spelling import shorten, suggest

_PATTERN = re.compile(r"([^=!<>]+)(!=|>=|<=|=|<|>)(.*)", re.DOTALL)
_ORDERS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Filter:
    """One condition; without an operator it is a text that the name of a run contains."""

    key: str
    operator: str = ""
    value: str = ""


def parse_filter(text: str) -> Filter:
    """Return the condition that a text states; raise ConfigError if it states none.

    >>> parse_filter("state=running")
    Filter(key='state', operator='=', value='running')
    >>> parse_filter("lenet"), parse_filter("best < 0.1").value
    (Filter(key='lenet', operator='', value=''), '0.1')
    """
    text = text.strip()
    match = _PATTERN.fullmatch(text)
    if match is None:
        if not text or text[0] in "=!<>":
            raise ConfigError(f"--filter '{shorten(text)}': write a text, key=value, key!=value or key<number")
        return Filter(text)
    key, sign, value = match[1].strip(), match[2], match[3].strip()
    if not key:
        raise ConfigError(f"--filter '{shorten(text)}': the key before '{sign}' is missing")
    if sign in _ORDERS and _number(value) is None:
        raise ConfigError(f"--filter '{shorten(text)}': '{sign}' needs a number, found '{shorten(value)}'")
    return Filter(key, sign, value)


def matches(one: Filter, name: str, facts: Mapping[str, Any]) -> bool:
    """Return whether a run fits: `name` is its path, `facts` its state, metrics and config by key.

    Text is compared without case, and `*` stands for any characters; numbers are compared as numbers.

    >>> facts = {"state": "finished", "optimizer.lr": 0.1}
    >>> [matches(parse_filter(text), "lenet/1", facts) for text in ("LeNet", "lr=1e-1", "state=fin*", "lr>0.5")]
    [True, True, True, False]
    """
    if not one.operator:
        return one.key.casefold() in name.casefold()
    found = [facts[key] for key in keys_for(one.key, facts)]
    if one.operator in _ORDERS:
        limit = _number(one.value)
        numbers = [value for value in map(_number, found) if value is not None]
        return limit is not None and any(_ORDERS[one.operator](value, limit) for value in numbers)
    is_equal = any(_is_equal(value, one.value) for value in found)
    return is_equal if one.operator == "=" else not is_equal


def keys_for(key: str, known: Iterable[str]) -> list[str]:
    """Return the keys that a short one means: itself, or else those that end with it.

    >>> keys_for("lr", ["optimizer.lr", "lr_schedule.name"]), keys_for("state", ["state", "x.state"])
    (['optimizer.lr'], ['state'])
    """
    known = list(known)
    return [key] if key in known else [one for one in known if one.endswith(f".{key}")]


def check_key(key: str, known: Iterable[str], option: str) -> None:
    """Raise ConfigError for a key that no run has."""
    known = list(dict.fromkeys(known))
    if not keys_for(key, known):
        short = [one.rpartition(".")[2] for one in known]
        raise ConfigError(f"{option}: no run has '{shorten(key)}'{suggest(key, dict.fromkeys([*known, *short]))}")


def _is_equal(value: Any, text: str) -> bool:
    number, wanted = _number(value), _number(text)
    if number is not None and wanted is not None:
        return number == wanted
    shown, wanted_text = plain(value).casefold(), text.casefold()
    return shown == wanted_text or fnmatchcase(shown, wanted_text)


def plain(value: Any) -> str:
    """Return a value as it is written in a config: null, true, text.

    >>> plain(None), plain(True), plain(0.1)
    ('null', 'true', '0.1')
    """
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
