"""Reading YAML and JSON, overrides, the registry of signatures, and error messages.

Many modules import only the registry from here, so everything else loads on first use: pydantic and YAML are not
imported until a config is read.
"""

from typing import TYPE_CHECKING

from etude.config.registry import Section, kinds, lookup, names, register
from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.config.dialect import dump_yaml
    from etude.config.document import Document
    from etude.config.errors import Problem, config_error
    from etude.config.feature import Feature, RunDraft
    from etude.config.overrides import apply_overrides
    from etude.config.read import find_config, list_experiments, read_config
    from etude.config.schema import SectionSpec, build_component, build_selection
    from etude.config.selection import Selection
    from etude.config.signature import SectionModel

__all__ = [
    "Document",
    "Feature",
    "Problem",
    "RunDraft",
    "Section",
    "SectionModel",
    "SectionSpec",
    "Selection",
    "apply_overrides",
    "build_component",
    "build_selection",
    "config_error",
    "dump_yaml",
    "find_config",
    "kinds",
    "list_experiments",
    "lookup",
    "names",
    "read_config",
    "register",
]

__getattr__ = load_late(__name__, __file__)
