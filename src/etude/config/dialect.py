"""YAML as configs use it: `1e-3` is a number, a key may stand only once, and every value has its line.

PyYAML follows YAML 1.1, which reads `1e-3` and `3e-4` as strings. The loader here also takes the float syntax of
YAML 1.2, and the dumper quotes strings that look like such numbers, so that what is written reads back the same.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

from etude.config.document import join
from etude.core.errors import ConfigError

_FLOAT_12 = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_MAX_VALUES = 100_000
"""Aliases can make a short file stand for billions of values; no config is this large."""
_MAX_DEPTH = 100


@functools.cache
def _loader() -> Any:
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader exists where PyYAML was built with it
    loader: Any = type("ConfigLoader", (base,), {})
    loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in base.yaml_implicit_resolvers.items()
    }  # a date stays the text that was written: JSON has no dates either
    loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT_12, list("-+.0123456789"))
    return loader


@functools.cache
def _dumper() -> Any:
    import yaml

    dumper: Any = type("ConfigDumper", (yaml.SafeDumper,), {"ignore_aliases": lambda _self, _data: True})
    dumper.add_representer(str, _represent_text)
    dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT_12, list("-+.0123456789"))
    return dumper


def _represent_text(dumper: Any, text: str) -> Any:
    # PyYAML writes these line breaks of Unicode raw between single quotes, where reading folds them into spaces.
    style = '"' if any(character in text for character in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


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
    """Return the data of a YAML text and the line of every dotted path; raise ConfigError in one line.

    >>> parse_yaml("optimizer:\\n  lr: 3e-4\\n", "x.yaml")
    ({'optimizer': {'lr': 0.0003}}, {'optimizer': 1, 'optimizer.lr': 2})
    """
    import yaml

    try:
        loader = _loader()(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, {}
            _check_keys(node, file)
            data = loader.construct_document(node)
        finally:
            loader.dispose()
        return data, dict(_lines(node))
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_message(error, text, file)) from error
    except RecursionError as error:
        raise ConfigError(f"{file}: values are nested too deeply, or refer to themselves") from error


def parse_value(text: str) -> Any:
    """Return the value of an override: a YAML scalar, or a list or mapping in brackets; other text is a string.

    >>> parse_value("3e-4"), parse_value("[1, 2]"), parse_value("null"), parse_value("a: b")
    (0.0003, [1, 2], None, 'a: b')
    """
    import yaml

    bracketed = text.lstrip().startswith(("[", "{", '"', "'"))
    loader = None
    try:
        loader = _loader()(text)
        node = loader.get_single_node()
        if node is not None and (bracketed or isinstance(node, yaml.ScalarNode)):
            _check_keys(node, "")
            _check_colons(node)
            return loader.construct_document(node)
    except (yaml.YAMLError, RecursionError) as error:
        if bracketed:
            raise ConfigError(f"not valid YAML: {getattr(error, 'problem', None) or error}") from error
    finally:
        if loader is not None:
            loader.dispose()
    return text.strip()


def _check_keys(root: Any, file: str) -> None:
    """Raise on keys that stand twice in one mapping, and on keys that YAML reads as something else than text."""
    for node, _ in _walk(root, "", once=True):
        if node.id != "mapping":
            continue
        first: dict[tuple[str, str], int] = {}
        for key, _value in node.value:
            line = key.start_mark.line + 1
            place = f"{file}:{line}: " if file else ""
            if key.id != "scalar":
                raise ConfigError(f"{place}a key must be a name, found a {key.id}")
            if key.tag.endswith((":bool", ":null")):
                raise ConfigError(f"{place}the key {key.value!r} reads as {key.tag[18:]} in YAML; put it in quotes")
            if (key.tag, key.value) in first:
                raise ConfigError(
                    f"{place}key '{key.value}' is given twice, first on line {first[key.tag, key.value]}; keep one"
                )
            if not key.tag.endswith(":merge"):
                first[key.tag, key.value] = line


def _check_colons(root: Any) -> None:
    """Raise on `{name:sgd}`: without a space after the colon YAML takes it for one key without a value."""
    for node, _ in _walk(root, "", once=True):
        for key, value in node.value if node.id == "mapping" else ():
            if ":" in key.value and not key.style and value.value == "" and not value.style:
                raise ConfigError(f"write a space after the colon in '{key.value}'")


def _lines(root: Any) -> Iterator[tuple[str, int]]:
    """Yield every dotted path with its line, counted from 1."""
    for node, path in _walk(root, ""):
        if node.id == "mapping":
            yield from ((join(path, key.value), key.start_mark.line + 1) for key, _ in node.value)
        elif node.id == "sequence":
            yield from ((join(path, i), item.start_mark.line + 1) for i, item in enumerate(node.value))


def _walk(root: Any, path: str, *, once: bool = False) -> Iterator[tuple[Any, str]]:
    """Yield each node with its path; `once` visits a node that several aliases share a single time."""
    pending, seen, count = [(root, path, 0)], set[int](), 0
    while pending:
        node, path, depth = pending.pop()
        if once and id(node) in seen:
            continue
        seen.add(id(node))
        count += 1
        if count > _MAX_VALUES or depth > _MAX_DEPTH:
            raise RecursionError
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
        problem = "a tab where YAML wants spaces; indent with spaces"
    return f"{file}:{mark.line + 1}:{mark.column + 1}: not valid YAML: {problem}"
