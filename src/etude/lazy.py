"""Names of a package that are loaded when they are first used, so that importing one of its files costs only that.

The package's own source is read to find where a name is: a table would list every name a third time, after the
imports that type checkers need and `__all__`.
"""

import ast
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def load_late(package: str, file: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: the names are those that its file imports under `if TYPE_CHECKING:`.

    So they are written once, as imports that readers and type checkers understand:

        if TYPE_CHECKING:
            from etude.models.lenet5 import LeNet5

        __getattr__ = load_late(__name__, __file__)
    """

    def load(name: str) -> Any:
        if name.startswith("__") or name not in (homes := _homes(file)):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(homes[name]), name)
        except ModuleNotFoundError as error:
            if not f"{homes[name]}.".startswith(f"{error.name}."):
                raise
            reason = f"it needs {error.name}, which is not installed"
            raise AttributeError(f"module {package!r} has no attribute {name!r}: {reason}") from error
        vars(import_module(package))[name] = value  # found directly from now on
        return value

    return load


def drop_missing(names: list[str], file: str, rooms: Iterable[str]) -> None:
    """Remove the names of those packages that are not installed, so that `from etude import *` works without them."""
    missing = [room for room in rooms if not Path(file).with_name(room).joinpath("__init__.py").is_file()]
    if missing:
        homes = _homes(file)
        names[:] = [name for name in names if homes.get(name, ".").split(".")[1] not in missing]


@cache
def _homes(file: str) -> dict[str, str]:
    """Return the names that a file imports under `if TYPE_CHECKING:`, each with its module."""
    body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    blocks = [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {one.name: str(node.module) for node in imports for one in node.names}
