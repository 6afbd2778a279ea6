"""Which pages the site has. A page has the place of its file in the repository, so links are those of the files.

Files that pages link to, configs or sources, are part of the site as they are. The pages of the reference are made of
the names that the rooms offer.
"""

import ast
import importlib
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = ("*.md", "docs/**/*.md", "experiments/*/README.md", "benchmarks/README.md")
ROOMS = {
    "etude": "What most programs need",
    "etude.trainer": "Training",
    "etude.engine": "The engine and its seams",
    "etude.callbacks": "Callbacks",
    "etude.losses": "Losses",
    "etude.metrics": "Metrics",
    "etude.optim": "Optimizers and schedules",
    "etude.data": "Data",
    "etude.corpus": "Text corpora",
    "etude.models": "Models",
    "etude.multitask": "Several tasks",
    "etude.multimodal": "Values as tokens",
    "etude.checkpoint": "Checkpoints",
    "etude.experiment": "Experiments",
    "etude.config": "Configs",
    "etude.core": "Contracts",
}
ENGINE = ("loop", "step", "objective", "callback", "update", "capture")
"""The files of the engine that others build on; as a whole it offers no names."""
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
FENCE = re.compile(r"^```([a-z]+) (\S+)(.*)$", re.MULTILINE)
"""A block of code with words for the tests, of which the first may be the name of its file."""


def on_config(config):
    """Fill in the parts of the menu that follow from what there is."""
    notes = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/design/*.md"))
    parts = {"Reference": [{title: f"reference/{room}.md"} for room, title in ROOMS.items()], "Design": notes}
    config.nav = [{name: parts.get(name, entry)} for part in config.nav for name, entry in part.items()]
    return config


def on_files(files, config):
    """Return the files of the site in place of those in `docs_dir`."""
    pages = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    linked = {one for page in pages for one in _linked(page)}
    found = [_file(path, config) for path in (*pages, *sorted(linked - set(pages)))]
    own = [one for one in files if not one.src_uri.startswith(("guides/", "design/", "images/", "site/", "security"))]
    reference = [File.generated(config, f"reference/{room}.md", content=text) for room, text in _reference().items()]
    return Files([*own, *found, *reference])


def on_page_markdown(markdown, **_):
    """Take the words for the tests out of the fences; the name of a file becomes the title of its block."""
    return FENCE.sub(lambda m: f'```{m[1]} title="{m[2]}"' if "." in m[2] else f"```{m[1]}", markdown)


def _linked(page):
    """Yield the files that a page links to."""
    for target in LINK.findall(page.read_text()):
        path = (page.parent / target).resolve()
        if "://" not in target and path.is_file() and path.is_relative_to(ROOT):
            yield path


def _file(path, config):
    place = path.relative_to(ROOT).as_posix()
    return File(place, str(ROOT), config.site_dir, config.use_directory_urls)


def _reference():
    """Return the pages of the rooms. A name is described once, where it is defined; other rooms lead there."""
    offered = {room: _names(importlib.import_module(room)) for room in ROOMS}
    offered["etude.engine"] = {f"{one}.{name}": place for one in ENGINE for name, place in _own(one).items()}
    home = {}
    for room, names in offered.items():
        for place in names.values():
            known = home.get(place, "etude")
            if known == "etude" or (place.startswith(f"{room}.") and not place.startswith(f"{known}.")):
                home[place] = room
    return {room: _page(room, names, home) for room, names in offered.items()}


def _page(room, names, home):
    lines = [f"# {room}", "", (importlib.import_module(room).__doc__ or "").strip(), ""]
    elsewhere = {name: place for name, place in names.items() if home[place] != room}
    if elsewhere:
        lines += ["| name | |", "|---|---|"]
        lines += [f"| [`{name}`][{place}] | {_summary(place)} |" for name, place in sorted(elsewhere.items())]
    return "\n".join([*lines, "", *(f"::: {place}\n" for place in names.values() if home[place] == room)])


def _names(module):
    """Return the classes and functions that a module offers, and where they are defined."""
    found = {}
    for name in sorted(getattr(module, "__all__", None) or _exported(module)):
        value = getattr(module, name)
        source = getattr(value, "__module__", None)
        if isinstance(source, str) and source.startswith("etude") and getattr(value, "__qualname__", "") == name:
            found[name] = f"{source}.{name}"
    return found


def _exported(module):
    """Return the names that a package imports as themselves, `from etude.models.mlp import MLP as MLP`."""
    imports = [
        one for one in ast.walk(ast.parse(Path(module.__file__).read_text())) if isinstance(one, ast.ImportFrom)
    ]
    return [one.name for node in imports for one in node.names if one.asname == one.name]


def _own(file):
    """Return the public classes and functions of a file of the engine."""
    module = importlib.import_module(f"etude.engine.{file}")
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
    return {name: f"{module.__name__}.{name}" for name in own if not name.startswith("_")}


def _summary(place):
    module, _, name = place.rpartition(".")
    text = getattr(importlib.import_module(module), name).__doc__ or ""
    return text.strip().split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
