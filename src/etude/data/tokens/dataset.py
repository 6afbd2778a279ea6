"""read_dataset: the samples of a split, one after the other, in constant memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.errors import DataError
from etude.data.tokens.file import IGNORED, Sample, TokenFile
from etude.data.tokens.opening import open_tokens
from etude.data.tokens.places import exists, is_remote, local_path
from etude.data.tokens.vectors import CHUNK_BYTES


def read_dataset(root: str | Path, split: str, *, block_size: int = 1024, **options: Any) -> Iterator[Sample]:
    """Stream the samples of `root/tokenized/{split}.bin`, or of `root/{split}.bin`, in order.

    A file without document boundaries (a flat one without `document_end`) is streamed in blocks of `block_size`
    tokens. Accepts the options of `open_tokens`. Raises DataError if there is no such split, or its file is damaged.
    """
    file = open_tokens(find_split(root, split), **options)
    return iter(file) if file.has_documents else _blocks(file, block_size)


def find_split(root: str | Path, split: str) -> str:
    """Return the file of a split; raises DataError with the available splits if there is none."""
    root = str(root).rstrip("/") or "/"
    folders = [f"{root}/tokenized", root]
    for folder in folders:
        if exists(path := f"{folder}/{split}.bin"):
            return path
    found = [] if is_remote(root) else [path for folder in folders for path in local_path(folder).glob("*.bin")]
    splits = ", ".join(sorted({path.stem for path in found}))
    there = f"the splits there are: {splits}" if splits else "no split is there; `etude tokenize` makes them"
    raise DataError(f"there is no {root}/tokenized/{split}.bin and no {root}/{split}.bin; {there}")


def _blocks(file: TokenFile, size: int) -> Iterator[Sample]:
    if size < 1:
        raise DataError(f"block_size must be at least 1, found {size}")
    tokens = file.vectors[None]
    for start in range(0, tokens.count, size):
        values = tokens.slice(start, start + size + 1).astype(np.int64)
        ids, labels = values[:size], values[1:]
        if len(labels) < len(ids):
            labels = np.append(labels, IGNORED)
        yield Sample(ids, np.ones(len(ids), np.int64), labels)
        if start % (CHUNK_BYTES // tokens.dtype.itemsize) < size:
            file.forget()
