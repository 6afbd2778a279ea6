"""The registry: components by kind and name. A component's signature is its schema.

    @register("optimizer", "adamw")
    class AdamW: ...

A YAML section names the component (`name: adamw`) and gives its arguments; there is no other description of them.
Built-in components are imported when they are named.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from etude.config.components import BY_PATH, MODULES
from etude.core.errors import ConfigError
from etude.core.spelling import shorten, suggest

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Component:
    """A registered class or function."""

    kind: str
    name: str
    factory: Callable[..., Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Aliases of its arguments in config files: {"learning_rate": "lr"}."""
    companions: Mapping[str, Any] = field(default_factory=dict)
    """Default sections for an experiment that omits them: {"data": {"name": "mnist"}}."""
    provided: tuple[str, ...] = ()
    """Arguments that only the builder supplies, such as values known from the data; files cannot set them."""
    inside: Callable[[Mapping[str, Any], Mapping[str, Any], int], Mapping[str, Any]] | None = None
    """What the builder supplies to nested components, given this one's arguments (with defaults), what was supplied
    to this one, and the index in a list; by default the same as to this one."""
    prepare: Callable[[Path, Mapping[str, Any], Mapping[str, Any], bool], Any] | None = None
    """Data sets: prepares another file as in training, without the training data. It is called with the path, the
    `facts` of the training's `DataSplits`, the arguments of the section, and whether labels are read, and returns
    `OtherData`."""
    check_installed: Callable[[Mapping[str, Any]], object] | None = None
    """Data sets: raises ConfigError or DataError if a package is missing that these arguments need."""


@dataclass(frozen=True, slots=True)
class Section:
    """Marks an argument that is itself a component: `Annotated[Schedule, Section("scheduler")]`."""

    kind: str
    provided: frozenset[str] = frozenset()
    """Arguments that its builder supplies."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Let pydantic validate the argument as a section; imported late to keep the registry light."""
        from etude.config.selection import section_core_schema

        return section_core_schema(self)

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        """Placeholder for the kind; `json_schema` inserts its components here."""
        return {"x-section": self.kind}


_COMPONENTS: dict[str, dict[str, Component]] = {}


def register(
    kind: str,
    name: str,
    *,
    aliases: Mapping[str, str] | None = None,
    companions: Mapping[str, Any] | None = None,
    provided: tuple[str, ...] = (),
    inside: Callable[[Mapping[str, Any], Mapping[str, Any], int], Mapping[str, Any]] | None = None,
    prepare: Callable[[Path, Mapping[str, Any], Mapping[str, Any], bool], Any] | None = None,
    check_installed: Callable[[Mapping[str, Any]], object] | None = None,
) -> Callable[[T], T]:
    """Register a class or function under `name`; config files then use it by that name.

    Raises ConfigError if another component already has the name.
    """

    def add(factory: T) -> T:
        if _our_modules(kind).get(name, factory.__module__) != factory.__module__:
            _find(kind, name)  # import ours first, so that a conflict is reported
        known = _COMPONENTS.setdefault(kind, {})
        previous = known.get(name)
        if previous is not None and _origin(previous.factory) != _origin(factory):
            raise ConfigError(
                f"{kind} '{name}' is registered twice: by {_origin(previous.factory)} and by {_origin(factory)}; "
                "rename one of them"
            )
        known[name] = Component(
            kind,
            name,
            factory,
            dict(aliases or {}),
            dict(companions or {}),
            provided,
            inside,
            prepare,
            check_installed,
        )
        return factory

    return add


def lookup(kind: str, name: str) -> Component:
    """Return the component, or raise ConfigError with the closest name and all available names."""
    component = _find(kind, name)
    if component is None:
        raise ConfigError(f"unknown {kind} '{shorten(name)}'{suggest(name, names(kind))}")
    return component


def names(kind: str) -> list[str]:
    """Return the names of a kind's components, sorted."""
    return sorted({*_COMPONENTS.get(kind, {}), *_our_modules(kind)})


def kinds() -> list[str]:
    """Return the kinds that have at least one component, sorted."""
    return sorted(kind for kind in {*_COMPONENTS, *MODULES} if names(kind))


def _find(kind: str, name: str) -> Component | None:
    if name not in _COMPONENTS.get(kind, {}) and (module := _our_modules(kind).get(name)):
        import_module(module)  # importing it registers the component
    found = _COMPONENTS.get(kind, {}).get(name)
    if found is None and "." in name and kind in BY_PATH:
        return Component(kind, name, import_module(f"etude.{BY_PATH[kind]}").find(name))
    return found


def _our_modules(kind: str) -> dict[str, str]:
    """Return the modules of the built-in components of a kind, by name, if their packages exist."""
    ours = MODULES.get(kind, {}).items()
    return {name: f"etude.{module}" for name, module in ours if _is_there(module.partition(".")[0])}


@cache
def _is_there(room: str) -> bool:
    spec = find_spec(f"etude.{room}")
    return spec is not None and spec.origin is not None  # a folder without code has no origin


def _origin(factory: Callable[..., Any]) -> str:
    return f"{factory.__module__}.{getattr(factory, '__qualname__', type(factory).__qualname__)}"
