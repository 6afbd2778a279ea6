"""Docstrings as explanations: the first paragraph, and pairs of functions with their own or another docstring."""

import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence

from code_tasks.functions import FunctionText

MIN_WORDS = 3


def explanation(docstring: str) -> str:
    """Return the first paragraph of a docstring on one line, "" if it says too little.

    >>> explanation('''Return the sum
    ...     of two numbers.
    ...
    ...     More of it.''')
    'Return the sum of two numbers.'
    >>> explanation("Sum."), explanation(">>> one example only")
    ('', '')
    """
    paragraph = inspect.cleandoc(docstring).split("\n\n", 1)[0]
    words = paragraph.split()
    letters = [word for word in words if any(letter.isalpha() for letter in word)]
    return "" if len(letters) < MIN_WORDS or words[0] == ">>>" else " ".join(words)


def other_docstrings(functions: Sequence[tuple[str, FunctionText]]) -> Iterator[tuple[int, int]]:
    """Yield (function, another function), by position: whose docstring to show with the first as one that is wrong.

    Functions come with their modules. The other one is of the same module if it can be, which is harder to tell; those
    alone in their module exchange docstrings with each other. So every docstring stands as often where it belongs as
    where it does not, and tells nothing by itself. A function for which only equal docstrings are left is passed over.

    >>> from dataclasses import replace
    >>> one = FunctionText("f", "", 1, 2, "", "", "Does this and that.")
    >>> two, three = replace(one, docstring="Does other things now."), replace(one, docstring="Is a third one.")
    >>> list(other_docstrings([("a", one), ("a", two), ("b", three), ("a", one)]))
    [(0, 1), (1, 3)]
    """
    by_module: dict[str, list[int]] = defaultdict(list)
    for number, (module, _) in enumerate(functions):
        by_module[module].append(number)
    alone = [numbers[0] for numbers in by_module.values() if len(numbers) == 1]
    for numbers in (*(group for group in by_module.values() if len(group) > 1), alone):
        for place, number in enumerate(numbers):
            other = numbers[(place + 1) % len(numbers)]
            if functions[number][1].docstring != functions[other][1].docstring:
                yield number, other
