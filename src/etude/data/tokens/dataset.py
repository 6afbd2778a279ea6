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

    A file that knows no documents (a headerless one without `document_end`) is streamed in blocks of `block_size`
    tokens. Takes the options of `open_tokens`. Raises DataError if there is no such split, or its file is damaged.
    """
    file = open_tokens(find_split(root, split), **options)
    return iter(file) if file.has_documents else _blocks(file, block_size)


def find_split(root: str | Path, split: str) -> str:
    """Return the file of a split; raises DataError, with the splits there are, if there is none."""
    root = str(root).rstrip("/") or "/"
    folders = [f"{root}/tokenized", root]
    for folder in folders:
        if exists(path := f"{folder}/{split}.bin"):
            return path
    found: set[str] = set()
    if not is_remote(root):
        found = {path.stem for folder in folders for path in local_path(folder).glob("*.bin")}
    there = (
        f"the splits there are: {', '.join(sorted(found))}"
        if found
        else "no split is there; `etude tokenize` makes them"
    )
    raise DataError(f"there is no {root}/tokenized/{split}.bin and no {root}/{split}.bin; {there}")


def _blocks(file: TokenFile, size: int) -> Iterator[Sample]:
    if size < 1:
        raise DataError(f"block_size must be at least 1, found {size}")
    behind = 0
    for start in range(0, file.num_tokens, size):
        length = min(size, file.num_tokens - start)
        ahead = min(length + 1, file.num_tokens - start)
        tokens = file.rows([start], ahead)[0].astype(np.int64)
        labels = np.append(tokens[1:], [IGNORED] * (length + 1 - ahead))
        yield Sample(tokens[:length], np.ones(length, np.int64), labels)
        if (start - behind) * file.dtype.itemsize > CHUNK_BYTES:
            file.forget()
            behind = start
