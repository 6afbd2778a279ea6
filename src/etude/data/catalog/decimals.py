"""Parsing decimal numbers, many at once: eight characters are one machine word, and a word is eight digits.

Python's `float(text)` takes 100 ns or more, and a table has millions of numbers. This takes 15 to 30 ns.
"""

import threading
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.intp]
Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]

MAX_WORDS = 3
MAX_CHARS = 8 * MAX_WORDS
"""Longer numbers are left to other parsers."""
PADDING = MAX_CHARS + 8
"""Bytes that must precede the first number in its buffer: words are read backwards from the end of a number."""

_MINUS, _ZERO = ord("-"), np.uint8(ord("0"))
_SHORT = [(2**64 - 1) ^ ((1 << (8 * (8 - kept))) - 1) for kept in range(9)]
_LAST = [
    np.array([_SHORT[max(0, min(8, kept - 8 * word))] for kept in range(MAX_CHARS + 1)], dtype=np.uint64)
    for word in range(MAX_WORDS)
]
"""By word, from the last one, and by kept characters: masks that keep the last so many of a number. The first character
of a word is its lowest byte."""
_ZEROS, _OVER_NINE, _HIGH = (np.uint64(int.from_bytes(bytes([byte]) * 8)) for byte in (0x30, 0x76, 0x80))
_BYTE, _WORD_BITS, _TOP = (np.uint64(number) for number in (8, 64, 56))
_STEPS = [
    (np.uint64(2561), np.uint64(8), np.uint64(0x00FF00FF00FF00FF)),
    (np.uint64(6553601), np.uint64(16), np.uint64(0x0000FFFF0000FFFF)),
    (np.uint64(42949672960001), np.uint64(32), np.uint64(0x00000000FFFFFFFF)),
]
"""Factor, shift and mask that put neighbours together: digits to pairs, pairs to fours, fours to eight digits."""
_MAX_DIGITS = 22
"""Powers of ten up to this one are exact in float64."""
_POWERS = 10.0 ** np.arange(32)
_DIVISORS = np.concatenate([np.ones(32), _POWERS, -np.ones(32), -_POWERS])
"""By the number of decimals, plus _POINT if there is a decimal point, plus _NEGATIVE."""
_POINT, _NEGATIVE = np.uint8(32), np.uint8(64)
_EXACT = np.uint64(2**53)
_TOO_MANY = np.uint64(2**63 // 10**16)
_SPLIT = 2.0**27 + 1
_DOUBT = 2.0**-44


class DecimalParser(threading.local):
    """Parses numbers of the forms `-12.5` and `1.25e-05`. Each thread has its own memory.

    >>> text = np.frombuffer(b" " * PADDING + b"-12.5,7 ", np.uint64)
    >>> DecimalParser().parse(text, np.array([32, 38]), np.array([37, 39]), decimals=np.array([1, 1]))
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
        words = self._words(text, ends, -(-longest // 8))
        return np.array([word & last.take(lengths) for word, last in zip(words, _LAST, strict=False)])

    def parse(self, text: Words, starts: Places, ends: Places, decimals: Places) -> tuple[Numbers, Flags]:
        """Return the numbers from each start to its end, and which of them have another form and are not parsed.

        `decimals` is the number of characters after the decimal point, or all of them if there is none. The first
        number begins at PADDING or later. A number is the float64 nearest to its text.
        """
        power = self._array("power", np.intp, len(ends))
        whole, bad = self._signed(text, starts, ends, decimals, power)
        values, in_doubt = _divide(whole, _DIVISORS.take(power, mode="clip"))
        bad[in_doubt] = True
        if bad.any():
            at = np.flatnonzero(bad & (ends - starts > 4))
            at = at[text.view(np.uint8).take(ends[at] - 4) | 0x20 == ord("e")]
            values[at], bad[at] = self._exponents(text, starts[at], ends[at], decimals[at])
        return values, bad

    def _exponents(self, text: Words, starts: Places, ends: Places, decimals: Places) -> tuple[Numbers, Flags]:
        """Parse numbers with an exponent, such as e-05."""
        power = np.empty_like(ends)
        whole, bad = self._signed(text, starts, ends - 4, decimals - 4, power)
        sign, tens, ones = (text.view(np.uint8).take(ends - place) for place in (3, 2, 1))
        bad |= (tens - _ZERO > 9) | (ones - _ZERO > 9) | ((sign != _MINUS) & (sign != ord("+")))
        exponents = 10 * (tens - _ZERO).astype(np.intp) + (ones - _ZERO)
        exponents[sign == _MINUS] *= -1
        divisors = _DIVISORS.take(power, mode="clip")
        exponents -= np.where(power & _POINT, power & 31, 0)
        larger = exponents > 0
        bad |= (np.abs(exponents) > _MAX_DIGITS) | (larger & (whole > _EXACT))
        powers = _POWERS.take(np.abs(exponents), mode="clip")
        signs = np.sign(divisors)
        values, in_doubt = _divide(whole, np.where(larger, 1.0, powers) * signs)
        bad[in_doubt] = True
        values[larger] = whole[larger] * powers[larger] * signs[larger]
        return values, bad

    def _signed(
        self, text: Words, starts: Places, ends: Places, decimals: Places, power: Places
    ) -> tuple[Words, Flags]:
        """Return numbers without sign and decimal point, and which are none; write the places of their divisors."""
        digits = self._array("digits", np.intp, len(ends))
        np.subtract(ends, starts, out=digits)
        has_point = decimals < digits
        negative = text.view(np.uint8).take(starts, mode="clip") == _MINUS
        np.add(decimals, has_point * _POINT + negative * _NEGATIVE, out=power)
        digits -= np.add(has_point, negative, dtype=np.uint8)
        bad = digits < 1
        bad |= digits > _MAX_DIGITS
        return self._whole(text, ends, decimals, digits, bad), bad

    def _whole(
        self, text: Words, ends: Places, decimals: Places, digits: Places, bad: Flags, first: int = 0
    ) -> Words:
        """Return the numbers without their decimal points; the last 8 * first of `digits` are skipped (as zeros)."""
        size = len(ends)
        count = first + 1
        while count < MAX_WORDS and 2 * np.count_nonzero(digits > 8 * count) > size:
            count += 1
        words = self._words(text, ends - 8 * first if first else ends, count - first + 1)
        other, mask = (self._array(name, np.uint64, size) for name in ("other", "mask"))
        total = np.zeros(size, np.uint64)
        for number in range(first, count):  # from the last word backwards
            word, behind = words[number - first], words[number - first + 1]
            # Characters before the decimal point move by one, over the point.
            np.left_shift(word, _BYTE, out=other)
            other |= np.right_shift(behind, _TOP, out=mask)
            word ^= other
            word &= _LAST[number].take(decimals, out=mask, mode="clip")
            word ^= other
            word ^= _ZEROS
            word &= _LAST[number].take(digits, out=mask, mode="clip")
            np.add(word, _OVER_NINE, out=other)
            other |= word
            if np.bitwise_or.reduce(other) & _HIGH:
                bad |= (other & _HIGH) != 0
            for factor, shift, kept in _STEPS:
                word *= factor
                word >>= shift
                word &= kept
            if number == MAX_WORDS - 1:
                bad |= word >= _TOO_MANY
            total += np.multiply(word, np.uint64(10 ** (8 * number)), out=word)
        if count < MAX_WORDS and len(longer := np.flatnonzero(digits > 8 * count)):
            wrong = np.zeros(len(longer), np.bool_)
            total[longer] += self._whole(text, ends[longer], decimals[longer], digits[longer], wrong, count)
            bad[longer] |= wrong
        return total

    def _words(self, text: Words, ends: Places, count: int) -> list[Words]:
        """Return the eight characters before each end, then the eight before those, and so on.

        Each is combined from two aligned words: NumPy would copy an unaligned array as a whole.
        """
        size = len(ends)
        index = self._array("index", np.intp, size)
        shift, back, part = (self._array(name, np.uint64, size) for name in ("shift", "back", "part"))
        words = [self._array(f"word {number}", np.uint64, size) for number in range(count + 1)]
        np.left_shift(np.bitwise_and(ends, 7, out=index), 3, out=shift, casting="unsafe")
        np.subtract(_WORD_BITS, shift, out=back)
        np.right_shift(ends, 3, out=index)
        text.take(index, out=words[0], mode="clip")
        for word, before in pairwise(words):
            index -= 1
            text.take(index, out=before, mode="clip")
            word <<= back  # all of it is shifted out if the end is aligned
            word |= np.right_shift(before, shift, out=part)
        return words[:count]

    def _array(self, name: str, dtype: Any, size: int) -> npt.NDArray[Any]:
        if name not in self._memory or len(self._memory[name]) < size:
            self._memory[name] = np.empty(size, dtype)
        return self._memory[name][:size]


def _divide(whole: Words, divisors: Numbers) -> tuple[Numbers, Places]:
    """Return the float64 nearest to each quotient, and those in doubt: near the midpoint of two floats.

    Both operands are exact up to 2^53. For larger numbers the remainder of a first quotient is exact (Dekker's
    product), so the second one has nearly twice the precision.
    """
    values = whole.view(np.int64) / divisors
    at = np.flatnonzero(whole > _EXACT)
    whole, divisors = whole[at], divisors[at]
    high = whole.astype(np.float64)
    low = (whole - high.astype(np.uint64)).view(np.int64)
    first = values[at]
    product = first * divisors
    (a, b), (c, d) = _halves(first), _halves(divisors)
    remainder = (high - product) - (((a * c - product) + a * d + b * c) + b * d)
    second = (remainder + low) / divisors
    values[at] = first + second * (1 + _DOUBT)
    return values, at[values[at] != first + second * (1 - _DOUBT)]


def _halves(values: Numbers) -> tuple[Numbers, Numbers]:
    large = values * _SPLIT
    upper = large - (large - values)
    return upper, values - upper
