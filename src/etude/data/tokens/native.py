"""Opening files of the project's own format."""

from collections.abc import Callable

import numpy as np

from etude.core.errors import DataError
from etude.data.tokens.boundaries import Offsets
from etude.data.tokens.file import Label, TokenFile
from etude.data.tokens.layout import PREAMBLE_BYTES, Header, decode_header, decode_preamble
from etude.data.tokens.storage import Storage


def read_header(storage: Storage) -> Header:
    """Read and check preamble and header."""
    offset, size, crc = decode_preamble(storage.read(0, PREAMBLE_BYTES), storage.size, storage.name)
    return decode_header(storage.read(offset, size), crc, offset, storage.size, storage.name)


def open_native(storage: Storage, reopen: Callable[[], TokenFile]) -> TokenFile:
    """Open a file of the project's own format; reads the header and two entries of the index."""
    header = read_header(storage)
    vectors, kinds = {}, {}
    for name, section in header.sections.items():
        dtype = "int64" if section.kind == "index" else section.dtype  # an offset above 2**63 is found to be negative
        vectors[name] = storage.vector(section.offset, section.bytes // np.dtype(dtype).itemsize, dtype)
        kinds[name] = section.kind
    first, last = vectors["index"].take(np.array([0, header.num_samples])).tolist()
    if (first, last) != (0, header.num_tokens):
        raise DataError(
            f"{storage.name} is damaged: its samples go from {first:,} to {last:,}, its tokens from 0 to "
            f"{header.num_tokens:,}; make or copy it again"
        )
    return TokenFile(
        storage.name,
        "etude",
        vectors["tokens"],
        Offsets(vectors["index"]),
        meta=header.meta,
        streams={name: vectors[name] for name, kind in kinds.items() if kind == "stream"},
        labels={
            name: Label(vectors[name], (*header.sections[name].shape, None)[1])
            for name, kind in kinds.items()
            if kind == "label"
        },
        reopen=reopen,
        checksums={name: (vectors[name], section.crc32) for name, section in header.sections.items()},
    )
