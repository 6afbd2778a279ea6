"""What is wrong with one value, in words: a phrase for each kind of error that pydantic reports."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from etude.core.spelling import a, did_you_mean, shorten

Detail = Mapping[str, Any]
"""One entry of `ValidationError.errors()`."""

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "decimal_type": "a number",
    "complex_type": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "path_type": "a path",
    "bytes_type": "a string",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "iterable_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dataclass_type": "a mapping",
    "none_required": "null",
}
_INSTANCES = {"Sequence": "a list", "Mapping": "a mapping"}
"""Abstract classes of which a file has instances."""
_PYTHON_ONLY = {"is_instance_of", "is_subclass_of", "callable_type", "is_type"}
"""Types whose values a file cannot hold."""

_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
    "multiple_of": ("a multiple of", "multiple_of"),
}
_LENGTHS = {
    "too_short": ("at least", "min_length", "item"),
    "too_long": ("at most", "max_length", "item"),
    "string_too_short": ("at least", "min_length", "character"),
    "string_too_long": ("at most", "max_length", "character"),
}


_SWITCHES = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}
_MANY_BITS = 256
"""Python refuses to write integers of thousands of digits, and nobody reads them."""


def show(value: Any) -> str:
    """Return a value as it would stand in YAML, shortened if long.

    >>> show(True), show(None), show("ten"), show([1, 2]), show({"a": 1})
    ('true', 'null', "'ten'", '[1, 2]', 'a mapping')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, int) and value.bit_length() > _MANY_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        return shorten(repr(value))
    except ValueError:  # a list with an integer of more digits than Python writes
        return a(type(value).__name__)


def is_type_error(detail: Detail) -> bool:
    """Return whether the value has the wrong type altogether, as against a wrong size."""
    return (
        detail["type"] in _EXPECTED or detail["type"] in _PYTHON_ONLY or detail["type"] in ("literal_error", "enum")
    )


def message(detail: Detail) -> str:
    """Return the message for one error that concerns a value (unknown and missing keys are not)."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx") or {}
    if kind in _EXPECTED or kind in _PYTHON_ONLY or kind in ("literal_error", "enum"):
        return mismatch([detail])
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"must be {words} {number(context[key])}, got {show(value)}"
    if kind in _LENGTHS:
        words, key, noun = _LENGTHS[kind]
        limit = context[key]
        return f"must have {words} {limit} {noun}{'' if limit == 1 else 's'}, got {show(value)}"
    if kind == "finite_number":
        return f"must be finite, got {show(value)}"
    if kind == "string_pattern_mismatch":
        return f"must match the pattern {context['pattern']}, got {show(value)}"
    if kind == "component":
        return str(context["problem"])
    if kind in ("value_error", "assertion_error"):
        words = " ".join(str(context.get("error", detail["msg"])).split())
        return words if isinstance(value, Mapping) else f"{words} (got {show(value)})"
    words = detail["msg"][:1].lower() + detail["msg"][1:]
    return f"{words.replace('input should', 'should')}, got {show(value)}"


def mismatch(details: Sequence[Detail]) -> str:
    """Return one message for a value that fits none of the types it may have."""
    value = details[0]["input"]
    nouns, choices = [], list[str]()
    for detail in details:
        if detail["type"] in ("literal_error", "enum"):
            expected = str(detail["ctx"]["expected"])
            choices += re.findall(r"'([^']*)'", expected)
            nouns.append(expected)
        elif noun := _EXPECTED.get(detail["type"]) or _INSTANCES.get((detail.get("ctx") or {}).get("class", "")):
            nouns.append(noun)
    if not nouns:
        wanted = (details[0].get("ctx") or {}).get("class", "function")
        return f"takes a {wanted}, which can only be given in Python, got {show(value)}"
    words = " or ".join(dict.fromkeys(nouns))
    verb = "must be" if choices and len(nouns) == 1 else "expected"
    near = did_you_mean(value, choices) if isinstance(value, str) else ""
    return f"{verb} {words}, got {show(value)}{near}{_remedy(nouns, value)}"


def _remedy(nouns: Sequence[str], value: Any) -> str:
    """Return how to write the value that was probably meant."""
    wants_number = bool({"an integer", "a number"} & set(nouns))
    if wants_number and isinstance(value, str):
        try:
            finite = math.isfinite(float(value))
        except ValueError:
            return ""
        if not finite:
            return ""  # it is text as it stands, and as a number it would be refused too
        return f"; write {value} without quotes"
    if "true or false" in nouns and isinstance(value, str) and value.lower() in _SWITCHES:
        return f"; write {_SWITCHES[value.lower()]}"
    if "an integer" in nouns and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if "a string" in nouns and isinstance(value, (bool, int, float)):
        return "; put it in quotes"
    return ""


def number(value: Any) -> str:
    """Return a bound as one would write it.

    >>> number(0.0), number(0.5), number(1e-8)
    ('0', '0.5', '1e-08')
    """
    return f"{value:g}" if isinstance(value, float) else str(value)
