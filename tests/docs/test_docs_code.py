"""The pages say what is true: their code runs, their messages are real, their tables and links are complete."""

import importlib.util
import inspect
import json
import os
import re
import sys

import pytest
import typer
from docs_pages import PAGES, ROOT, Block, Reader, blocks_of, run_alone

from etude.cli.main import app
from etude.config import registry
from etude.experiment import all_sections
from etude.multimodal.feature import VocabSection
from etude.multimodal.loss.settings import DEFAULTS
from etude.multitask.weighting.torchjd_adapter import CLASSES
from etude.trainer import TRAINING_ALIASES, TrainerConfig

IDS = [str(page.relative_to(ROOT)) for page in PAGES]
UNTRACKED = {"__pycache__", "runs", "data", "build", "dist"}
"""Folders that git ignores."""
PROGRAMS = [block for page in PAGES for block in blocks_of(page) if block.words[:1] == ("needs",)]


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    """Work in an empty folder, and forget what a page registers and imports."""
    known = {kind: {name: registry.lookup(kind, name) for name in registry.names(kind)} for kind in registry.kinds()}
    monkeypatch.setattr(registry, "_COMPONENTS", known)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_page_can_be_followed(page):
    Reader().follow(page)


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_program_that_needs_a_package(block):
    package = block.words[1]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    run_alone(block)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    broken = [link for link in links if "://" not in link and not (page.parent / link.partition("#")[0]).exists()]
    assert not broken


def test_guides_are_listed_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    guides = [page.relative_to(ROOT).as_posix() for page in PAGES if page.parent.name == "guides"]
    assert guides
    assert [guide for guide in guides if f"({guide})" not in readme] == []


def test_map_of_the_readme_names_every_folder():
    places = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Where things are\n")[2]
    packages = {path.parent.name for path in (ROOT / "src" / "etude").glob("*/__init__.py")}
    assert set(re.findall(r"^  ([a-z]+)/ ", places, re.MULTILINE)) == packages
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert set(re.findall(r"^([a-z]+)/", places, re.MULTILINE)) == folders - UNTRACKED


def rows_of(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading of the guide to configs."""
    text = (ROOT / "docs" / "guides" / "configs.md").read_text(encoding="utf-8")
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert lines, heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_table_of_sections_is_that_of_the_schema():
    expected = [[f"`{name}`", spec.description] for name, spec in all_sections().items()]
    assert rows_of("Sections") == expected


def test_table_of_training_keys_is_that_of_the_schema():
    expected = [
        [f"`{name}`", f"`{json.dumps(field.default)}`", str(field.description)]
        for name, field in TrainerConfig.model_fields.items()
    ]
    assert rows_of("Keys of `training`") == expected


def test_table_of_vocab_keys_is_that_of_the_schema():
    expected = [
        [f"`{name}`", f"`{json.dumps(field.get_default(call_default_factory=True))}`", str(field.description)]
        for name, field in VocabSection.model_fields.items()
    ]
    assert rows_of("Keys of `vocab`") == expected


def test_table_of_the_meaningful_loss_is_its_signature():
    expected = [[f"`{name}`", f"`{json.dumps(default)}`"] for name, default in DEFAULTS.items()]
    assert [row[:2] for row in rows_of("Keys of the loss `meaningful`")] == expected


def test_table_of_other_spellings_is_that_of_the_schema():
    found = {alias: key for key, others in rows_of("Other spellings") for alias in re.findall(r"`(\w+)`", others)}
    assert {alias: key.strip("`") for alias, key in found.items()} == TRAINING_ALIASES


def block(language: str, text: str, *words: str) -> Block:
    return Block(ROOT / "README.md", 1, language, words, text)


@pytest.mark.parametrize(
    "wrong",
    [
        [block("python", "1 / 0\n")],
        [block("python", "print('a')\n")],
        [block("python", "print('a')\n"), block("text", "b\n")],
        [block("yaml", "training: {epoch: 3}\n")],
        [block("yaml", "training: {epochs: 3}\n", "x.yaml", "wrong")],
        [block("console", "$ etude trian lenet5\n")],
        [block("console", "$ etude train lenet5 --fast\n")],
        [block("console", "$ etude config check lenet5/baseline\n…: wrong\n")],
        [block("console", "$ make coffee\n")],
        [block("console", "$ python -m benchmarks.nothing\n")],
    ],
    ids=lambda blocks: blocks[0].text.strip(),
)
def test_a_page_that_is_wrong_is_noticed(monkeypatch, wrong):
    """The checks above can fail."""
    monkeypatch.setattr("docs_pages.blocks_of", lambda page: wrong)
    with pytest.raises((AssertionError, pytest.fail.Exception, ZeroDivisionError, ValueError)):
        Reader().follow(ROOT / "README.md")


def test_table_of_commands_in_the_readme_is_complete():
    whole = typer.main.get_command(app)
    names = []
    for name in whole.list_commands(typer.Context(whole)):
        inner = getattr(whole.commands[name], "commands", None)
        names += [name] if inner is None else [f"{name} {one}" for one in inner]
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Commands\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `etude ([a-z -]+[a-z])", table, re.MULTILINE) == names


@pytest.mark.parametrize("kind", ["weighting", "head"])
def test_every_argument_of_weightings_and_heads_is_in_the_guide(kind):
    """With its default, as the signature has it."""
    text = (ROOT / "docs" / "guides" / "multitask.md").read_text(encoding="utf-8")
    heading = {"weighting": "| weighting | argument | default |", "head": "| head | of (B, D) |"}[kind]
    lines = text.partition(heading)[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    name, said = "", dict[str, str]()
    for row in rows:
        name = row[0].strip("`") or name
        said[name] = f"{said.get(name, '')} {' '.join(row[1:])}"
    supplied = {"tasks", "in_features"}
    factories = {name: registry.lookup(kind, name).factory for name in registry.names(kind)}
    own = {name for name, factory in factories.items() if factory.__module__.startswith("etude.")}
    if kind == "weighting":  # those of torchjd are only named: their arguments are in its own documentation
        assert all(f"`{one}`" in text for one in CLASSES)
        own -= CLASSES.keys()
    assert set(said) == own
    for name in own:
        for argument, parameter in inspect.signature(factories[name]).parameters.items():
            if argument in supplied:
                continue
            written = {None: "null", (): "[]"}.get(parameter.default, str(parameter.default).lower())
            empty = kind == "weighting" and "Mapping" in str(parameter.annotation)
            default = "" if parameter.default is parameter.empty else "{}" if empty else written
            assert f"`{argument}" in said[name], (name, argument)
            assert default in said[name], (name, argument, default)
