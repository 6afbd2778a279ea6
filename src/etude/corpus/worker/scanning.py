"""Finding documents: what each is, by its digest, and where it lies."""

import io
from typing import IO, Any

import numpy as np

from etude.core.files import replacing
from etude.corpus.worker.documents import Skip, cut_at_lines, digests, json_documents, text_documents

REASONS = ("binary", "not UTF-8", "unreadable", "empty", "too short", "too long", "not valid Unicode")
"""Why a file or document is passed over."""

LOCATION = np.dtype(
    {
        "names": ["high", "low", "raw", "num_bytes", "source", "offset", "size"],
        "formats": ["<u8", "<u8", "<u8", "<i8", "<i8", "<i8", "<i8"],
    }
)
"""A document: its digest (of the normalised content, high and low), a digest of its very bytes, how many these are,
the number of its file (negative: that of a file of unpacked text), and which bytes of that file it takes."""


class Scan:
    """Collects the locations of one task's documents; text that has no place of its own goes to a spool file."""

    def __init__(self, task: dict[str, Any], spool: IO[bytes]) -> None:
        self.options, self.number, self.spool = task["options"], task["number"], spool
        self.rows: list[tuple[int, ...]] = []
        self.skipped = dict.fromkeys(REASONS, 0)

    def source(self, number: int, path: str, kind: str, packed: bool, start: int, stop: int) -> None:
        """Take the documents of one file or of a stretch of it: all of them or, if it is passed over, none."""
        mark, spooled = len(self.rows), self.spool.tell()
        cut = self.options["cut_chars"]
        try:
            if kind == "text":
                for offset, text in text_documents(path, packed, cut):
                    self.document(text, None if packed else (number, offset, -1))
                return
            for offset, size, text in json_documents(path, packed, start, stop, self.options["text_key"]):
                if cut and len(text) > cut:
                    for piece in cut_at_lines(io.StringIO(text, newline="\n"), cut):
                        self.document(piece, None)
                else:
                    self.document(text, None if packed else (number, offset, size))
        except Skip as reason:
            del self.rows[mark:]
            self.spool.seek(spooled)
            self.spool.truncate()
            self.skipped[str(reason)] += 1

    def document(self, text: str, place: tuple[int, int, int] | None) -> None:
        """Take one document, unless it is empty, too short or too long."""
        low, high = self.options["min_chars"], self.options["max_chars"]
        reason = ""
        if not text or text.isspace():
            reason = "empty"
        elif len(text) < low:
            reason = "too short"
        elif high and len(text) > high:
            reason = "too long"
        try:
            raw = text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
            reason = "not valid Unicode"
        if reason:
            self.skipped[reason] += 1
            return
        if place is None:
            place = (-1 - self.number, self.spool.tell(), len(raw))
            self.spool.write(raw)
        source, offset, size = place
        found = digests(text, raw, self.options["salt"])
        self.rows.append((*found, len(raw), source, offset, len(raw) if size < 0 else size))


def scan(task: dict[str, Any]) -> dict[str, Any]:
    """Find the documents of some files."""
    with replacing(task["spool"]) as spool:
        found = Scan(task, spool)
        for source in task["sources"]:
            found.source(*source)
    with replacing(task["result"]) as file:
        counts = np.array([found.skipped[reason] for reason in REASONS], np.int64)
        np.savez(file, rows=np.array(found.rows, LOCATION), skipped=counts)
    return {}
