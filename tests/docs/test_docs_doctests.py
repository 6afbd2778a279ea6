"""The examples in docstrings run and give what they show."""

import doctest
import importlib.util
import pkgutil
from pathlib import Path

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


def has_examples(name):
    spec = importlib.util.find_spec(name)
    return name in KERNELS or ">>>" in Path(spec.origin).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*filter(has_examples, MODULES)])
def test_examples_of_module(name):
    if name in KERNELS:
        pytest.importorskip("triton")
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_all_modules_are_imported_and_there_are_examples():
    finder = doctest.DocTestFinder()
    modules = [importlib.import_module(name) for name in MODULES if name not in KERNELS]
    found = [test for module in modules for test in finder.find(module) if test.examples]
    assert len(found) > 40
