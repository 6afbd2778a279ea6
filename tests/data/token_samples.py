"""Small token files for the tests of reading, and documents for hypothesis."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from etude.data import TokenWriter, open_tokens


def write_tokens(path, documents, *, streams=(), labels=None, vocab_size=None, dtype="uint16"):
    """A token file of these documents; a stream of name n has the values that `stream_values` gives."""
    meta = {} if vocab_size is None else {"vocab_size": vocab_size}
    labels = labels or {}
    kinds = {name: _kind(np.asarray(values)) for name, values in labels.items()}
    with TokenWriter(
        path, dtype=dtype, streams=dict.fromkeys(streams, "int32"), sample_labels=kinds, meta=meta
    ) as out:
        for number, ids in enumerate(documents):
            per_token = {name: stream_values(name, ids) for name in streams}
            own = {name: np.asarray(values)[number] for name, values in labels.items()}
            out.add(ids, streams=per_token, labels=own)
    return path


def stream_values(name, ids):
    """Made-up values of a stream: they differ by stream, and tell which token they belong to."""
    return [len(name) * 1000 + value % 7 for value in ids]


def _kind(values):
    return str(values.dtype) if values.ndim == 1 else (str(values.dtype), values.shape[1])


def numbered(lengths):
    """Documents of these lengths in which no id occurs twice."""
    ends = np.cumsum(lengths)
    return [list(range(end - length + 1, end + 1)) for end, length in zip(ends.tolist(), lengths, strict=True)]


def opened_documents(documents, **options):
    """An open token file of its own, gone from the disk; what is mapped stays readable."""
    with tempfile.TemporaryDirectory() as folder:
        return open_tokens(write_tokens(Path(folder) / "tokens.bin", documents, **options))


def everything(source, *, batch=5, epoch=0, seed=0):
    """All samples of a source, in batches."""
    for start in range(0, len(source), batch):
        yield source.gather(np.arange(start, min(start + batch, len(source))), epoch=epoch, seed=seed)


document_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any)
