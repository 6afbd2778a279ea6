"""The examples in docstrings run and give what they show."""

import doctest
import importlib
import pkgutil

import pytest

import etude

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(etude.__path__, "etude.") if module.name != "etude.__main__"
)


KERNELS = {
    "etude.losses.linear_gpu",
    "etude.losses.linear_triton",
    "etude.multimodal.loss.triton_kernels",
}
"""Modules that need triton: nothing imports them where it is not installed."""


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_module(name):
    if name in KERNELS:
        pytest.importorskip("triton")
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    modules = [importlib.import_module(name) for name in MODULES if name not in KERNELS]
    found = [test for module in modules for test in finder.find(module) if test.examples]
    assert len(found) > 40
