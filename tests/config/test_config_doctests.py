"""The examples in the docstrings of the room."""

import doctest
import importlib
import pkgutil

import pytest

import etude.config

MODULES = [f"etude.config.{module.name}" for module in pkgutil.iter_modules(etude.config.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
