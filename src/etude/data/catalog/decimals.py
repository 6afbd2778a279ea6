"""Decimal numbers of a text, many at once: eight characters are one machine word, and a word is eight digits.

Python needs 100 ns and more for `float(text)`, and a table has millions of numbers. This takes 30 ns.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.intp]
Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]

MAX_WORDS = 3
PADDING = 8 * MAX_WORDS
"""Bytes that must precede the first number in its buffer: words are read backwards from the end of a number."""
MAX_CHARS = 8 * MAX_WORDS
"""Longer numbers are left to others."""

_MINUS = ord("-")
_LAST = np.array([(2**64 - 1) ^ ((1 << (8 * (8 - kept))) - 1) for kept in range(9)], dtype=np.uint64)
"""Masks that keep the last so many characters of a word; the first character is the lowest byte."""
_ZEROS, _OVER_NINE, _HIGH = (np.uint64(int.from_bytes(bytes([byte]) * 8)) for byte in (0x30, 0x76, 0x80))
_PAIRS = np.uint64(0x000000FF000000FF)
_UPPER, _LOWER = np.uint64(0x000F424000000064), np.uint64(0x0000271000000001)
_TEN, _BYTE, _TWO_BYTES, _HALF, _TOP = (np.uint64(number) for number in (10, 8, 16, 32, 56))
_POWERS = 10.0 ** np.arange(MAX_CHARS)
_ALL = 2 * MAX_CHARS


class DecimalParser:
    """Reads numbers of the form `-12.5`. It works in memory of its own: allocating takes longer than computing.

    >>> text = np.frombuffer(b" " * PADDING + b"-12.5,7", np.uint8)
    >>> DecimalParser().parse(text, np.array([24, 30]), np.array([29, 31]), decimals=np.array([1, -1]))
    (array([-12.5,   7. ]), array([False, False]))
    """

    def __init__(self) -> None:
        self._memory: dict[str, npt.NDArray[Any]] = {}

    def parse(self, buffer: Bytes, starts: Places, ends: Places, decimals: Places) -> tuple[Numbers, Flags]:
        """Return the numbers at buffer[start:end], and which of them have another form, for others to read.

        `decimals` says how many characters follow the decimal point, -1 where there is none. The first number begins
        at PADDING or later. Numbers of up to 15 digits are the nearest float64, longer ones within 2 units in the last
        place.
        """
        size = len(ends)
        index, digits, kept = (self._array(name, np.intp, size) for name in ("index", "digits", "kept"))
        word, behind, moved, mask = (
            self._array(name, np.uint64, size) for name in ("word", "behind", "moved", "mask")
        )
        negative = buffer.take(starts, mode="clip") == _MINUS
        np.subtract(ends, starts, out=digits)
        longest = int(digits.max(initial=0))
        bad = digits > MAX_CHARS
        digits -= negative
        digits -= decimals >= 0
        bad |= digits < 1
        np.minimum(decimals.view(np.uintp), _ALL, out=kept.view(np.uintp))  # without a point, all that there is
        words: Words = np.ndarray((len(buffer) - 7,), dtype="<u8", buffer=buffer, strides=(1,))
        words.take(np.subtract(ends, 8, out=index), out=behind, mode="clip")
        values, count = np.zeros(size), min(MAX_WORDS, -(-longest // 8))
        for number in range(count):  # from the last word backwards
            word, behind = behind, word
            if number + 1 < count:
                words.take(np.subtract(index, 8, out=index), out=behind, mode="clip")
            # What precedes the decimal point moves by one character, over the point.
            np.left_shift(word, _BYTE, out=moved)
            moved |= np.right_shift(behind, _TOP, out=mask)
            self._last(kept, 8 * number, out=mask)
            word &= mask
            moved &= np.invert(mask, out=mask)
            word |= moved
            self._last(digits, 8 * number, out=mask)
            word ^= _ZEROS
            word &= mask
            bad |= _other_than_digits(word, out=moved)
            values += _as_number(word, moved) * 10.0 ** (8 * number)
        values /= _POWERS.take(np.clip(decimals, 0, None, out=kept), mode="clip")
        values *= 1.0 - 2.0 * negative
        return values, bad

    def _last(self, number: Places, before: int, out: Words) -> None:
        """Write the masks that keep `number - before` characters of a word, from its end."""
        kept = self._array("clipped", np.intp, len(number))
        np.clip(np.subtract(number, before, out=kept), 0, 8, out=kept)
        _LAST.take(kept, out=out, mode="clip")

    def _array(self, name: str, dtype: Any, size: int) -> npt.NDArray[Any]:
        if name not in self._memory or len(self._memory[name]) < size:
            self._memory[name] = np.empty(size, dtype)
        return self._memory[name][:size]


def _other_than_digits(word: Words, out: Words) -> Flags:
    """Return whether one of the eight bytes is more than 9."""
    np.add(word, _OVER_NINE, out=out)
    out |= word
    out &= _HIGH
    found: Flags = out != 0
    return found


def _as_number(word: Words, other: Words) -> Words:
    """Turn eight digits, one in each byte, into a number: pairs, then fours, then all of them, in place."""
    np.right_shift(word, _BYTE, out=other)
    word *= _TEN
    word += other
    np.right_shift(word, _TWO_BYTES, out=other)
    word &= _PAIRS
    word *= _UPPER
    other &= _PAIRS
    other *= _LOWER
    word += other
    word >>= _HALF
    return word
