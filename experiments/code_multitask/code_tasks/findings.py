"""What ruff finds in files, by line: one call for all of them, on copies, with nothing of the user's settings."""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.core.errors import DataError

_FINDING = re.compile(r"^(\d+)\.py:(\d+):\d+: ([A-Za-z-]+[0-9]*):? ", re.MULTILINE)
_NEWEST = 13
"""The newest minor version of Python that is asked for; newer code is read by it as well."""


@dataclass(frozen=True)
class Finding:
    """A rule that a line breaks."""

    line: int
    code: str


def find_ruff() -> str:
    """Return the path of ruff, of this environment first. Raises DataError if there is none."""
    try:
        from ruff import find_ruff_bin

        return str(find_ruff_bin())
    except (ImportError, FileNotFoundError):
        found = shutil.which("ruff")
    if found is None:
        raise DataError(
            "labels of quality and security are made by ruff, which is missing; install it: pip install 'etude[code]'"
        )
    return found


def ruff_version() -> str:
    """Return the version of ruff."""
    return subprocess.run([find_ruff(), "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]


def run_ruff(texts: Sequence[str], rules: Sequence[str]) -> list[list[Finding] | None]:
    """Return what ruff finds in each text, in order of lines; None for a text that ruff cannot read.

    `noqa` comments do not count: they tell what people think of a finding, not whether it is one.
    """
    with tempfile.TemporaryDirectory(prefix="etude-ruff-") as folder:
        for number, text in enumerate(texts):
            Path(folder, f"{number}.py").write_text(text, encoding="utf-8", newline="")
        command = [find_ruff(), "check", "--isolated", "--no-cache", "--ignore-noqa", "--no-fix", "--quiet"]
        command += ["--output-format", "concise", "--target-version", f"py3{min(sys.version_info[1], _NEWEST)}"]
        command += ["--select", ",".join(rules), "."]
        done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", check=False)
    if done.returncode not in (0, 1):
        raise DataError(
            f"ruff failed ({' '.join(done.stderr.split())[:200]}); a newer one may help: pip install -U ruff"
        )
    found: list[list[Finding] | None] = [[] for _ in texts]
    for number, line, code in _FINDING.findall(done.stdout):
        before = found[int(number)]
        if code == "invalid-syntax":
            found[int(number)] = None
        elif before is not None:
            before.append(Finding(int(line), code))
    return [sorted(one, key=lambda each: (each.line, each.code)) if one is not None else None for one in found]


def groups_of(code: str, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the groups whose rules a code belongs to: a rule is a code or the beginning of codes.

    >>> groups_of("PLR0912", {"pylint": ["PLR"], "size": ["PLR0912", "PLR0915"], "other": ["P", "PLR1"]})
    ['pylint', 'size']
    """
    return [name for name, rules in groups.items() if any(_belongs(code, rule) for rule in rules)]


def _belongs(code: str, rule: str) -> bool:
    # "S" is the family S and not that of "SIM": behind letters comes a digit.
    return code.startswith(rule) and (code == rule or code[len(rule)].isdigit())
