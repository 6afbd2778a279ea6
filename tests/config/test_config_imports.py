"""A user's own modules: found beside the config, registered once, explained when they fail."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.config import lookup, names, read_config
from etude.config.imports import import_user_modules
from etude.core.errors import ConfigError

REGISTERS = (
    'from etude.config import register\n@register("model", "{name}")\ndef make(width: int = 1):\n    return width\n'
)


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_file_beside_the_config_and_one_beside_the_experiment(write: Any) -> None:
    write("exp/configs/near_by.py", REGISTERS.format(name="near"))
    write("exp/own_code.py", REGISTERS.format(name="own"))
    write("here_now.py", REGISTERS.format(name="here"))
    import_user_modules(["./near_by.py", "../own_code.py", "here_now.py"], Path("exp/configs"))
    assert names("model") == ["here", "near", "own"]
    assert lookup("model", "own").factory() == 1


def test_dotted_names_are_found_beside_the_config_above_configs_and_here(write: Any) -> None:
    write("exp/configs/beside_mod.py", REGISTERS.format(name="beside"))
    write("exp/above_mod.py", REGISTERS.format(name="above"))
    write("own_package/__init__.py", "")
    write("own_package/part.py", REGISTERS.format(name="part"))
    import_user_modules(["beside_mod", "above_mod", "own_package.part"], Path("exp/configs"))
    assert names("model") == ["above", "beside", "part"]


def test_importing_again_is_harmless(write: Any) -> None:
    write("once_only.py", REGISTERS.format(name="once") + "COUNT = []\n")
    for _ in range(3):
        import_user_modules(["once_only.py", "./once_only.py"], Path())
    module = lookup("model", "once").factory.__module__
    assert module == "once_only"
    sys.modules[module].COUNT.append(1)
    import_user_modules(["once_only", "once_only.py"], Path())
    assert sys.modules[module].COUNT == [1]


def test_files_of_one_name_in_two_folders_are_two_modules(write: Any) -> None:
    write("a/twin_mod.py", REGISTERS.format(name="a"))
    write("b/twin_mod.py", REGISTERS.format(name="b"))
    write("c/json.py", REGISTERS.format(name="c"))
    write("d/not-a-name.py", REGISTERS.format(name="d"))
    import_user_modules(["a/twin_mod.py", "b/twin_mod.py", "c/json.py", "d/not-a-name.py", "b/twin_mod.py"], Path())
    assert names("model") == ["a", "b", "c", "d"]
    assert sys.modules["json"].loads("1") == 1


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (
            "no_such_thing.at_all",
            "imports.0: cannot import 'no_such_thing.at_all': No module named 'no_such_thing'; looked in",
        ),
        (
            "broken_mod",
            "imports.0: cannot import 'broken_mod': No module named 'not_there' (raised while importing it)",
        ),
        ("./broken_mod.py", "imports.0: cannot import './broken_mod.py': No module named 'not_there'"),
        ("wrong_name.py", "imports.0: cannot import 'wrong_name.py': cannot import name 'nothing' from 'json'"),
        ("syntax_mod.py", "imports.0: cannot import 'syntax_mod.py': syntax_mod.py:2: "),
        ("./brokn_mod.py", "imports.0: no file 'brokn_mod.py'; did you mean 'broken_mod.py'?"),
    ],
)
def test_what_goes_wrong_is_one_line_with_its_place(write: Any, module: str, expected: str) -> None:
    write("broken_mod.py", "import not_there\n")
    write("wrong_name.py", "from json import nothing\n")
    write("syntax_mod.py", "x = 1\ndef (:\n")
    document = read_config(write("x.yaml", f"a: 1\nimports:\n  - {module}\n"))
    with pytest.raises(ConfigError) as caught:
        import_user_modules(document.data["imports"], Path(), document=document)
    assert str(caught.value).startswith(f"x.yaml:3: {expected}")
    assert "\n" not in str(caught.value)


def test_other_errors_of_the_module_come_through(write: Any) -> None:
    write("d/raising-mod.py", "1 / 0\n")
    for _ in range(2):  # a module that failed is not taken for imported the next time
        with pytest.raises(ZeroDivisionError):
            import_user_modules(["d/raising-mod.py"], Path())


def test_two_registrations_of_one_name_say_where(write: Any) -> None:
    write("first_mod.py", REGISTERS.format(name="same"))
    write("second_mod.py", REGISTERS.format(name="same"))
    with pytest.raises(
        ConfigError, match=r"imports.1: model 'same' is registered twice: by first_mod.make and by second_mod.make"
    ):
        import_user_modules(["first_mod.py", "second_mod.py"], Path())


SPAWN = """
import multiprocessing
from pathlib import Path
from etude.config import lookup
from etude.config.imports import import_user_modules

if __name__ == "__main__":
    import_user_modules(["code/for_workers.py"], Path("."))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(lookup("model", "worker").factory, [5]))
"""


def test_worker_processes_find_the_module_too(write: Any) -> None:
    """Objects of a user's file are pickled by name: a process started afresh must be able to import it."""
    write("code/for_workers.py", REGISTERS.format(name="worker"))
    write("main.py", SPAWN)
    done = subprocess.run([sys.executable, "main.py"], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[5]", done.stderr
