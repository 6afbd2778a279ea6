"""Markdown pages: their code blocks, and running them the way a reader would, from top to bottom.

What the words after the language of a fence mean:

    python                  run, in one namespace for the whole page; must print nothing, or what the next `text` says
    python parts.py         written to that file, for the configs of the page to import
    python no-run           compiled only: needs a network or a GPU
    python needs PACKAGE    a program of its own, run where the package is installed
    yaml [file.yaml]        written to that file and loaded as an experiment config
    yaml file.yaml wrong    written to that file; loading it must fail
    console                 `$ etude …` followed by output is run and must print that; without output it is parsed
    console no-run          parsed only, output and all: needs a network or takes long
    text                    after `python`: what it prints; elsewhere: anything

In expected output `…` stands for any text.
"""

import contextlib
import io
import logging
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import typer

from etude.cli.main import app, main
from etude.core import ConfigError
from etude.experiment import load_config

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("*.md", "docs/**/*.md", "experiments/*/README.md", "benchmarks/*.md")
PAGES = sorted(page for place in PLACES for page in ROOT.glob(place))
SHELL = {"cd", "git", "kill", "pip", "source", ".venv/bin/pytest"}
"""Commands of the shell that a page may show; they are not looked at."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    found, fence, inside = [], None, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if fence is None and line.startswith("```"):
            fence, inside = (number, line[3:].split()), []
        elif fence is not None and line.rstrip() == "```":
            start, (language, *words) = fence[0], fence[1] or [""]
            found.append(Block(page, start, language, tuple(words), "\n".join(inside) + "\n"))
            fence = None
        elif fence is not None:
            inside.append(line)
    assert fence is None, f"{page}: a fence is not closed"
    return found


@dataclass
class Command:
    """A line `$ …` of a console block, and the output shown below it."""

    arguments: list[str]
    output: str = ""


def commands_of(block: Block) -> list[Command]:
    """Return the commands of a console block, without comments and redirections."""
    commands: list[Command] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            commands.append(Command(shlex.split(line[2:].partition(" > ")[0], comments=True)))
        else:
            assert commands, f"{block}: output before the first command"
            commands[-1].output += line + "\n"
    return commands


def new_module(name: str) -> dict[str, object]:
    """Return the names of a new module; classes of the page are found in it, as those of a script in `__main__`."""
    sys.modules[name] = ModuleType(name)
    return vars(sys.modules[name])


@dataclass
class Reader:
    """Follows one page in the current folder."""

    namespace: dict[str, object] = field(default_factory=lambda: new_module("docs_page"))

    def follow(self, page: Path) -> None:
        """Do what every block of the page says."""
        blocks = blocks_of(page)
        for block, after in pairwise([*blocks, None]):
            assert block is not None
            if block.language == "python":
                self.python(block, after)
            elif block.language == "yaml":
                self.yaml(block)
            elif block.language == "console":
                self.console(block)

    def python(self, block: Block, after: Block | None) -> None:
        # Empty lines in front make the line numbers of tracebacks those of the page.
        code = compile("\n" * block.line + block.text, str(block.page), "exec")
        match block.words:
            case ():
                with captured() as output:
                    exec(code, self.namespace)
                said = after is not None and after.language == "text"
                check_output(block, output.getvalue(), after.text if said and after else "")
            case (name,) if name.endswith(".py"):
                Path(name).write_text(block.text)
            case ("no-run",) | ("needs", _):
                pass
            case _:
                pytest.fail(f"{block}: what is `python {' '.join(block.words)}`?")

    def yaml(self, block: Block) -> None:
        name, *wrong = block.words or ("config.yaml",)
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
        if wrong == ["wrong"]:
            with pytest.raises(ConfigError):
                load_config(path)
        else:
            assert not wrong, f"{block}: what is `yaml {' '.join(block.words)}`?"
            load_config(path)

    def console(self, block: Block) -> None:
        for command in commands_of(block):
            check_command(block, command.arguments)
            if command.output.strip() and block.words != ("no-run",):
                assert command.arguments[0] == "etude", f"{block}: only etude commands are run; mark it no-run"
                check_output(block, run_etude(command.arguments), command.output)


def run_alone(block: Block) -> None:
    """Run a block that is a program of its own."""
    exec(compile("\n" * block.line + block.text, str(block.page), "exec"), {"__name__": "docs_page"})


def check_output(block: Block, printed: str, expected: str) -> None:
    """Compare what was printed with what the page says."""
    pattern = ".*".join(re.escape(part) for part in _stripped(expected).split("…"))
    if not re.fullmatch(pattern, _stripped(printed), re.DOTALL):
        pytest.fail(f"{block} prints\n\n{printed}\nbut the page says\n\n{expected}", pytrace=False)


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def check_command(block: Block, arguments: list[str]) -> None:
    """Fail unless a command exists and takes these arguments; nothing is run."""
    match arguments:
        case ["etude", *rest]:
            parse_etude(block, rest)
        case ["torchrun", "--nproc-per-node", _, "-m", "etude", *rest]:
            parse_etude(block, rest)
        case ["make", *targets]:
            rules = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            unknown = [target for target in targets if "=" not in target and target not in rules]
            assert not unknown, f"{block}: the Makefile has no {unknown}"
        case ["python", "-m", module, *_]:
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{block}: no module {module}"
        case ["python", script, *_]:
            assert (ROOT / script).exists(), f"{block}: no file {script}"
        case [name, *_]:
            assert name in SHELL, f"{block}: unknown command {name}"


def parse_etude(block: Block, arguments: list[str]) -> None:
    """Parse the arguments of an etude command without running it."""
    command = typer.main.get_command(app)
    try:
        context = command.make_context("etude", list(arguments))
        while isinstance(command, typer.core.TyperGroup):
            rest = [*context._protected_args, *context.args]
            name, command, rest = command.resolve_command(context, rest)
            context = command.make_context(name, rest, parent=context)
    except SystemExit:
        assert "--help" in arguments
    except Exception as error:
        pytest.fail(f"{block}: etude {' '.join(arguments)}: {error}", pytrace=False)


def run_etude(arguments: list[str]) -> str:
    """Run an etude command in this process and return what it prints."""
    logger, before = logging.getLogger("etude"), sys.argv
    handlers = list(logger.handlers)
    with captured() as output:
        try:
            sys.argv = arguments
            main()
        except SystemExit:
            pass
        finally:
            sys.argv, logger.handlers = before, handlers
    return output.getvalue()


@contextlib.contextmanager
def captured() -> Iterator[io.StringIO]:
    """Collect what the block prints, to stdout and to stderr."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield output
