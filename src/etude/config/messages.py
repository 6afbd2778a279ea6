"""Messages for invalid values: a phrase for each kind of error that pydantic reports."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from etude.core.spelling import a, did_you_mean, shorten

Detail = Mapping[str, Any]
"""One entry of `ValidationError.errors()`."""

_NOUNS = {
    "bool_type": "true or false",
    "none_required": "null",
    **dict.fromkeys(
        ("tuple_type", "set_type", "frozen_set_type", "iterable_type", "sequence_str", "Sequence"), "a list"
    ),
    **dict.fromkeys(("dict_type", "mapping_type", "model_type", "dataclass_type", "Mapping"), "a mapping"),
}
"""YAML terms for types and abstract classes for which pydantic uses Python terms."""
_VALID = re.compile(r"Input should be a valid (\w+)")
_PYTHON_ONLY = {"is_instance_of", "is_subclass_of", "callable_type", "is_type"}
"""Types whose values a file cannot hold."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_SWITCHES = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}


def show(value: Any) -> str:
    """Return a value as written in YAML, shortened if long.

    >>> show(True), show(None), show("ten"), show([1, 2]), show({"a": 1})
    ('true', 'null', "'ten'", '[1, 2]', 'a mapping')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "a mapping"
    try:
        return shorten(repr(value))
    except ValueError:  # an integer with more digits than Python converts
        return a(type(value).__name__)


def is_type_error(detail: Detail) -> bool:
    """Return whether the value has a wrong type, rather than a wrong size."""
    return detail["type"] in _PYTHON_ONLY or _expected(detail) is not None


def _expected(detail: Detail) -> str | None:
    """Return the expected type in YAML terms; None if the type is not the problem."""
    kind, context = detail["type"], detail.get("ctx") or {}
    if kind in ("literal_error", "enum"):
        return str(context["expected"])
    valid = _VALID.fullmatch(detail["msg"])
    return _NOUNS.get(str(context.get("class", kind))) or (a(valid[1]) if valid else None)


def message(detail: Detail) -> str:
    """Return the message for an invalid value (not for unknown or missing keys)."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx") or {}
    if is_type_error(detail):
        return mismatch([detail])
    if kind == "component":
        return str(context["problem"])
    if kind in ("value_error", "assertion_error"):
        words = " ".join(str(context.get("error", detail["msg"])).split())
        return words if isinstance(value, Mapping) else f"{words} (got {show(value)})"
    words = re.sub(r"^\w+ should", "must", detail["msg"].partition(" after validation")[0])
    words = words.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    return f"{words}, got {show(value)}"


def mismatch(details: Sequence[Detail]) -> str:
    """Return one message for a value that fits none of the accepted types."""
    value = details[0]["input"]
    nouns = [noun for noun in map(_expected, details) if noun]
    choices = [word for noun in nouns for word in re.findall(r"'([^']*)'", noun)]
    if not nouns:
        wanted = (details[0].get("ctx") or {}).get("class", "function")
        return f"takes a {wanted}, which can only be given in Python, got {show(value)}"
    words = " or ".join(dict.fromkeys(nouns))
    verb = "must be" if choices and len(nouns) == 1 else "expected"
    near = did_you_mean(value, choices) if isinstance(value, str) else ""
    return f"{verb} {words}, got {show(value)}{near}{_remedy(nouns, value)}"


def _remedy(nouns: Sequence[str], value: Any) -> str:
    """Return a hint how to write the value that was probably meant."""
    if isinstance(value, str) and {"an integer", "a number"} & set(nouns):
        return f"; write {shorten(value)} without quotes" if _NUMBER.fullmatch(value) else ""
    if "true or false" in nouns and isinstance(value, str) and value.lower() in _SWITCHES:
        return f"; write {_SWITCHES[value.lower()]}"
    if "an integer" in nouns and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if "a string" in nouns and isinstance(value, (bool, int, float)):
        return "; put it in quotes"
    return ""
