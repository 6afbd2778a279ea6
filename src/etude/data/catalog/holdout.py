"""Splitting a data set: which samples are held out, and a fingerprint that shows whether data has changed."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Lt

from etude.core.errors import DataError
from etude.data.order.permutation import GOLDEN, scramble

Share = Annotated[float, Ge(0), Lt(1)]
Rows = npt.NDArray[np.intp]


def hold_out(keys: npt.NDArray[np.uint64], validation: float, test: float) -> dict[str, Rows]:
    """Return the samples of each part, in order: those with the smallest keys are held out.

    Keys that depend only on a sample's content give splits that do not depend on the order of samples.

    >>> hold_out(np.array([5, 1, 9, 3], dtype=np.uint64), validation=0.25, test=0.25)
    {'train': array([0, 2]), 'validation': array([3]), 'test': array([1])}

    Raises DataError if a requested part would be empty.
    """
    total = len(keys)
    sizes = {"test": round(test * total), "validation": round(validation * total)}
    for part, share in (("validation", validation), ("test", test)):
        if share and not sizes[part]:
            raise DataError(f"{part} is {share} of {total} samples, which is none; set a larger share, 0, or a file")
    if sum(sizes.values()) >= total:
        raise DataError(
            f"validation {validation} and test {test} leave none of {total} samples to train on; lower them"
        )
    is_held = _smallest(keys, sum(sizes.values()))
    held = np.flatnonzero(is_held)
    is_test = _smallest(keys[held], sizes["test"])
    rows = {"train": np.flatnonzero(~is_held), "validation": held[~is_test], "test": held[is_test]}
    return {part: found for part, found in rows.items() if len(found)}


def _smallest(keys: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the `count` smallest keys, the first of equal ones. A full sort would be slower."""
    if count == len(keys):
        return np.ones(count, np.bool_)
    limit = np.partition(keys, count)[count]
    found: npt.NDArray[np.bool_] = keys < limit
    found[np.flatnonzero(keys == limit)[: count - np.count_nonzero(found)]] = True
    return found


def mix_keys(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return 64-bit numbers that depend on the given ones in every bit."""
    return scramble(keys + GOLDEN)


def shares(validation: float | str | None, test: float | str | None) -> tuple[float, float]:
    """Return the shares to hold out: 0 for a part with its own file."""
    return validation if isinstance(validation, float) else 0.0, test if isinstance(test, float) else 0.0


def own_files(validation: float | str, test: float | str) -> dict[str, Path]:
    """Return the parts with their own file or folder."""
    given = {"validation": validation, "test": test}
    return {part: Path(place).expanduser() for part, place in given.items() if isinstance(place, str)}


def fingerprint(parts: Iterable[Any], facts: Mapping[str, Any] | None = None) -> str:
    """Return a digest of arrays, texts and facts.

    >>> fingerprint([np.arange(3)]) == fingerprint([np.arange(3)]) != fingerprint([np.arange(4)])
    True
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype.str}{part.shape}".encode())
            digest.update(np.ascontiguousarray(part).data)
        else:
            digest.update(f"{len(part)}:".encode() + (part.encode() if isinstance(part, str) else part))
    digest.update(repr(sorted((facts or {}).items())).encode())
    return digest.hexdigest()
