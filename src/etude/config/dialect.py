"""The YAML dialect of configs: YAML 1.2 numbers, no duplicate keys, and a line number for every value.

PyYAML follows YAML 1.1, which reads `1e-3` as a string, `010` as 8, `1:30` as 90, `no` as false. The loader here uses
the core schema of YAML 1.2, where these are 0.001, 10 and two strings; 1_000 is a thousand in both. The dumper quotes
strings that either version would read as something else, so that they read back unchanged.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

from etude.config.document import join
from etude.core.errors import ConfigError
from etude.core.spelling import shorten

_PREFIX = "tag:yaml.org,2002:"
_DIGITS = "[0-9]+(?:_[0-9]+)*"
_CORE = {
    "null": (r"~|null|Null|NULL|", "~nN"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (rf"[-+]?{_DIGITS}|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        rf"[-+]?(\.[0-9]+|{_DIGITS}(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "merge": (r"<<", "<"),
}
"""Plain scalars that are not strings: a pattern for each tag, and the characters it may begin with."""
_PATTERNS = {tag: re.compile(f"({pattern})\\Z") for tag, (pattern, _) in _CORE.items()}

MAX_VALUES, MAX_DEPTH = 100_000, 100
"""Limit on values: with aliases a short file can expand to billions of values, or refer to itself."""


@functools.cache
def _loader() -> Any:
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader exists if PyYAML was built with it
    loader: Any = type("ConfigLoader", (base,), {"yaml_implicit_resolvers": {}})
    for tag, (_, first) in _CORE.items():
        loader.add_implicit_resolver(_PREFIX + tag, _PATTERNS[tag], ["", *first] if tag == "null" else list(first))
    loader.add_constructor(f"{_PREFIX}int", lambda _loader, node: _integer(node.value))
    loader.add_constructor(f"{_PREFIX}float", lambda _loader, node: _float(node.value))
    return loader


@functools.cache
def _dumper() -> Any:
    import yaml

    base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    dumper: Any = type("ConfigDumper", (base,), {"ignore_aliases": lambda _self, _data: True})
    dumper.add_representer(str, _represent_text)
    for tag in ("int", "float"):
        dumper.add_implicit_resolver(_PREFIX + tag, _PATTERNS[tag], list(_CORE[tag][1]))
    return dumper


def _integer(text: str) -> int:
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _float(text: str) -> float:
    return float(text.replace(".", "") if text[-1] in "fFnN" else text)


def _represent_text(dumper: Any, text: str) -> Any:
    # PyYAML writes these Unicode line breaks unescaped in single quotes, where reading folds them into spaces.
    style = '"' if any(character in text for character in "\x85\u2028\u2029") else None
    return dumper.represent_scalar(f"{_PREFIX}str", text, style=style)


def dump_yaml(data: Any, *, flow: bool = False) -> str:
    r"""Return `data` as YAML text that reads back the same; `flow` puts it on one line.

    >>> dump_yaml({"lr": 0.001, "tag": "1e-3"})
    "lr: 0.001\ntag: '1e-3'\n"
    """
    import yaml

    width = 2**30 if flow else 100
    text: str = yaml.dump(
        data, Dumper=_dumper(), sort_keys=False, default_flow_style=flow, allow_unicode=True, width=width
    )
    return text.removesuffix("\n...\n") if flow else text


def parse_yaml(text: str, file: str) -> tuple[Any, dict[str, int]]:
    """Return the data of a YAML text and the line of every dotted path; raise a one-line ConfigError.

    >>> parse_yaml("optimizer:\\n  lr: 3e-4\\n", "x.yaml")
    ({'optimizer': {'lr': 0.0003}}, {'optimizer': 1, 'optimizer.lr': 2})
    """
    import yaml

    try:
        node = yaml.compose(text, _loader())
        if node is None:
            return None, {}
        _check_keys(node, file)
        data = _loader()("").construct_document(node)
        return data, dict(_lines(node))  # after construction the node includes the keys of `<<`
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_message(error, text, file)) from error
    except ConfigError:
        raise
    except (
        ValueError,
        KeyError,
    ) as error:  # a number with thousands of digits, invalid Unicode, `!!bool maybe`
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: values are nested too deeply or refer to themselves; flatten them") from error


def parse_value(text: str) -> Any:
    """Return the value of an override: a YAML scalar, or a list or mapping in brackets; anything else is a string.

    >>> parse_value("3e-4"), parse_value("[1, 2]"), parse_value("null"), parse_value("a: b")
    (0.0003, [1, 2], None, 'a: b')
    """
    import yaml

    bracketed = text.lstrip().startswith(("[", "{", '"', "'"))
    try:
        node = yaml.compose(text, _loader())
        if node is not None and (bracketed or isinstance(node, yaml.ScalarNode)):
            _check_keys(node, "")
            return _loader()("").construct_document(node)
    except ConfigError:
        raise
    except (yaml.YAMLError, RecursionError, ValueError, KeyError) as error:
        if bracketed:
            raise ConfigError(f"not valid YAML: {getattr(error, 'problem', None) or error}") from error
    return text.strip()


def _check_keys(root: Any, file: str) -> None:
    """Raise ConfigError for a duplicate key, and for `{name:sgd}`, which YAML reads as a key without a value."""
    for node, _ in _walk(root):
        first: dict[str, int] = {}
        for key, value in node.value if node.id == "mapping" else ():
            name, line = str(key.value), key.start_mark.line + 1
            place = f"{file}:{line}: " if file else ""
            if name in first and name != "<<":
                raise ConfigError(
                    f"{place}key '{shorten(name)}' is given twice, first on line {first[name]}; keep one"
                )
            plain = key.id == value.id == "scalar" and not (key.style or value.value or value.style)
            if node.flow_style and ":" in name and plain:
                raise ConfigError(f"{place}write a space after the colon in '{shorten(name)}'")
            first[name] = line


def _lines(root: Any) -> Iterator[tuple[str, int]]:
    """Yield every dotted path with its line, counted from 1."""
    for node, path in _walk(root):
        if node.id == "mapping":
            yield from ((join(path, key.value), key.start_mark.line + 1) for key, _ in node.value)
        elif node.id == "sequence":
            yield from ((join(path, i), item.start_mark.line + 1) for i, item in enumerate(node.value))


def _walk(root: Any) -> Iterator[tuple[Any, str]]:
    """Yield each node with its path; an aliased node once per alias."""
    pending, count = [(root, "", 0)], 0
    while pending:
        node, path, depth = pending.pop()
        count += 1
        if count > MAX_VALUES or depth > MAX_DEPTH:
            raise RecursionError("values are nested too deeply or refer to themselves; flatten them")
        yield node, path
        if node.id == "mapping":
            pending += [(value, join(path, key.value), depth + 1) for key, value in node.value]
        elif node.id == "sequence":
            pending += [(value, join(path, i), depth + 1) for i, value in enumerate(node.value)]


def _syntax_message(error: Any, text: str, file: str) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    problem = " ".join(str(problem).split())
    if mark is None:
        return f"{file}: not valid YAML: {problem}"
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in line[: len(line) - len(line.lstrip())] or "'\\t'" in problem:
        problem = "tabs are not allowed; indent with spaces"
    return f"{file}:{mark.line + 1}:{mark.column + 1}: not valid YAML: {problem}"
