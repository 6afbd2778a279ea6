"""The index of a corpus: every document once, in the order of its digest, cut into splits and parts."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.core.errors import DataError
from etude.corpus.options import CorpusOptions
from etude.corpus.worker.scanning import LOCATION, REASONS

PART_BYTES = (1 << 19, 16 << 20)
"""How much text is encoded at a time, in small and in large corpora: little is lost when killed."""

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Part:
    """A stretch of the index that is encoded at once."""

    split: str
    number: int
    start: int
    stop: int
    num_bytes: int


class Index:
    """Documents sorted by digest. Test is its first stretch and validation its last, so either share can be changed
    without moving documents between the other and the rest, and more documents never move those that are there."""

    def __init__(self, rows: NDArray[Any], options: CorpusOptions) -> None:
        order = np.lexsort((rows["raw"], rows["low"], rows["high"]))
        rows = rows[order]
        self.num_duplicates = 0
        if not options.keep_duplicates and len(rows):
            # Of documents with one digest the one whose bytes hash lowest stays, whatever the order of the files.
            same = (rows["high"][1:] == rows["high"][:-1]) & (rows["low"][1:] == rows["low"][:-1])
            rows = rows[np.concatenate([[True], ~same])]
            self.num_duplicates = int(same.sum())
        self.rows = rows
        test = int(np.searchsorted(rows["high"], _threshold(options.test)))
        validation = len(rows)
        if options.validation:
            validation = int(np.searchsorted(rows["high"], np.uint64(2**64 - int(_threshold(options.validation)))))
        self.ranges = {"train": (test, validation)}
        if options.validation:
            self.ranges["validation"] = (validation, len(rows))
        if options.test:
            self.ranges["test"] = (0, test)

    def check(self, options: CorpusOptions) -> None:
        """Raise DataError if a split that was asked for has no documents."""
        for split, (start, stop) in self.ranges.items():
            if start == stop:
                share = f"the {split} share of {getattr(options, split)}" if split != "train" else "training"
                raise DataError(
                    f"of {len(self.rows):,} documents none is left for {share}; give more documents, other shares, "
                    f"another --salt, or cut long documents into more with --cut-chars 20000"
                )

    def parts(self) -> list[Part]:
        """Cut the splits into parts of about one size: some hundreds of them, within PART_BYTES."""
        found, size = [], int(np.clip(self.rows["num_bytes"].sum() // 256, *PART_BYTES))
        for split, (start, stop) in self.ranges.items():
            before = np.concatenate([[0], np.cumsum(self.rows["num_bytes"][start:stop])])
            cuts = np.flatnonzero(np.diff(before // size)) + 1
            edges = np.unique([0, *cuts.tolist(), stop - start]).tolist()
            for number, (low, high) in enumerate(pairwise(edges)):
                found.append(Part(split, number, start + low, start + high, int(before[high] - before[low])))
        return found

    def training_sample(self, max_bytes: int) -> tuple[int, int]:
        """Return the first documents of the training split that together have at most `max_bytes`, at least one."""
        start, stop = self.ranges["train"]
        total = np.cumsum(self.rows["num_bytes"][start:stop])
        return start, start + max(1, int(np.searchsorted(total, max_bytes, side="right")))

    def fingerprint(self, facts: dict[str, Any]) -> str:
        """Return a hash of all that decides the output: the content of the documents, and `facts`."""
        found = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        for column in ("high", "low", "raw"):
            found.update(np.ascontiguousarray(self.rows[column]).data)
        return found.hexdigest()


def _threshold(share: float) -> np.uint64:
    return np.uint64(max(1, int(share * 2**53)) << 11 if share else 0)


def read_scans(paths: Sequence[Path]) -> tuple[NDArray[Any], dict[str, int]]:
    """Return the documents that were found, and how many were passed over, by reason."""
    rows, skipped = [np.zeros(0, LOCATION)], np.zeros(len(REASONS), np.int64)
    for path in paths:
        with np.load(path) as scan:
            rows.append(scan["rows"])
            skipped += scan["skipped"]
    return np.concatenate(rows), {reason: int(n) for reason, n in zip(REASONS, skipped, strict=True) if n}
