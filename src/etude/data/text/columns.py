"""The contents of a batch from a token file: which labels and streams, under which names."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.core.batch import DOCUMENT_STARTS
from etude.core.errors import DataError
from etude.data.order.permutation import Indices
from etude.data.text.padding import IGNORED, Array
from etude.data.tokens.file import TokenFile
from etude.data.tokens.opening import open_tokens

LABELS = "labels"
OWN_KEYS = ("input_ids", "attention_mask", "position_ids", "document_ids", DOCUMENT_STARTS)


def opened(file: TokenFile | str | Path) -> TokenFile:
    """Return the file, opened if it is a path."""
    return file if isinstance(file, TokenFile) else open_tokens(file)


class Columns:
    """The labels of a batch, and the other streams of the file.

    `labels` selects them ("next", "none", the name of a stream or of a sample label); the default depends on the
    file. Without `whole` documents the labels of samples are omitted.
    """

    def __init__(self, file: TokenFile, labels: str | None, *, whole: bool) -> None:
        samples = file.sample_labels if whole else ()
        if clash := [name for name in (*file.streams, *samples) if name in OWN_KEYS]:
            raise DataError(
                f"{file.path} has a stream or label {clash[0]!r}, which batches use themselves; rename it"
            )
        if labels is None:
            own = next((name for name in ("label", LABELS) if name in samples), None)
            labels = own or (LABELS if LABELS in file.streams else "next")
        elif labels not in (known := ("next", "none", *file.streams, *samples)):
            raise DataError(f"labels is {labels!r}; {file.path} allows {', '.join(known)}")
        self._file, self.labels, taken = file, labels, (labels, LABELS)
        self.streams = tuple(name for name in file.streams if name not in taken)
        self.samples = {name: name for name in samples if name not in taken}
        """Labels of samples by their key in the batch."""
        if labels in samples and labels not in file.streams:
            self.samples[LABELS] = labels
        self._padding = _padding(file)

    def add(
        self, batch: dict[str, Tensor], read: Callable[[str, int], Array], next_tokens: Callable[[], Array]
    ) -> None:
        """Add labels and streams to a batch; `read` returns a padded stream."""
        if self.labels == "next":
            batch[LABELS] = torch.from_numpy(next_tokens())
        elif self.labels in self._file.streams:
            batch[LABELS] = torch.from_numpy(read(self.labels, IGNORED))
        for name in self.streams:
            batch[name] = torch.from_numpy(read(name, self._padding.get(name, 0)))

    def add_samples(self, batch: dict[str, Tensor], documents: Indices) -> None:
        """Add the labels of documents, (n,) or (n, width): integers as int64, others as float32."""
        for key, name in self.samples.items():
            values = self._file.label(name, documents)
            batch[key] = torch.from_numpy(values.astype(np.int64 if values.dtype.kind in "iub" else np.float32))


def _padding(file: TokenFile) -> dict[str, int]:
    """The padding values of streams according to the file's metadata."""
    padding: Any = file.meta.get("padding", {})
    if not isinstance(padding, Mapping) or not all(type(value) is int for value in padding.values()):
        raise DataError(
            f"{file.path} has padding {padding!r} in its metadata; it must map names of streams to integers"
        )
    return dict(padding)
