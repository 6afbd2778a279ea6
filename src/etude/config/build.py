"""Building a component from its section: validate the arguments, add what the builder supplies, call the factory."""

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

from pydantic import ValidationError

from etude.config.aliases import settle_spellings
from etude.config.document import Document, join
from etude.config.errors import config_error, problems_in
from etude.config.registry import Section
from etude.config.selection import Selection, plain, select
from etude.config.shapes import Shape
from etude.config.signature import parameters_of
from etude.core.errors import ConfigError, EtudeError
from etude.core.spelling import shorten


def build_component(
    kind: str,
    section: Mapping[str, Any] | str,
    *,
    path: str = "",
    document: Document | None = None,
    provided: Mapping[str, Any] | None = None,
) -> Any:
    """Build the component that a section names, and any components inside it.

    Each factory gets the section's arguments and those of `provided` that its signature asks for; what the section
    says wins. Raises ConfigError with a line for every mistake, and in one line if a factory refuses its arguments.
    """
    supplied = provided or {}
    selection = select_component(kind, section, path=path, document=document, provided=supplied)
    return build_selection(selection, path=path or kind, document=document, provided=supplied)


def check_component(
    kind: str,
    section: Mapping[str, Any] | str,
    *,
    path: str = "",
    document: Document | None = None,
    provided: Collection[str] = (),
) -> dict[str, Any]:
    """Validate a section; return it complete, with canonical keys and defaults, as a file could say it."""
    result: dict[str, Any] = plain(select_component(kind, section, path=path, document=document, provided=provided))
    return result


def select_component(
    kind: str,
    section: Mapping[str, Any] | str,
    *,
    path: str = "",
    document: Document | None = None,
    provided: Collection[str] = (),
    elsewhere: Mapping[str, Shape] | None = None,
) -> Selection:
    """Validate a section and return the component with its arguments, not yet built."""
    names, path = frozenset(provided), path or kind
    hint = Annotated[Any, Section(kind)]
    settled = settle_spellings(hint, section, path, document, names)
    try:
        return select(kind, settled, names)
    except ValidationError as error:
        problems = problems_in(error, hint, settled, path=path, elsewhere=elsewhere, provided=names)
    raise config_error(problems, document)


def build_selection(
    selection: Selection,
    *,
    path: str,
    document: Document | None = None,
    provided: Mapping[str, Any] | None = None,
) -> Any:
    """Build a validated selection, components inside it first."""
    supplied = provided or {}
    factory, inside = selection.component.factory, selection.component.inside
    said = {**selection.defaults, **selection.arguments}

    def supply(place: int) -> Mapping[str, Any]:
        return supplied if inside is None else inside(said, supplied, place)

    arguments = {
        key: _build_inside(value, join(path, key), document, supply) for key, value in selection.arguments.items()
    }
    for name in parameters_of(factory)[0]:
        if name in supplied and name not in arguments:
            arguments[name] = supplied[name]
    try:
        return factory(**arguments)
    except (EtudeError, ValueError, TypeError, OverflowError) as error:
        place = (document or Document({})).place(path)
        raise _placed(error, f"{place}: {selection.component.kind} '{selection.component.name}'") from error


def _build_inside(
    value: Any, path: str, document: Document | None, supply: Callable[[int], Mapping[str, Any]], place: int = 0
) -> Any:
    """Build every selection inside an argument, in lists and mappings too; `supply` says what each is given."""
    if isinstance(value, Selection):
        return build_selection(value, path=path, document=document, provided=supply(place))
    if isinstance(value, (list, tuple)):
        built = [_build_inside(item, join(path, i), document, supply, i) for i, item in enumerate(value)]
        return value if all(new is old for new, old in zip(built, value, strict=True)) else type(value)(built)
    if isinstance(value, dict):
        return {key: _build_inside(item, join(path, key), document, supply) for key, item in value.items()}
    return value


def _placed(error: Exception, place: str) -> EtudeError:
    """Return the error of a factory in one line with its place; an EtudeError keeps its class."""
    text = shorten(" ".join(str(error).split()), 1000) or type(error).__name__
    if isinstance(error, EtudeError):
        try:
            return type(error)(f"{place}: {text}")
        except TypeError:  # a class of the user's own, made from other arguments
            pass
    return ConfigError(f"{place}: {text}")
