"""Texts of a column as codes, block by block: short texts are looked up as machine words, many at once."""

import hashlib
from collections.abc import Iterable
from itertools import islice

import numpy as np
import numpy.typing as npt

from etude.data.catalog.delimited import MISSING, Block
from etude.data.catalog.holdout import mix_keys

Codes = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint64]
_FACTORS = mix_keys(np.arange(3, dtype=np.uint64)) | np.uint64(1)
_FACTORS[0] = 1
_MAX_HASHED = 1000
"""With more distinct texts, a Python dictionary is faster."""


class Texts:
    """The distinct texts of a column: codes in order of first appearance, -1 for a missing value."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self._digests = np.array([_digest("")], np.uint64)
        # Known texts in the order of their hashes; the first is an empty text.
        self._hashes, self._codes = np.zeros(1, np.uint64), np.full(1, -1, np.int32)
        self._words = np.zeros((1, len(_FACTORS)), np.uint64)

    def encode(self, texts: Iterable[str]) -> Codes:
        """Return the codes of texts."""
        known = self.known
        codes = [-1 if _is_missing(text) else known.setdefault(text, len(known)) for text in texts]
        return np.array(codes, dtype=np.int32)

    def encode_column(self, block: Block, column: int) -> Codes:
        """Return the codes of a block's column."""
        if (places := block.categories(column)) is not None:
            return self.encode(places[1]).take(places[0])
        words = block.words(column) if len(self.known) <= _MAX_HASHED else None
        found = None if words is None else self._look_up(block, column, words)
        return self.encode(block.texts(column)) if found is None else found

    def _look_up(self, block: Block, column: int, words: Keys) -> Codes | None:
        """Look up texts by hashes of their words (words, rows); None if two of them have the same hash."""
        hashes = words[0] if len(words) == 1 else (words * _FACTORS[: len(words), None]).sum(0, dtype=np.uint64)
        place = np.searchsorted(self._hashes, hashes)
        new = np.flatnonzero(self._hashes.take(place, mode="clip") != hashes)
        if len(new):
            rows = np.sort(new[np.unique(hashes[new], return_index=True)[1]])
            self._add(hashes[rows], words[:, rows], self.encode(block.texts(column, rows.tolist())))
            place = np.searchsorted(self._hashes, hashes)
        if len(words) > 1 or self._words[:, 1:].any():  # otherwise the hash is the word itself
            found = self._words[place].T
            if not np.array_equal(found[: len(words)], words) or found[len(words) :].any():
                return None
        codes: Codes = self._codes[place]
        return codes

    def _add(self, hashes: Keys, words: Keys, codes: Codes) -> None:
        padded = np.zeros((len(hashes), len(_FACTORS)), np.uint64)
        padded[:, : len(words)] = words.T
        hashes = np.concatenate([self._hashes, hashes])
        order = np.argsort(hashes)
        self._hashes, self._codes = hashes[order], np.concatenate([self._codes, codes])[order]
        self._words = np.concatenate([self._words, padded])[order]

    def keys(self, codes: Codes) -> Keys:
        """Return a number for each row that depends only on its text."""
        if count := len(self.known) + 1 - len(self._digests):
            new = [_digest(text) for text in islice(reversed(self.known), count)]
            self._digests = np.concatenate([self._digests, np.array(new[::-1], np.uint64)])
        keys: Keys = self._digests.take(codes + 1)
        return keys


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _is_missing(text: str) -> bool:
    return not text or (len(text) < 5 and text.lower() in MISSING)
