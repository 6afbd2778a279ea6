"""The examples in docstrings run and give what they show."""

import doctest
import importlib
import pkgutil

import pytest

import etude

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(etude.__path__, "etude.") if module.name != "etude.__main__"
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_module(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(found) > 40
