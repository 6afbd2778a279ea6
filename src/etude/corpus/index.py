"""The index of a corpus: unique documents in digest order, divided into splits and chunks."""

import hashlib
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from etude.core.errors import DataError
from etude.corpus.documents import Locations
from etude.corpus.options import CorpusOptions

PART_BYTES = (1 << 19, 4 << 20)
"""Text encoded at a time, in small and large corpora: limits memory, and the work lost when killed."""

SPLITS = ("train", "validation", "test")


class Index:
    """Documents sorted by digest. Test is the beginning and validation the end.

    So changing one share does not move documents between the others, and adding documents moves no existing ones.
    """

    def __init__(self, rows: Locations, options: CorpusOptions) -> None:
        rows = rows[np.lexsort((rows["raw"], rows["low"], rows["high"]))]
        self.num_duplicates = 0
        if not options.keep_duplicates and len(rows):
            # Of documents with one digest, keep the one with the lowest hash of its bytes, whatever the order of
            # files.
            same = (rows["high"][1:] == rows["high"][:-1]) & (rows["low"][1:] == rows["low"][:-1])
            rows = rows[np.concatenate([[True], ~same])]
            self.num_duplicates = int(same.sum())
        self.rows = rows
        test, validation = int(np.searchsorted(rows["high"], _threshold(options.test))), len(rows)
        if options.validation:
            validation = int(np.searchsorted(rows["high"], np.uint64(2**64 - int(_threshold(options.validation)))))
        self.splits = {"train": rows[test:validation]}
        if options.validation:
            self.splits["validation"] = rows[validation:]
        if options.test:
            self.splits["test"] = rows[:test]

    def check(self, options: CorpusOptions) -> None:
        """Raise DataError if a requested split has no documents."""
        for split, rows in self.splits.items():
            if not len(rows):
                share = f"the {split} share of {getattr(options, split)}" if split != "train" else "training"
                raise DataError(
                    f"of {len(self.rows):,} documents none is left for {share}; add documents, change the shares or "
                    "--salt, or split long documents with --cut-chars 20000"
                )

    def parts(self, split: str) -> Iterator[Locations]:
        """Divide a split into chunks of similar size: a few hundred in total, within PART_BYTES."""
        rows, size = self.splits[split], int(np.clip(self.rows["size"].sum() // 256, *PART_BYTES))
        before = np.concatenate([[0], np.cumsum(rows["size"])])
        edges = np.unique([0, *(np.flatnonzero(np.diff(before // size)) + 1), len(rows)]).tolist()
        for start, stop in pairwise(edges):
            yield rows[start:stop]

    def training_sample(self, max_bytes: int) -> Locations:
        """Return the first documents of the training split with at most `max_bytes` together, at least one."""
        total = np.cumsum(self.splits["train"]["size"])
        return self.splits["train"][: max(1, int(np.searchsorted(total, max_bytes, side="right")))]

    def fingerprint(self, facts: dict[str, Any]) -> str:
        """Return a hash of everything that determines the output: the content of the documents, and `facts`."""
        found = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        for column in ("high", "low", "raw"):
            found.update(np.ascontiguousarray(self.rows[column]).data)
        return found.hexdigest()


def _threshold(share: float) -> np.uint64:
    return np.uint64(max(1, int(share * 2**53)) << 11 if share else 0)
