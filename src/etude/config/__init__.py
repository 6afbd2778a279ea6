"""Reading YAML and JSON, overrides, the registry of signatures, and error messages."""

from etude.config.registry import Component, Section, kinds, lookup, names, register

__all__ = ["Component", "Section", "kinds", "lookup", "names", "register"]
