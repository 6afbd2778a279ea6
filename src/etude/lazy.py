"""Lazy imports: names of a package on first use, and optional packages, which may be absent.

The module of a name is read from the package's source: a table would repeat the imports for type checkers.
"""

import ast
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


def load_late(package: str, file: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: it loads the names that its file imports under `if TYPE_CHECKING:`.

    So they are written only once, as imports that type checkers understand:

        if TYPE_CHECKING:
            from etude.models.lenet5 import LeNet5 as LeNet5

        __getattr__ = load_late(__name__, __file__)

    They are also its `__all__`, unless it has another one.
    """

    def load(name: str) -> Any:
        if name == "__all__":
            return sorted(_homes(file))
        if name.startswith("__") or name not in (homes := _homes(file)):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if (home := import_room(homes[name])) is None:
            reason = f"it needs {'.'.join(homes[name].split('.')[:2])}, which is not installed"
            raise AttributeError(f"module {package!r} has no attribute {name!r}: {reason}")
        value = vars(import_module(package))[name] = getattr(home, name)  # cached for later lookups
        return value

    return load


def drop_missing(names: list[str], file: str, rooms: Iterable[str]) -> None:
    """Remove the names of packages that are not installed, so that `from etude import *` works without them."""
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


def import_room(module: str) -> ModuleType | None:
    """Import a module of an optional package; return None if the package is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # a missing third-party library, not ours
        return None


@cache
def package_version() -> str:
    """Return the version of etude."""
    from importlib import metadata  # importing it is slow, and few need it

    try:
        return metadata.version("etude")
    except metadata.PackageNotFoundError:  # run from the source folder, not installed
        return "0+source"
