"""What of a token file goes into a batch: which labels, which streams, under which names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from etude.core.batch import DOCUMENT_STARTS
from etude.core.errors import DataError
from etude.data.order.permutation import Indices
from etude.data.text.padding import Array
from etude.data.tokens.file import TokenFile
from etude.data.tokens.opening import open_tokens

LABELS = "labels"
OWN_KEYS = ("input_ids", "attention_mask", "position_ids", "document_ids", DOCUMENT_STARTS)
Kind = Literal["next", "stream", "sample", "none"]


def opened(file: TokenFile | str | Path) -> TokenFile:
    """Return the file, opened if it is a path."""
    return file if isinstance(file, TokenFile) else open_tokens(file)


@dataclass(frozen=True)
class Columns:
    """Labels of a batch (by `kind`, from the stream or sample label `name`), and what comes along with them."""

    kind: Kind
    name: str
    streams: tuple[str, ...]
    sample_labels: tuple[str, ...]
    padding: Mapping[str, int] = field(default_factory=dict)
    """What streams are padded with where it is not 0: -100 for labels."""

    @classmethod
    def of(cls, file: TokenFile, labels: str | None, *, whole: bool) -> "Columns":
        """Choose by what the file has, or as `labels` says; without `whole` documents, their labels are left out."""
        samples = tuple(file.sample_labels) if whole else ()
        clash = [name for name in (*file.streams, *samples) if name in OWN_KEYS]
        if clash:
            raise DataError(f"{file.path} has a stream or label {clash[0]!r}: batches use that name themselves")
        if labels is None:
            own = next((name for name in ("label", LABELS) if name in samples), None)
            labels = own or (LABELS if LABELS in file.streams else "next")
        kind: Kind
        if labels in ("next", "none"):
            kind = "next" if labels == "next" else "none"
        elif labels in file.streams:
            kind = "stream"
        elif labels in samples:
            kind = "sample"
        else:
            known = ", ".join(("next", "none", *file.streams, *samples))
            raise DataError(f"labels is {labels!r}; {file.path} allows {known}")
        taken = (labels, LABELS)
        return cls(
            kind,
            labels,
            tuple(name for name in file.streams if name not in taken),
            tuple(name for name in samples if name not in taken),
            _padding(file),
        )

    def fill(self, stream: str) -> int:
        """Return what stands behind a document in a stream."""
        return self.padding.get(stream, 0)


def _padding(file: TokenFile) -> dict[str, int]:
    """What the facts of a file say its streams are padded with."""
    padding: Any = file.meta.get("padding", {})
    if not isinstance(padding, Mapping) or not all(type(value) is int for value in padding.values()):
        raise DataError(
            f"{file.path} has padding {padding!r} in its facts; it maps names of streams to whole numbers"
        )
    return dict(padding)


def sample_label(file: TokenFile, name: str, indices: Indices) -> Tensor:
    """Return the labels of samples, (n,) or (n, width): whole numbers as int64, others as float32."""
    return tensor_of(file.label(name, indices))


def tensor_of(values: Array) -> Tensor:
    """Return numbers as a tensor of int64 or float32."""
    kind = np.int64 if values.dtype.kind in "iub" else np.float32
    return torch.from_numpy(values.astype(kind, copy=False))
