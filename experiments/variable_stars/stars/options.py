"""What can be chosen about the data, and which stars it then has, by hashes of their names."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from etude.core.errors import DataError

DEFAULT_OUT = "data/variable_stars"
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Options:
    """Sizes of the data."""

    max_per_class: int = 3000
    min_per_class: int = 60
    bins: int = 128
    image_codes: int = 256
    spectrum_codes: int = 256
    validation: float = 0.1
    test: float = 0.15

    def __post_init__(self) -> None:
        for name in ("max_per_class", "min_per_class", "bins", "image_codes", "spectrum_codes"):
            if getattr(self, name) < 2:
                raise DataError(f"{name} is {getattr(self, name)}; it must be at least 2")
        if not (self.validation > 0 and self.test > 0 and self.validation + self.test < 1):
            raise DataError(
                f"validation {self.validation} and test {self.test} must be positive and leave something to train on"
            )

    def facts(self) -> dict[str, Any]:
        """Return the options as plain data."""
        return asdict(self)


def share(star: str, purpose: str) -> float:
    """Return a number in 0 … 1 that depends on a star's name alone, another one for every purpose.

    >>> round(share("OGLE-LMC-CEP-0001", "split"), 4)
    0.7955
    """
    digest = hashlib.blake2b(f"{purpose} {star}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def split_of(star: str, options: Options) -> str:
    """Return the split of a star, the same on every machine and however many stars there are."""
    place = share(star, "split")
    if place < options.test:
        return "test"
    return "validation" if place < options.test + options.validation else "train"


def choose(stars: Sequence[str], classes: Sequence[str], options: Options) -> tuple[list[int], list[str]]:
    """Return the rows of the stars to take, in order, and the names of their classes.

    Classes with fewer than `min_per_class` stars are left out; of the others at most `max_per_class` are taken, those
    with the smallest hashes.
    """
    counts = Counter(classes)
    names = sorted(name for name, count in counts.items() if count >= options.min_per_class)
    by_class: dict[str, list[int]] = {name: [] for name in names}
    for row, name in enumerate(classes):
        if name in by_class:
            by_class[name].append(row)
    rows: list[int] = []
    for name in names:
        ordered = sorted(by_class[name], key=lambda row: share(stars[row], "choice"))
        rows += ordered[: options.max_per_class]
    return sorted(rows), names
