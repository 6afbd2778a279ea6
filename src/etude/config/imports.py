"""Importing a user's own modules, so that what they register can be used by name in a config."""

import hashlib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from etude.config.dialect import text_problem
from etude.config.document import Document, display, is_file, join
from etude.config.messages import show
from etude.config.read import missing_file
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

    Both are looked for in `base` (the config's folder), in the experiment's folder above a `configs` folder, and in
    the current folder; dotted names in the installed packages first. Importing a module again does nothing. With
    `announce`, a line says which code is run before it runs: for configs that the user has not named, but a run folder.
    Raises ConfigError in one line if a module is missing or imports something that is; other errors of the module's
    own code come through as they are.
    """
    folders = _folders(base)
    origin = document or Document({})
    for number, module in enumerate(modules):
        place = origin.place(join(path, number))
        failed = f"{place}: cannot import '{shorten(module)}'"
        if problem := _name_problem(module):
            raise ConfigError(f"{place}: {problem}")
        try:
            if module.endswith(".py") or "/" in module:
                _import_file(_find_file(module, folders), place if announce else None)
            else:
                if announce and module not in sys.modules:
                    _announce(f"the module {module}", place)
                _import_name(module, folders)
        except SyntaxError as error:
            file = display(Path(error.filename)) if error.filename else module
            raise ConfigError(f"{failed}: {file}:{error.lineno}: {error.msg}") from error
        except ImportError as error:
            raise ConfigError(f"{failed}: {_reason(error, module, folders)}") from error
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error


def _name_problem(module: str) -> str:
    """Return why this can name no module; empty if it can."""
    if problem := text_problem(module):
        return problem
    if module.endswith(".py") or "/" in module or all(part.isidentifier() for part in module.split(".")):
        return ""
    return f"{show(module)} names no module; write a dotted name (my_package.model) or a file (./model.py)"


def _folders(base: Path) -> list[Path]:
    base = base.resolve()
    above = [base.parent] if base.name == "configs" else []
    return list(dict.fromkeys([base, *above, Path.cwd()]))


def _find_file(module: str, folders: Sequence[Path]) -> Path:
    path = Path(module).expanduser()
    candidates = [path] if path.is_absolute() else [folder / path for folder in folders]
    for candidate in candidates:
        if is_file(candidate):
            return candidate.resolve()
    looked = f"; looked in {', '.join(display(folder) for folder in folders)}" if len(candidates) > 1 else ""
    raise ConfigError(f"{missing_file(candidates[0])}{looked}")


def _import_name(module: str, folders: Sequence[Path]) -> None:
    """Import by dotted name. The folders stay on the path: worker processes import the module again."""
    sys.path += [str(folder) for folder in folders if str(folder) not in sys.path]
    importlib.invalidate_caches()
    importlib.import_module(module)


def _import_file(file: Path, announced_for: str | None) -> None:
    """Import a file under its own name if that is free, so that worker processes find it too; else a unique one."""
    if any(vars(module).get("__file__") == str(file) for module in list(sys.modules.values())):
        return
    if announced_for is not None:
        _announce(str(file), announced_for)
    if file.stem.isidentifier() and _is_free(file.stem, file):
        _import_name(file.stem, [file.parent])
        return
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"'{display(file)}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _announce(code: str, place: str) -> None:
    logger.warning("running %s, as %s says; configs of run folders run what they import", code, place)


def _is_free(name: str, file: Path) -> bool:
    """Return whether importing `name` would give this file or nothing."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module without a spec, such as `__main__`
        return False
    return spec is None or spec.origin == str(file)


def _reason(error: ImportError, module: str, folders: Sequence[Path]) -> str:
    text = shorten(" ".join(str(error).split()), 200)
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and (module == missing or module.startswith(f"{missing}.")):
        looked = ", ".join(display(folder) for folder in folders)
        return f"{text}; looked in the installed packages and in {looked}"
    return f"{text} (raised while importing it)"
