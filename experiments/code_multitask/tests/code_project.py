"""A small folder of code, and the data that is built from it."""

import hashlib
import random
import shutil
import sys
from pathlib import Path

from etude.data import open_tokens

EXPERIMENT = Path(__file__).parents[1]
if str(EXPERIMENT) not in sys.path:
    sys.path.append(str(EXPERIMENT))

from code_tasks import Options  # noqa: E402

OPTIONS = Options(vocab_size=400, max_length=128)
BROKEN = {
    "broken.py": b"def (:\n",
    "nulls.py": b"a = 1\0\n",
    "empty.py": b"",
    "latin.py": b"# coding: klingon\n",
    "notes.txt": b"no code",
}


def write_project(root, num_modules=36):
    """Modules with functions, classes, docstrings, examples and findings; tests of them; files that are none."""
    rng = random.Random(0)
    words = list({"".join(rng.choices("aeioubcdfglmnprst", k=rng.randint(4, 8))): None for _ in range(500)})
    (root / "pkg").mkdir(parents=True)
    (root / "tests").mkdir()
    for number in range(num_modules):
        one, (two, three, four, five) = words[number], rng.sample(words[num_modules:], 4)
        code = f'''"""Module {one} of {two}, with café."""
import os
from random import random as draw


def {one}({two}, {three}=[]):
    """Return the {one} of {two} and {three}.

    >>> {one}({number}, [1])
    {number + 1}
    """
    assert {two}, "no {two}"  # naïve
    for {four} in {three}:
        {two} += {four}
    return {two}


class {two.title()}:
    """A {two} with {three}."""

    def __init__(self, {three}):
        self.{three} = {three} * {rng.randint(2, 99)}

    def {four}(self, {five}):
        """Change the {three} by {five} and tell."""
        if self._{three} is None: return "é%s" % {five}
        else:
            return os.path.join(str(self.{three}), str(draw() * {five}))


def copied(value):
    """Return what all files of this project have."""
    return value + 1
'''
        tests = f'''import unittest
from pkg import {one}_module


class {one.title()}Test(unittest.TestCase):
    def test_{one}(self):
        self.assertEqual({one}_module.{one}({number}, [2]), {number + 2})

    def test_{four}(self):
        made = {one}_module.{two.title()}({number})
        self.assertIn("{five}", made.{four}({number}))

    def test_nothing(self):
        self.assertTrue({number})
'''
        (root / "pkg" / f"{one}_module.py").write_bytes(code.encode())
        (root / "tests" / f"test_{one}_module.py").write_text(tests)
    for name, raw in BROKEN.items():
        (root / name).write_bytes(raw)
    shutil.copy(root / "pkg" / f"{one}_module.py", root / "the_same_again.py")
    return root


def contents(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".inputs.json"
    }


def decoded(tokenizer, ids):
    return tokenizer.decode(list(map(int, ids)), skip_special_tokens=False)


def samples(built, stream, split):
    return open_tokens(built / stream / f"{split}.bin")
