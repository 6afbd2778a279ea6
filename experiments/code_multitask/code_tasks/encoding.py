"""One tokenizer for all streams, and samples made of its ids."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from code_tasks.ontology import IGNORED
from etude.core.errors import DataError
from etude.corpus.options import SPECIAL_TOKENS
from etude.corpus.tokenizer import Encoder, Vocabulary, checksum, read_vocabulary, train_tokenizer
from etude.data.text.tokenizer import require_tokenizers

SEPARATORS = {"tests": "<|tests|>", "explanation": "<|explanation|>", "docstring": "<|docstring|>"}
"""What stands between the code and a test of it, its explanation, or a docstring that may belong to it."""
MIN_VOCABULARY = 256 + len(SPECIAL_TOKENS) + len(SEPARATORS)

Ids = NDArray[Any]
_SPACE = np.isin(np.arange(256), list(b" \t\n\r\f\v"))
_WORD = np.array([byte >= 128 or chr(byte).isalnum() or byte == ord("_") for byte in range(256)])


def train(texts: Sequence[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE tokenizer. Raises DataError if the texts are too few for the vocabulary."""
    require_tokenizers()
    if vocab_size < MIN_VOCABULARY:
        raise DataError(f"vocab_size is {vocab_size}; all bytes and special tokens need at least {MIN_VOCABULARY}")
    tokenizer = train_tokenizer(_groups(texts), vocab_size, [*SPECIAL_TOKENS, *SEPARATORS.values()])
    size = tokenizer.get_vocab_size()
    if size < vocab_size:
        raise DataError(f"the code is enough for a vocabulary of {size:,} only; set vocab_size to that, or add code")
    path.write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")


class CodeTokenizer:
    """Text to ids, ids to places in the text, and the ids of separators."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.vocabulary: Vocabulary = read_vocabulary(path)
        self._encoder = Encoder(path)
        vocabulary = self._encoder.tokenizer.get_vocab(with_added_tokens=True)
        self.separators = {name: vocabulary[token] for name, token in SEPARATORS.items()}
        self._num_bytes = np.zeros(self.vocabulary.vocab_size, np.int64)
        for token, number in vocabulary.items():
            self._num_bytes[number] = len(token)  # byte-level tokens are spelled with one letter for each byte

    @property
    def end(self) -> int:
        """The id that ends a document."""
        return self.vocabulary.end

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of texts; what looks like a special token in a text is text."""
        return self._encoder.encode(texts)

    def byte_ends(self, ids: Ids) -> NDArray[np.int64]:
        """Return where in the bytes of the text each id ends."""
        return np.cumsum(self._num_bytes[ids])

    def meta(self, split: str) -> dict[str, Any]:
        """Return what a token file tells of its tokenizer."""
        return {
            "vocab_size": self.vocabulary.vocab_size,
            "special_ids": self.vocabulary.special_ids() | self.separators,
            "tokenizer_sha256": checksum(self.path),
            "split": split,
        }


def decisive_bytes(data: bytes, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for tokens that end at `ends`, the byte whose label a token gets.

    It is the first byte of a letter, digit or underscore, else the first that is not white space, else the first:
    tokens such as ` of`, `(self` and `.join` begin with a sign that belongs to something else.

    >>> decisive_bytes(b"f(self), ", np.array([1, 6, 8, 9])).tolist()
    [0, 2, 6, 8]
    """
    raw = np.frombuffer(data, np.uint8)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    found = starts
    for wanted in (~_SPACE, _WORD):
        places = np.where(wanted[raw], np.arange(len(raw)), len(raw))
        following = np.minimum.accumulate(places[::-1])[::-1][starts]
        found = np.where(following < ends, following, found)
    return found


@dataclass(frozen=True)
class Prompted:
    """A prompt, a separator and a target, with the next token as label on the target alone."""

    ids: Ids
    labels: Ids


def prompted(prompt: Ids, separator: int, target: Ids, end: int, max_length: int) -> Prompted:
    """Join a prompt and a target into at most `max_length` tokens; the target has half of them if it needs them.

    The label of a position is the token behind it. So the separator has the first token of the target, and the last
    token of the target the end of the document, if the target is whole.

    >>> one = prompted(np.array([5, 6, 7]), 1, np.array([8, 9]), end=0, max_length=6)
    >>> one.ids.tolist(), one.labels.tolist()
    ([5, 6, 1, 8, 9, 0], [-100, -100, 8, 9, 0, -100])
    """
    goal = np.append(target, end)
    room = max_length - 1
    goal = goal[: max((room + 1) // 2, room - len(prompt))]
    prompt = prompt[: room - len(goal)]
    ids = np.concatenate([prompt, [separator], goal]).astype(np.int64)
    labels = np.full(len(ids), IGNORED, np.int64)
    labels[len(prompt) : -1] = goal
    return Prompted(ids, labels)


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(texts), 64):
        yield list(texts[start : start + 64])


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file that holds an object, {} if it is not there or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
