"""Validating sections and whole files against their schemas."""

import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from etude.config.aliases import canonical_keys, settle_spellings
from etude.config.document import Document
from etude.config.errors import Problem, config_error, problems_in
from etude.config.messages import show
from etude.config.section_model import SectionModel
from etude.config.selection import SuppliedSection, field_values
from etude.config.shapes import Shape
from etude.config.signature import Parameter, make_model

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class SectionSpec:
    """What a top-level key of an experiment file holds: a component, a list of components, or values of a model."""

    kind: str | None = None
    """The kind of component; None for a section that is described by `model`."""
    model: Any = None
    """A `SectionModel`, or any other type (`list[str]`)."""
    many: bool = False
    """Whether the section is a list of components."""
    required: bool = False
    """Whether the file must have the section. One that is not required may be `null`."""
    provided: Collection[str] = ()
    """Arguments that are supplied when the component is built."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of the keys of a fixed section: {"log_every": "log_interval"}."""
    description: str = ""

    @property
    def is_fixed(self) -> bool:
        """Whether the section is a model of its own, whose defaults hold if the file leaves it out."""
        return isinstance(self.model, type) and issubclass(self.model, BaseModel)


def validate_section(
    model: type[Model],
    data: Mapping[str, Any] | None,
    *,
    path: str = "",
    document: Document | None = None,
    elsewhere: Mapping[str, Shape] | None = None,
    provided: Collection[str] = (),
) -> Model:
    """Validate one section against its model; raise ConfigError with a line for every mistake.

    `elsewhere` holds the keys of other sections (see `sections_of`), to send misplaced keys home; a whole file, with
    an empty path, needs none. A section that is empty in the file (None) is validated as one without keys.
    """
    names = frozenset(provided)
    if data is not None and not isinstance(data, Mapping):
        raise config_error([Problem(path, f"expected a mapping, got {show(data)}")], document)
    settled = settle_spellings(model, data or {}, path, document, names)
    try:
        return model.model_validate(settled, context={"provided": names})
    except ValidationError as error:
        problems = problems_in(error, model, settled, path=path, elsewhere=elsewhere, provided=names)
    raise config_error(problems, document)


def validate_document(document: Document, sections: Mapping[str, SectionSpec]) -> dict[str, Any]:
    """Validate a whole file; raise ConfigError with a line for every mistake in it.

    Returns the sections that the file has: a `Selection` (or a list of them) for components, an instance for models,
    None for one that is turned off with `null`. A fixed section that the file leaves out has its defaults.
    """
    root = root_model(sections)
    data = dict(document.data)
    for name, spec in sections.items():
        if spec.is_fixed and data.get(name) is None:
            data[name] = {}
        if spec.aliases and isinstance(data.get(name), Mapping):
            data[name] = canonical_keys(data[name], spec.aliases, name, document)
    validated = validate_section(root, data, document=document)
    return {name: value for name, value in field_values(validated).items() if name in data}


def root_model(sections: Mapping[str, SectionSpec]) -> type[SectionModel]:
    """Return the model of an experiment file with these sections."""
    fields: dict[str, Parameter] = {}
    for name, spec in sections.items():
        hint: Any = spec.model
        if spec.kind is not None:
            hint = Annotated[Any, SuppliedSection(spec.kind, frozenset(spec.provided))]
        if spec.many:
            hint = types.GenericAlias(list, (hint,))
        optional = not spec.required and not spec.is_fixed
        fields[name] = (hint | None, None) if optional else (hint, PydanticUndefined)
    return make_model("experiment", fields, {})
