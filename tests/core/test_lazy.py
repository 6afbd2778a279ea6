"""Packages load their names late: each name that they list is there, and no other."""

import ast
import pkgutil
from importlib import import_module
from pathlib import Path

import pytest

import etude
from forked_python import run_python

PACKAGES = [
    "etude",
    *(one.name for one in pkgutil.walk_packages(etude.__path__, "etude.") if one.ispkg),
]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_of_a_package_is_there(package):
    module = import_module(package)
    for name in getattr(module, "__all__", ()):
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = module.nothing_of_that_name


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_imported_for_type_checkers_is_what_is_listed(package):
    module = import_module(package)
    body = ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body
    late = [one for node in body if isinstance(node, ast.If) for one in ast.walk(node)]
    aliases = [alias for one in late if isinstance(one, ast.ImportFrom) for alias in one.names]
    # `import X as X` exports a name that is not in the list.
    assert {one.name for one in aliases if one.asname is None} <= set(getattr(module, "__all__", ()))
    assert all(one.asname in (None, one.name) for one in aliases)


def test_a_name_brings_only_its_module():
    code = (
        "import sys; from etude.models import LeNet5; print(*(one for one in sys.modules if 'etude.models' in one))"
    )
    done = run_python("-c", code)
    assert "etude.models.lenet5" in done.stdout.split()
    assert "etude.models.transformer" not in done.stdout.split()
