"""Importing a user's own modules, so that a config can use the components they register."""

import hashlib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path

from etude.config.document import Document, display, join
from etude.config.read import is_file, missing_file
from etude.core.errors import ConfigError
from etude.core.spelling import shorten

logger = logging.getLogger("etude")


def import_user_modules(
    modules: Sequence[str],
    base: Path,
    *,
    path: str = "imports",
    document: Document | None = None,
    announce: bool = False,
) -> None:
    """Import each module, by dotted name (`my_pkg.model`) or by file (`./model.py`).

    Both are searched in `base` (the config's folder), in the experiment's folder above a `configs` folder, and in the
    current folder; dotted names in the installed packages first. Importing a module again does nothing. With
    `announce`, the code is logged before it runs: for configs of run folders, which the user did not name. Raises a
    one-line ConfigError if a module, or one that it imports, is missing; other errors of the module pass through.
    """
    base = base.resolve()
    folders = list(dict.fromkeys([base, *([base.parent] if base.name == "configs" else []), Path.cwd()]))
    origin = document or Document({})
    for number, module in enumerate(modules):
        place = origin.place(join(path, number))
        failed = f"{place}: cannot import '{shorten(module)}'"
        try:
            file = _find_file(module, folders) if module.endswith(".py") or "/" in module else None
            if module in sys.modules or (file is not None and _is_imported(file)):
                continue
            if announce:
                code = file or f"the module {module}"
                logger.warning("running %s, which is imported by %s", code, place)
            if file is None and not all(part.isidentifier() for part in module.split(".")):
                raise ImportError("write a dotted name (my_package.model) or a file (./model.py)")
            if file is None:
                _import_name(module, folders)
            else:
                _import_file(file)
        except SyntaxError as error:
            where = display(Path(error.filename)) if error.filename else module
            raise ConfigError(f"{failed}: {where}:{error.lineno}: {error.msg}") from error
        except ModuleNotFoundError as error:
            own = f"{module}.".startswith(f"{error.name}.")
            hint = f"; looked in {_shown(folders)}" if own else " (raised while importing it)"
            raise ConfigError(f"{failed}: {shorten(str(error), 200)}{hint}") from error
        except ImportError as error:
            raise ConfigError(f"{failed}: {shorten(' '.join(str(error).split()), 200)}") from error
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error


def _find_file(module: str, folders: Sequence[Path]) -> Path:
    # an absolute path gives the same candidate for every folder
    candidates = [folder / Path(module).expanduser() for folder in folders]
    found = next((candidate for candidate in candidates if is_file(candidate)), None)
    if found is None:
        raise ConfigError(f"{missing_file(candidates[0])}; looked in {_shown(folders)}")
    return found.resolve()


def _shown(folders: Sequence[Path]) -> str:
    return ", ".join(display(folder) for folder in folders)


def _is_imported(file: Path) -> bool:
    return any(vars(module).get("__file__") == str(file) for module in list(sys.modules.values()) if module)


def _import_name(module: str, folders: Sequence[Path]) -> None:
    """Import by dotted name. The folders stay on sys.path: worker processes import the module again."""
    sys.path += [str(folder) for folder in folders if str(folder) not in sys.path]
    importlib.invalidate_caches()
    importlib.import_module(module)


def _import_file(file: Path) -> None:
    """Import a file under its own name if unused, so that worker processes find it too; else a unique name."""
    if file.stem.isidentifier() and file.stem not in sys.modules:
        known = importlib.util.find_spec(file.stem)
        if known is None or known.origin == str(file):
            _import_name(file.stem, [file.parent])
            return
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    loader = SourceFileLoader(name, str(file))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
