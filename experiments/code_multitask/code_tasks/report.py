"""The schema as Markdown tables: every label, what makes it, and how often it is there."""

from collections.abc import Mapping, Sequence
from typing import Any

from code_tasks.labels import MEANING, QUALITY, SECURITY
from code_tasks.options import STREAMS
from code_tasks.sources import SPLITS

SIMPLE_MEANING = {
    "keyword": "keywords of the language, with `match` and `case` where they are",
    "name": "all other names",
    "number": "numbers",
    "string": "strings and f-strings, prefix and quotes included",
    "docstring": "strings that are the docstring of a module, class or function",
    "comment": "from `#` to the end of the line",
    "operator": "operators and the signs of assignments: `+`, `==`, `=`, `->` …",
    "delimiter": "brackets, comma, colon, dot, semicolon, `@`",
}
FULL_MEANING = {
    "function_name": "the name behind `def`",
    "class_name": "the name behind `class`",
    "base_class": "names in the bases of a class",
    "parameter": "parameters of functions and lambdas",
    "annotation": "types of parameters, results and variables",
    "decorator": "names of decorators",
    "import": "modules and names in imports",
    "definition": "names that are given a value",
    "use": "names that are read, if nothing below fits",
    "attribute": "names behind a dot that are read",
    "attribute_definition": "names behind a dot that are given a value",
    "call": "the name that is called",
    "argument": "names that are an argument of a call by themselves",
    "keyword_argument": "the name before `=` in a call",
    "loop_variable": "targets of `for` and of comprehensions",
    "exception": "names in `raise` and `except`, and behind its `as`",
    "constant": "numbers, `None`, `True`, `False`",
    "string": "strings that are not docstrings",
    "docstring": "docstrings",
    "f_string": "f-strings, the expressions in them included",
}


def report(schema: Mapping[str, Any]) -> str:
    """Return tables of the samples and labels of data, in Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in schema["versions"].items())
    options = ", ".join(f"{name} {value}" for name, value in schema["options"].items() if value is not None)
    parts = [f"Made by {versions}, with {options}.\n", _files(schema), _sizes(schema), _kinds(schema)]
    parts += [_tokens(schema, "simple", SIMPLE_MEANING), _tokens(schema, "full", FULL_MEANING)]
    parts += [_functions(schema, "quality", QUALITY), _functions(schema, "security", SECURITY)]
    return "\n".join(part for part in parts if part)


def _files(schema: Mapping[str, Any]) -> str:
    rows = [[f"of {kind}", *(f"{schema['files'][split][kind]:,}" for split in SPLITS)] for kind in ("code", "tests")]
    left = "; ".join(f"{count:,} {reason}" for reason, count in schema["skipped"].items()) or "none"
    leaks = schema["functions_left_out_as_seen_in_training"]
    return (
        _table(["files", *SPLITS], rows) + f"\nFiles passed over: {left}. "
        f"Functions of held-out files that are in an earlier split too and are left out: {leaks:,}. "
        f"Test functions, whether or not what they test was found: {schema['test_functions']:,}.\n"
    )


def _sizes(schema: Mapping[str, Any]) -> str:
    rows = []
    for stream in STREAMS:
        splits = schema["samples"][stream]
        rows.append([f"`{stream}`", *(_size(splits[split]) if split in splits else "none" for split in SPLITS)])
    return _table(["stream: samples / tokens", *SPLITS], rows)


def _size(sizes: Mapping[str, int]) -> str:
    labelled = f", {sizes['labelled']:,} to be written" if "labelled" in sizes else ""
    return f"{sizes['samples']:,} / {sizes['tokens']:,}{labelled}"


def _kinds(schema: Mapping[str, Any]) -> str:
    rows = []
    for stream in STREAMS:
        counts = schema["counts"][stream]
        for kind in sorted({kind for split in counts.values() for kind in split.get("kinds", {})}):
            found = [counts.get(split, {}).get("kinds", {}).get(kind, 0) for split in SPLITS]
            rows.append([f"`{stream}` {kind}", *(f"{count:,}" for count in found)])
    return _table(["samples", *SPLITS], rows)


def _tokens(schema: Mapping[str, Any], name: str, meaning: Mapping[str, str]) -> str:
    counts = schema["counts"]["code"]
    rows = []
    for number, label in enumerate(schema["labels"][name]):
        found = [counts[split][name][label] if split in counts else 0 for split in SPLITS]
        rows.append([str(number), f"`{label}`", meaning[label], *(f"{count:,}" for count in found)])
    missing = [counts.get(split, {}).get("without a label", {}).get(name, 0) for split in SPLITS]
    rows.append(["-100", "", "no label", *(f"{count:,}" for count in missing)])
    return _table([f"`{name}`", "label", "what it is", *SPLITS], rows)


def _functions(schema: Mapping[str, Any], name: str, rules: Mapping[str, Sequence[str]]) -> str:
    counts, samples = schema["counts"]["functions"], schema["samples"]["functions"]
    rows = []
    for number, label in enumerate(schema["labels"][name]):
        found = []
        for split in SPLITS:
            count, total = (counts[split][name][label], samples[split]["samples"]) if split in counts else (0, 0)
            found.append(f"{count:,} ({100 * count / max(total, 1):.2f} %)")
        rows.append([str(number), f"`{label}`", ", ".join(rules[label]), MEANING[label], *found])
    return _table([f"`{name}`", "label", "rules of ruff", "what it is", *SPLITS], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of a table; nothing without rows."""
    if not rows:
        return ""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    lines.insert(1, "|" + "---|" * len(head))
    return "\n".join(lines) + "\n"
