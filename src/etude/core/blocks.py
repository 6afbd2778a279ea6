"""Finding the repeated blocks of a model, or modules by a pattern of their names."""

from fnmatch import fnmatchcase

from torch import nn

from etude.core.model import unwrap


def repeated_blocks(model: nn.Module) -> list[str]:
    """Return the names of a model's repeated blocks: two or more modules of one class in a module list.

    Lists inside a block belong to it. Single layers (a Linear) are not blocks: recomputing one saves nothing.
    """
    found: list[str] = []
    _search(unwrap(model), "", found)
    return found


def _search(module: nn.Module, path: str, found: list[str]) -> None:
    children = {f"{path}.{name}".lstrip("."): child for name, child in module.named_children()}
    blocks: list[str] = []
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        composite = {name: child for name, child in children.items() if _is_composite(child)}
        classes = [type(child) for child in composite.values()]
        blocks = [name for name, child in composite.items() if classes.count(type(child)) > 1]
        found += blocks
    for name, child in children.items():
        if name not in blocks:
            _search(child, name, found)


def _is_composite(module: nn.Module) -> bool:
    # Descend into a list of lists: the blocks are inside.
    has_parts = next(module.children(), None) is not None
    return has_parts and not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))


def modules_matching(model: nn.Module, pattern: str) -> list[str]:
    """Return the modules whose names match, except those inside another match, and lists, which are never called."""
    names: list[str] = []
    for name, module in model.named_modules():
        inside = names and name.startswith(f"{names[-1]}.")  # named_modules yields children right after their parent
        is_called = type(module).forward is not nn.Module.forward
        if name and is_called and not inside and fnmatchcase(name, pattern):
            names.append(name)
    return names
