"""The registry is imported by every leaf: it must not bring pydantic or YAML with it."""

import subprocess
import sys


def test_the_registry_loads_neither_pydantic_nor_yaml() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); from etude.config import register, Section; "
        "print(sorted(name for name in set(sys.modules) - before if '.' not in name))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "['etude']"
