"""Small texts with repeating words, so that a tokenizer has something to join, and folders made of them."""

import os
import random
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no threads in the process of the tests

WORDS = [
    *("alpha", "beta", "gamma", "delta", "return", "import", "self", "value_of", "index(range)", "naïve", "東京"),
    *("==", "!=", "\t", "{}", "[0]", "3.14", "def", "class"),
]


def texts(count: int, seed: int = 0) -> list[str]:
    """Return `count` different texts of a few lines."""
    source = random.Random(seed)
    return [
        f"document {seed} {number}\n"
        + "".join(
            "    " * source.randrange(3) + " ".join(source.choices(WORDS, k=source.randrange(1, 9))) + "\n"
            for _ in range(source.randrange(2, 12))
        )
        for number in range(count)
    ]


def write_folder(folder: Path, documents: list[str], ending: str = ".txt") -> Path:
    """Write each text to a file of its own and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(documents):
        (folder / f"{number}{ending}").write_bytes(text.encode())
    return folder


SMALL = {"vocab_size": 300, "validation": 0.2, "test": 0.2}
"""Options that suit these texts."""


def content(folder: Path) -> dict[str, bytes]:
    """Return the files of a corpus that must not depend on where its documents came from."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".inputs.json"}
