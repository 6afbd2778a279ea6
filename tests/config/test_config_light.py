"""The registry is imported by every leaf: it must not bring pydantic or YAML with it."""

from forked_python import run_python


def test_the_registry_loads_neither_pydantic_nor_yaml() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); from etude.config import register, Section; "
        "print(sorted(name for name in set(sys.modules) - before if '.' not in name))"
    )
    done = run_python("-c", code)
    assert done.stdout.strip() == "['etude']", done.stderr
