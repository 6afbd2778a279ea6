"""The labels of functions, and the rules of ruff that make them: fixed, so that heads have the same size anywhere."""

from collections.abc import Mapping, Sequence

QUALITY: Mapping[str, Sequence[str]] = {
    "complexity": ("C90", "PLR0911", "PLR0912", "PLR0913", "PLR0915"),
    "bugbear": ("B",),
    "simplify": ("SIM",),
    "pyupgrade": ("UP",),
    "return": ("RET",),
    "naming": ("N",),
    "unused_arguments": ("ARG",),
    "builtins": ("A",),
    "exceptions": ("TRY", "BLE"),
    "private_access": ("SLF",),
    "pathlib": ("PTH",),
    "pylint": ("PLC", "PLE", "PLR1", "PLR2", "PLR5", "PLW"),
}
"""Families of rules that at least one function in a hundred of the standard library breaks."""

SECURITY: Mapping[str, Sequence[str]] = {
    "assert": ("S101",),
    "execution": ("S102", "S307", "S601", "S602", "S603", "S604", "S605", "S606", "S607", "S609"),
    "unsafe_data": ("S202", "S301", "S302", "S313", "S314", "S315", "S316", "S317", "S318", "S319", "S506"),
    "weak_random": ("S303", "S304", "S305", "S311", "S324"),
    "network": ("S104", "S113", "S310", "S312", "S321", "S323", "S501", "S502", "S503", "S504"),
    "swallowed_error": ("S110", "S112"),
}
"""Rules of the family S by what they are about; those with fewer than 90 functions in all are left out."""

MEANING = {
    "complexity": "too many branches, statements, returns or arguments (mccabe, pylint)",
    "bugbear": "likely bugs: mutable defaults, `raise` without `from`, unused loop variables (flake8-bugbear)",
    "simplify": "code that can be said more simply (flake8-simplify)",
    "pyupgrade": "old ways of saying things, such as `%` formatting (pyupgrade)",
    "return": "`else` after `return`, mixed returns (flake8-return)",
    "naming": "names that PEP 8 would write differently (pep8-naming)",
    "unused_arguments": "arguments that are not used (flake8-unused-arguments)",
    "builtins": "names that hide a builtin (flake8-builtins)",
    "exceptions": "long messages in `raise`, blind `except` (tryceratops, flake8-blind-except)",
    "private_access": "private members of other objects (flake8-self)",
    "pathlib": "`os.path` and `open` where pathlib has a way (flake8-use-pathlib)",
    "pylint": "pylint's other rules: magic numbers, late imports, overwritten loop variables",
    "assert": "`assert`, which `python -O` removes",
    "execution": "`exec`, `eval`, and programs started",
    "unsafe_data": "pickle, marshal, XML and archives that can do harm when they are read",
    "weak_random": "random numbers and hashes that are not for secrets",
    "network": "sockets on all interfaces, URLs of any scheme, FTP, TLS without checks",
    "swallowed_error": "`except` with nothing but `pass` or `continue`",
}

ALL_RULES = tuple(rule for groups in (QUALITY, SECURITY) for rules in groups.values() for rule in rules)
