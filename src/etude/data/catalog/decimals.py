"""Decimal numbers of a text, many at once: eight characters are one machine word, and a word is eight digits.

Python needs 100 ns and more for `float(text)`, and a table has millions of numbers. This takes 20 ns.
"""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

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
_SHORT = [(2**64 - 1) ^ ((1 << (8 * (8 - kept))) - 1) for kept in range(9)]
_LAST = [
    np.array([_SHORT[max(0, min(8, kept - 8 * word))] for kept in range(8 * MAX_WORDS + 1)], dtype=np.uint64)
    for word in range(MAX_WORDS)
]
"""By word, from the last one, and by kept characters: masks that keep the last so many of a number. The first character
of a word is its lowest byte."""
_ZEROS, _OVER_NINE, _HIGH = (np.uint64(int.from_bytes(bytes([byte]) * 8)) for byte in (0x30, 0x76, 0x80))
_PAIRS = np.uint64(0x000000FF000000FF)
_UPPER, _LOWER = np.uint64(0x000F424000000064), np.uint64(0x0000271000000001)
_TEN, _BYTE, _TWO_BYTES, _HALF, _TOP = (np.uint64(number) for number in (10, 8, 16, 32, 56))
_POWERS = 10.0 ** np.arange(MAX_CHARS)
_SIGNED_POWERS = np.concatenate([_POWERS, -_POWERS])
_WORD_BITS = np.uint64(64)


class DecimalParser(threading.local):
    """Reads numbers of the form `-12.5`. Each thread works in memory of its own.

    >>> text = np.frombuffer(b" " * PADDING + b"-12.5,7 ", np.uint64)
    >>> DecimalParser().parse(text, np.array([24, 30]), np.array([29, 31]), decimals=np.array([1, 1]))
    (array([-12.5,   7. ]), array([False, False]))
    """

    def __init__(self) -> None:
        self._memory: dict[str, npt.NDArray[Any]] = {}

    def words(self, text: Words, starts: Places, ends: Places) -> Words | None:
        """Return the characters from each start to its end as words (words, texts), the last one first.

        None if some are longer than MAX_CHARS.
        """
        lengths = ends - starts
        longest = int(lengths.max(initial=1))
        if longest > MAX_CHARS:
            return None
        words = self._words(text, ends, np.empty_like(lengths))
        return np.array([next(words) & _LAST[place].take(lengths) for place in range(-(-longest // 8))])

    def parse(self, text: Words, starts: Places, ends: Places, decimals: Places) -> tuple[Numbers, Flags]:
        """Return the numbers from each start to its end, and which of them have another form, for others to read.

        `decimals` says how many characters follow the decimal point, all of them where there is none. The first number
        begins at PADDING or later. Numbers of up to 15 digits are the nearest float64, longer ones within 2 units in
        the last place.
        """
        size = len(ends)
        digits, power = (self._array(name, np.intp, size) for name in ("digits", "power"))
        np.subtract(ends, starts, out=digits)
        bad = digits > MAX_CHARS
        has_point = decimals < digits
        digits -= has_point
        negative = text.view(np.uint8).take(starts, mode="clip") == _MINUS
        digits -= negative
        bad |= digits < 1
        num_words = min(MAX_WORDS, -(-int(digits.max(initial=1)) // 8))
        longer = np.flatnonzero(digits > 8) if num_words > 1 else digits[:0]
        are_few = 4 * len(longer) < size
        values = self._digits(text, ends, decimals, digits, bad, 1 if are_few else num_words)
        np.multiply(decimals, has_point, out=power)
        power += np.multiply(negative, len(_POWERS), out=digits)
        values /= _SIGNED_POWERS.take(power, mode="clip")
        if are_few and len(longer):
            values[longer], bad[longer] = self.parse(text, starts[longer], ends[longer], decimals[longer])
        return values, bad

    def _digits(self, text: Words, ends: Places, decimals: Places, digits: Places, bad: Flags, count: int) -> Numbers:
        """Return the numbers that the last `digits` characters before each end make, without the decimal point."""
        size = len(ends)
        other, mask = (self._array(name, np.uint64, size) for name in ("other", "mask"))
        values = np.zeros(size)
        words = self._words(text, ends, self._array("index", np.intp, size))
        behind = next(words)
        for number in range(count):  # from the last word backwards
            word, behind = behind, next(words)
            # What precedes the decimal point moves by one character, over the point.
            np.left_shift(word, _BYTE, out=other)
            other |= np.right_shift(behind, _TOP, out=mask)
            _LAST[number].take(decimals, out=mask, mode="clip")
            word &= mask
            other &= np.invert(mask, out=mask)
            word |= other
            _LAST[number].take(digits, out=mask, mode="clip")
            word ^= _ZEROS
            word &= mask
            bad |= _other_than_digits(word, out=other)
            found = _as_number(word, other)
            values += found if number == 0 else found * 10.0 ** (8 * number)
        return values

    def _words(self, text: Words, ends: Places, index: Places) -> Iterator[Words]:
        """Yield the eight characters before each end, then the eight before those, and so on.

        Each is put together of two aligned words: NumPy would copy an unaligned array as a whole.
        """
        size = len(ends)
        low, high, first, second, shift, back = (
            self._array(name, np.uint64, size) for name in ("low", "high", "first", "second", "shift", "back")
        )
        np.left_shift(np.bitwise_and(ends, 7, out=index), 3, out=shift, casting="unsafe")
        np.subtract(_WORD_BITS, shift, out=back)
        np.right_shift(ends, 3, out=index)
        text.take(index, out=high, mode="clip")
        while True:
            index -= 1
            text.take(index, out=low, mode="clip")
            np.right_shift(low, shift, out=first)
            first |= np.left_shift(high, back, out=high)  # all of it is shifted out where the end is aligned
            yield first
            low, high, first, second = high, low, second, first

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
