"""Validating sections and whole files against their schemas, and building the components they name."""

import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from etude.config.document import Document, join
from etude.config.errors import Problem, config_error, problems_in
from etude.config.messages import show
from etude.config.registry import Section
from etude.config.selection import Selection, field_values, select
from etude.config.shapes import canonical_sections
from etude.config.signature import Parameter, SectionModel, make_model, parameters_of
from etude.core.errors import ConfigError, EtudeError
from etude.core.spelling import shorten

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class SectionSpec:
    """What a top-level key of an experiment file holds: a component, several components, or fields of a model."""

    kind: str | None = None
    """The kind of component; None for a section described by `model`."""
    model: Any = None
    """A `SectionModel`, or any other type (`list[str]`)."""
    many: bool = False
    """Whether the section is a list of components."""
    required: bool = False
    """Whether the file must have the section. One that is not required may be `null`."""
    provided: Collection[str] = ()
    """Arguments that are supplied when the component is built."""
    description: str = ""

    @property
    def is_fixed(self) -> bool:
        """Whether the section has its own model, whose defaults apply if the file omits it."""
        return isinstance(self.model, type) and issubclass(self.model, BaseModel)


def validate_section(
    model: type[Model],
    data: Mapping[str, Any] | None,
    *,
    path: str = "",
    document: Document | None = None,
    provided: Collection[str] = (),
) -> Model:
    """Validate one section against its model; raise ConfigError with a line for every mistake.

    A section that is empty in the file (None) is validated as one without keys.
    """
    names = frozenset(provided)
    if data is not None and not isinstance(data, Mapping):
        raise config_error([Problem(path, f"expected a mapping, got {show(data)}")], document)
    section = canonical_sections(model, data or {}, path, document, names)
    try:
        return model.model_validate(section, context={"provided": names})
    except ValidationError as error:
        raise config_error(problems_in(error, model, section, path=path, provided=names), document) from None


def validate_document(document: Document, sections: Mapping[str, SectionSpec]) -> dict[str, Any]:
    """Validate a whole file; raise ConfigError with a line for every mistake in it.

    Returns the sections of the file: a `Selection` (or a list of them) for components, an instance for models, None
    for one disabled with `null`. A fixed section that the file omits has its defaults.
    """
    root = root_model(sections)
    data = dict(document.data)
    for name, spec in sections.items():
        if spec.is_fixed and data.get(name) is None:
            data[name] = {}
    validated = validate_section(root, data, document=document)
    return {name: value for name, value in field_values(validated).items() if name in data}


def root_model(sections: Mapping[str, SectionSpec]) -> type[SectionModel]:
    """Return the model of an experiment file with these sections."""
    fields: dict[str, Parameter] = {}
    for name, spec in sections.items():
        hint: Any = spec.model
        if spec.kind is not None:
            hint = Annotated[Any, Section(spec.kind, frozenset(spec.provided))]
        if spec.many:
            hint = types.GenericAlias(list, (hint,))
        optional = not spec.required and not spec.is_fixed
        fields[name] = (hint | None, None) if optional else (hint, PydanticUndefined)
    return make_model("experiment", fields, {})


def build_component(
    kind: str,
    section: Mapping[str, Any] | str,
    *,
    path: str = "",
    document: Document | None = None,
    provided: Mapping[str, Any] | None = None,
) -> Any:
    """Build the component that a section names, and any components inside it.

    Each factory gets the section's arguments, and those of `provided` that its signature has; the section takes
    precedence. Raises ConfigError with a line for every mistake, or one line if a factory refuses its arguments.
    """
    supplied = provided or {}
    selection = select_component(kind, section, path=path, document=document, provided=supplied)
    return build_selection(selection, path=path or kind, document=document, provided=supplied)


def select_component(
    kind: str,
    section: Mapping[str, Any] | str,
    *,
    path: str = "",
    document: Document | None = None,
    provided: Collection[str] = (),
) -> Selection:
    """Validate a section and return the component with its arguments, not yet built."""
    names, path = frozenset(provided), path or kind
    hint = Annotated[Any, Section(kind)]
    section = canonical_sections(hint, section, path, document, names)
    try:
        return select(kind, section, names)
    except ValidationError as error:
        raise config_error(problems_in(error, hint, section, path=path, provided=names), document) from None


def build_selection(
    selection: Selection,
    *,
    path: str,
    document: Document | None = None,
    provided: Mapping[str, Any] | None = None,
) -> Any:
    """Build a validated selection, nested components first."""
    supplied = provided or {}
    factory, inside = selection.component.factory, selection.component.inside
    said = {**selection.defaults, **selection.arguments}

    def supply(place: int) -> Mapping[str, Any]:
        return supplied if inside is None else inside(said, supplied, place)

    arguments = {
        key: _build_inside(value, join(path, key), document, supply) for key, value in selection.arguments.items()
    }
    place = f"{(document or Document({})).place(path)}: {selection.component.kind} '{selection.component.name}'"
    for name, (_, default) in parameters_of(factory)[0].items():
        # The config of a run folder holds every default: a null that is the default counts as not given.
        is_given = name in arguments and (arguments[name] is not None or default is not None)
        if name in supplied and not is_given:
            arguments[name] = supplied[name]
        elif name not in arguments and default is PydanticUndefined:
            raise ConfigError(f"{place} needs {name}, which is not known here; add it")
    try:
        return factory(**arguments)
    except (EtudeError, ValueError, TypeError, OverflowError) as error:
        raise _placed(error, place) from error


def check_installed(selection: Selection, *, path: str, document: Document) -> None:
    """Raise ConfigError or DataError if a package is missing that a component or one inside it needs."""
    component = selection.component
    if component.check_installed is not None:
        try:
            component.check_installed({**selection.defaults, **selection.arguments})
        except EtudeError as error:
            raise _placed(error, f"{document.place(path)}: {component.kind} '{component.name}'") from error
    for key, value in selection.arguments.items():
        inside = value.items() if isinstance(value, dict) else [("", value)]
        for name, one in inside:
            if isinstance(one, Selection):
                check_installed(
                    one, path=join(path, key) if name == "" else join(join(path, key), name), document=document
                )


def _build_inside(
    value: Any, path: str, document: Document | None, supply: Callable[[int], Mapping[str, Any]], place: int = 0
) -> Any:
    """Build every selection inside an argument, in lists and mappings too; `supply` gives each its values."""
    if isinstance(value, Selection):
        return build_selection(value, path=path, document=document, provided=supply(place))
    if isinstance(value, (list, tuple)):
        built = [_build_inside(item, join(path, i), document, supply, i) for i, item in enumerate(value)]
        return value if all(new is old for new, old in zip(built, value, strict=True)) else type(value)(built)
    if isinstance(value, dict):
        return {key: _build_inside(item, join(path, key), document, supply) for key, item in value.items()}
    return value


def _placed(error: Exception, place: str) -> EtudeError:
    """Return the error of a factory in one line with its location; an EtudeError keeps its class."""
    text = shorten(" ".join(str(error).split()), 1000) or type(error).__name__
    if isinstance(error, EtudeError):
        try:
            return type(error)(f"{place}: {text}")
        except TypeError:  # a user-defined error class with another constructor
            pass
    return ConfigError(f"{place}: {text}")
