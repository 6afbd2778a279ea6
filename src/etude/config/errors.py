"""Converts pydantic's errors to ours: one complete line per mistake in a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from etude.config.document import Document, join
from etude.config.messages import Detail, is_type_error, message, mismatch, show
from etude.config.registry import lookup, names
from etude.config.shapes import Shape, component_shape, sections_of, shape_at
from etude.core.errors import ConfigError
from etude.core.spelling import listed, nearest, shorten

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_SURE = 0.8
"""Minimum similarity of names for suggestions from other sections."""
_MAX_LINE, _MAX_LINES = 1000, 50
"""Maximum length of a message, however many mistakes a file has."""
Loc = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: the dotted path and what is wrong there."""

    path: str
    message: str


@dataclass(frozen=True, slots=True)
class _Found:
    """An error and its location in the data; `branches` lists the union members that reported it."""

    loc: Loc
    detail: Detail
    branches: tuple[tuple[Loc, str], ...] = ()


@dataclass(slots=True)
class _Context:
    """Context for the messages of one section."""

    hint: Any
    data: Any
    path: str
    elsewhere: Mapping[str, Shape]
    provided: frozenset[str]
    suggested: set[Loc] = field(default_factory=set)
    """Keys that were suggested for unknown ones: they are not reported as missing."""


def config_error(problems: Sequence[Problem], document: Document | None) -> ConfigError:
    """Return one ConfigError with a line for every problem, in the order of the file."""
    assert problems
    origin = document or Document({})

    def position(problem: Problem) -> tuple[int, int]:
        location = origin.where(problem.path)
        return (-location.layer, location.line or 0) if location else (0, 0)

    ordered = sorted(problems, key=position)
    lines = [shorten(f"{origin.place(problem.path)}: {problem.message}", _MAX_LINE) for problem in ordered]
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"{len(lines) - _MAX_LINES} more mistakes"]
    return ConfigError("\n".join(dict.fromkeys(line.removeprefix(": ") for line in lines)))


def problems_in(
    error: ValidationError,
    hint: Any,
    data: Any,
    *,
    path: str = "",
    provided: frozenset[str] = frozenset(),
) -> list[Problem]:
    """Return the mistakes found by a validation, each explained from the schema and the surrounding data.

    `hint` is the model (or other type) that `data` was validated against: for a whole file, without a path, the
    message for a misplaced key names the section where it belongs.
    """
    context = _Context(hint, data, path, {} if path else sections_of(hint, data, provided), provided)
    found = [_locate(detail, data) for detail in error.errors(include_url=False)]
    found.sort(key=lambda each: each.detail["type"] not in _UNKNOWN)  # unknown keys first: they fill `suggested`
    return _problems(found, context)


def _locate(detail: Detail, data: Any) -> _Found:
    """Follow pydantic's location through the data; a part that is not a key names a member of a union."""
    loc: list[Any] = []
    branches: dict[Loc, str] = {}  # pydantic may add several parts below a union member; the first one counts
    value = data
    parts = detail["loc"]
    for index, part in enumerate(parts):
        in_list = isinstance(value, (list, tuple)) and isinstance(part, int) and part < len(value)
        if in_list or (isinstance(value, Mapping) and part in value):
            value = value[part]
            loc.append(part)
        elif detail["type"] == "missing" and index == len(parts) - 1:
            loc.append(part)
        elif detail["type"] != "component" or part != "name":
            branches.setdefault(tuple(loc), str(part))
        elif isinstance(value, Mapping):
            loc.append(part)
    return _Found(tuple(loc), detail, tuple(branches.items()))


def _problems(found: Sequence[_Found], context: _Context, depth: int = 0) -> list[Problem]:
    """Convert errors to messages; merge those of union members, or use the member that was probably meant."""
    problems = []
    by_anchor: dict[Loc, dict[str, list[_Found]]] = {}
    for each in found:
        if len(each.branches) > depth:
            anchor, member = each.branches[depth]
            by_anchor.setdefault(anchor, {}).setdefault(member, []).append(each)
        elif text := _explain(each, context):
            problems.append(Problem(_dotted(context.path, each.loc), text))
    for anchor, members in by_anchor.items():
        errors = [each for group in members.values() for each in group]
        meant = [group for group in members.values() if any(each.loc != anchor for each in group)] or [
            [each] for each in errors if not is_type_error(each.detail)
        ]
        if meant:
            problems += _problems(min(meant, key=len), context, depth + 1)
        else:
            problems.append(Problem(_dotted(context.path, anchor), mismatch([each.detail for each in errors])))
    return problems


def _explain(found: _Found, context: _Context) -> str:
    """Return the message for one error; empty if another message covers it."""
    kind, loc = found.detail["type"], found.loc
    if kind in _UNKNOWN:
        return _unknown(loc, context)
    if kind != "missing":
        return message(found.detail)
    if loc and isinstance(loc[-1], int):
        given = found.detail["input"]
        return f"expected more values: number {loc[-1] + 1} is missing, got {show(given)}"
    return "" if loc in context.suggested else "missing; this key is required"


def _unknown(loc: Loc, context: _Context) -> str:
    key, shape = str(loc[-1]), shape_at(context.hint, loc[:-1], context.data, context.provided) or Shape()
    noun = "unknown section" if len(loc) == 1 and not context.path else "unknown key"
    if key in shape.supplied:
        return "is supplied when the component is built and cannot be given here; remove it"
    here = _dotted(context.path, loc[:-1])
    home = next((path for path, other in context.elsewhere.items() if key in other.spellings and path != here), None)
    near = nearest(key, shape.spellings, cutoff=_SURE if home else 0.6)
    inside = _inside(key, loc[:-1], shape, context) if here else ()
    if inside:
        hint = f"; did you mean '{_dotted(here, inside)}'?"
    elif near:
        context.suggested.add((*loc[:-1], shape.spellings[near]))
        hint = f"; did you mean '{near}'?" + (f" '{shorten(key)}' itself belongs to '{home}'" if home else "")
    elif home and not _of_another_component(key, shape):
        hint = f"; '{shorten(key)}' belongs to '{home}'"
    else:
        hint = _of_another_component(key, shape) or _near_elsewhere(key, here, context)
    return f"{noun}{hint} (allowed: {listed(shape.names, shorten=bool(hint))})"


def _inside(key: str, loc: Loc, shape: Shape, context: _Context) -> Loc:
    """Return the location of the key in a section inside this one, at any depth; empty if none has it."""
    for name in shape.names:
        inner = shape_at(context.hint, (*loc, name), context.data, context.provided)
        if inner is not None:
            below = (key,) if key in inner.spellings else _inside(key, (*loc, name), inner, context)
            if below:
                return (name, *below)
    return ()


def _of_another_component(key: str, shape: Shape) -> str:
    takes = [name for name in names(shape.kind) if key in component_shape(lookup(shape.kind, name)).spellings]
    return f"; it is an argument of {' and '.join(map(repr, takes[:3]))}" if takes else ""


def _near_elsewhere(key: str, here: str, context: _Context) -> str:
    others = {path: shape.names for path, shape in context.elsewhere.items() if path != here}
    close = nearest(key, {name for keys in others.values() for name in keys}, cutoff=_SURE)
    path = next((path for path, keys in others.items() if close in keys), None)
    return f"; did you mean '{path}.{close}'?" if path else ""


def _dotted(path: str, loc: Loc) -> str:
    for part in loc:
        path = join(path, part)
    return path
