"""The samples of each stream, made of parsed files, one split after the other."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from code_tasks.docstrings import explanation, other_docstrings
from code_tasks.encoding import CodeTokenizer, Ids, decisive_bytes, prompted
from code_tasks.findings import Finding, groups_of
from code_tasks.functions import FunctionText
from code_tasks.labels import QUALITY, SECURITY
from code_tasks.ontology import IGNORED
from code_tasks.reading import Parsed
from code_tasks.testing import CodeUnderTest, Known, doctest_text

Findings = dict[bytes, list[Finding] | None]
"""What ruff found, by the digest of the file."""


@dataclass
class Sample:
    """Token ids, with what belongs to each token and to the whole."""

    ids: Ids
    streams: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, Any] = field(default_factory=dict)
    kind: str = ""
    """Counted in the report: where the sample comes from."""


def code_samples(parsed: Sequence[Parsed], tokenizer: CodeTokenizer) -> Iterator[Sample]:
    """Yield every file of code, with the ontology labels of its tokens."""
    for one in parsed:
        if one.simple is None or one.full is None:
            continue
        (ids,) = tokenizer.encode([one.file.text])
        ends = tokenizer.byte_ends(ids)
        assert ends[-1] == len(one.simple), "every byte of a file is in one of its tokens"
        places = decisive_bytes(one.file.text.encode(), ends)
        streams = {"simple": np.append(one.simple[places], IGNORED), "full": np.append(one.full[places], IGNORED)}
        yield Sample(np.append(ids, tokenizer.end), streams)


def function_samples(
    parsed: Sequence[Parsed], tokenizer: CodeTokenizer, findings: Findings, max_length: int
) -> Iterator[Sample]:
    """Yield every function once, with the labels of what ruff finds in the part of it that is kept."""
    seen: set[str] = set()
    for one in parsed:
        found = findings[one.file.digest]
        fresh = [function for function in one.functions if function.text not in seen]
        seen.update(function.text for function in fresh)
        for function, ids in zip(fresh, tokenizer.encode([each.text for each in fresh]), strict=True):
            last = function.last_line
            if len(ids) >= max_length:
                ids = ids[: max_length - 1]
                kept = function.text.encode()[: int(tokenizer.byte_ends(ids)[-1])]
                last = function.first_line + kept.count(b"\n") - function.lines_above
            inside = _between(found, function.first_line, last) if found is not None else None
            labels = {"quality": multi_hot(inside, QUALITY), "security": multi_hot(inside, SECURITY)}
            yield Sample(
                np.append(ids, tokenizer.end), labels=labels, kind="of tests" if one.file.is_test else "of code"
            )


def multi_hot(findings: list[Finding] | None, groups: Any) -> Ids:
    """Return 1 for each group of rules with a finding, 0 for the others; all -100 if ruff could not tell."""
    if findings is None:
        return np.full(len(groups), IGNORED, np.int8)
    found = {name for code in {each.code for each in findings} for name in groups_of(code, groups)}
    return np.array([name in found for name in groups], np.int8)


def _between(findings: list[Finding], first: int, last: int) -> list[Finding]:
    start = bisect_left(findings, first, key=lambda each: each.line)
    stop = bisect_left(findings, last + 1, key=lambda each: each.line)
    return findings[start:stop]


def test_samples(
    parsed: Sequence[Parsed], under_test: CodeUnderTest, tokenizer: CodeTokenizer, max_length: int
) -> Iterator[Sample]:
    """Yield code and a test of it: test functions whose code was found, and the examples of docstrings."""
    pairs: list[tuple[str, str, str]] = []
    seen: set[tuple[str, str]] = set()
    for one in parsed:
        for function in one.functions:
            code, test, kind = "", "", ""
            if is_test_function(one, function):
                known = under_test.find(function, one.file.module, one.imports, one.file.split)
                if known is not None:
                    code, test, kind = code_prompt(known.module, known.function), _alone(function), "unit tests"
            elif not one.file.is_test:
                test = doctest_text(function.docstring)
                code, kind = code_prompt(one.file.module, function) if test else "", "doctests"
            if test and (code, test) not in seen:
                seen.add((code, test))
                pairs.append((code, test, kind))
    yield from _prompted(pairs, "tests", tokenizer, max_length)


def is_test_function(one: Parsed, function: FunctionText) -> bool:
    """Whether a function of a file is a test."""
    return one.file.is_test and function.name.startswith("test")


def explanation_samples(parsed: Sequence[Parsed], tokenizer: CodeTokenizer, max_length: int) -> Iterator[Sample]:
    """Yield functions and what their docstrings say first."""
    pairs = [
        (function.body, explanation(function.docstring), "of methods" if function.owner else "of functions")
        for _, function in explained(parsed)
    ]
    yield from _prompted(pairs, "explanation", tokenizer, max_length)


def pair_samples(parsed: Sequence[Parsed], tokenizer: CodeTokenizer, max_length: int) -> Iterator[Sample]:
    """Yield every explained function twice: with its own docstring (1), and with another function's (0)."""
    functions = explained(parsed)
    separator = tokenizer.separators["docstring"]
    bodies = tokenizer.encode([function.body for _, function in functions])
    texts = tokenizer.encode([explanation(function.docstring) for _, function in functions])
    for number, other in other_docstrings(functions):
        near = "of the same module" if functions[number][0] == functions[other][0] else "of other modules"
        for label, which in ((1, number), (0, other)):
            ids = prompted(bodies[number], separator, texts[which], tokenizer.end, max_length).ids
            yield Sample(ids, labels={"clarification": np.int8(label)}, kind=near)


def explained(parsed: Sequence[Parsed]) -> list[tuple[str, FunctionText]]:
    """Return the functions whose docstring says something, with their modules; equal ones once."""
    found: dict[tuple[str, str], tuple[str, FunctionText]] = {}
    for one in parsed:
        if not one.file.is_test:
            for function in one.functions:
                text = explanation(function.docstring)
                if text:
                    found.setdefault((function.body, text), (one.file.module, function))
    return list(found.values())


def known_functions(parsed: Sequence[Parsed]) -> list[Known]:
    """Return the functions that tests may be about."""
    return [
        Known(one.file.module, one.file.split, function)
        for one in parsed
        if not one.file.is_test
        for function in one.functions
    ]


def code_prompt(module: str, function: FunctionText) -> str:
    """Return a function as it is shown before a test of it: its module in a comment, its code without docstring."""
    return f"# {module}\n{function.body}"


def _alone(test: FunctionText) -> str:
    """A test without the line of its class."""
    if not test.owner:
        return test.text
    lines = test.text.split("\n")[1:]
    return "\n".join(line.removeprefix("    ") for line in lines)


def _prompted(
    pairs: Sequence[tuple[str, str, str]], separator: str, tokenizer: CodeTokenizer, max_length: int
) -> Iterator[Sample]:
    prompts = tokenizer.encode([prompt for prompt, _, _ in pairs])
    targets = tokenizer.encode([target for _, target, _ in pairs])
    for prompt, target, (_, _, kind) in zip(prompts, targets, pairs, strict=True):
        one = prompted(prompt, tokenizer.separators[separator], target, tokenizer.end, max_length)
        yield Sample(one.ids, {"labels": one.labels}, kind=kind)
