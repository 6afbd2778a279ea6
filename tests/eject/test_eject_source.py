"""Copied source: everything that a definition uses comes along, nothing of the library does, and the text runs."""

import importlib
import sys
import textwrap

import pytest

from etude.core import ConfigError
from etude.eject.source import Sources, import_lines


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a package of the user, whose files are the arguments, and return one of its modules."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def write(**files):
        folder = tmp_path / "own_package"
        folder.mkdir()
        for name, text in {"__init__": "", **files}.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(text))
        return importlib.import_module("own_package.main")

    yield write
    for name in set(sys.modules) - known:
        if name.startswith("own_package"):
            del sys.modules[name]


def copied(*values):
    """The names that the copied text defines, and the text."""
    sources = Sources()
    for value in values:
        sources.add(value)
    text = f"{import_lines(sources.imports)}\n\n{sources.text()}\n"
    names = {}
    exec(compile(text, "copied.py", "exec"), names)
    return names, text


def test_constants_helpers_bases_and_decorators(package):
    module = package(
        helpers="""
            import math
            from dataclasses import dataclass

            LOW, HIGH = 2, 3
            if LOW > 5:
                SIDE = "low"
            else:
                SIDE = "high"
            _FACTOR = math.pi

            @dataclass
            class Box:
                width: int = LOW

            def area(box):
                return box.width * HIGH * _FACTOR
            """,
        main="""
            from .helpers import SIDE, Box, area

            class Base:
                def name(self):
                    return SIDE

            class Model(Base):
                def __init__(self, width=4):
                    self.area = area(Box(width))

            UNUSED = "unused"
            """,
    )
    names, text = copied(module.Model)
    assert names["Model"]().area == module.Model().area
    assert names["Model"]().name() == "high"
    assert text.count("LOW, HIGH = 2, 3") == 1
    assert "own_package" not in text
    assert "UNUSED" not in text


def test_what_belongs_to_the_library_is_left_out(package):
    module = package(
        main='''
            from typing import Annotated

            from annotated_types import Ge
            from torch import nn

            import etude
            from etude.core import ConfigError
            from etude.core.arguments import checked

            Size = Annotated[int, Ge(1)]

            @etude.register("model", "own_package_net")
            class Net(nn.Module):
                """A net.

                >>> Net(3)
                """

                @checked
                def __init__(self, width: Size, depth: Annotated[int, Ge(0)] = 1) -> None:
                    super().__init__()
                    if width > 9:
                        raise ConfigError(f"{width} is too wide")

            class ConfigErrors(Exception):
                pass
            '''
    )
    names, text = copied(module.Net)
    assert "etude" not in text
    assert "width: int, depth: int = 1" in text
    assert ">>>" not in text
    with pytest.raises(ValueError, match="10 is too wide"):
        names["Net"](10)


def test_an_error_of_the_user_with_the_name_of_one_of_ours_is_kept(package):
    module = package(
        main="""
            class ConfigError(Exception):
                pass

            def fail():
                raise ConfigError("mine")
            """
    )
    names, _ = copied(module.fail)
    with pytest.raises(names["ConfigError"], match="mine"):
        names["fail"]()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"other": "def f(): ...", "main": "from own_package.other import f as g\ndef h(): return g()"}, "'g'"),
        (
            {"other": "X = 1", "main": "import own_package.other\ndef h(): return own_package.other.X"},
            "own_package.other",
        ),
        (
            {"other": "X = 2\ndef f(): return X", "main": "from .other import f\nX = 1\ndef h(): return f() + X"},
            "'X' is defined in",
        ),
    ],
    ids=["other name", "module", "two meanings"],
)
def test_what_cannot_be_copied(package, files, words):
    module = package(**files)
    with pytest.raises(ConfigError, match=words):
        copied(module.h)


def test_names_of_the_file_itself_are_refused(package):
    sources = Sources()
    sources.add(package(main="def train(): ...").train)
    with pytest.raises(ConfigError, match="'train'"):
        sources.check_names(["train"])


def test_closures_keep_their_values():
    def make(factor, inner):
        def rate(step):
            """The docstring."""
            if step > 3:
                return factor
            return inner(step)

        return rate

    sources = Sources()
    sources.add_closure(make(0.5, make(0.25, lambda step: step / 4)), "lr_factor")
    names = {}
    exec(sources.text(), names)
    assert [names["lr_factor"](step) for step in (1, 3, 4)] == [0.25, 0.75, 0.5]
