"""Texts with a class each: encoded once, padded per batch; the data set `jsonl`."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Ge

from etude.config.registry import register
from etude.core.batch import Batch
from etude.core.errors import DataError
from etude.core.spelling import shorten
from etude.data.catalog.features import in_order
from etude.data.catalog.holdout import Rows, Share, fingerprint, hold_out, mix_keys, own_files, shares
from etude.data.splits import DataSplits, LoaderData, OtherData
from etude.data.text.padding import filled, padded_width, scatter
from etude.data.text.tokenizer import load_tokenizer, require_tokenizers, tokenizer_file

Encode = Callable[[list[str]], list[Any]]
PAD_ID = 0
PAD_MULTIPLE = 8
"""Widths of batches are multiples of this, so that a GPU has few, efficient shapes."""
BUCKET_BATCHES = 100
_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class LabeledText:
    """A text, its class and its location, for messages."""

    text: str
    label: str
    where: str


class TextRows:
    """Encoded texts of any length, padded to the longest of a batch; the source knows the lengths of its samples."""

    def __init__(
        self, ids: npt.NDArray[np.int32], ends: Rows, labels: npt.NDArray[np.int64] | None, rows: Rows
    ) -> None:
        """Text i is ids[ends[i - 1] : ends[i]]; `rows` are the texts of this part."""
        self.ids, self.labels, self.rows = ids, labels, rows
        self._ends, self._starts = ends, np.concatenate([[0], ends[:-1]])

    def __len__(self) -> int:
        return len(self.rows)

    def lengths(self, indices: Rows) -> Rows:
        """Return the number of tokens of the samples at `indices`."""
        rows = self.rows[indices]
        lengths: Rows = self._ends[rows] - self._starts[rows]
        return lengths

    def gather(self, indices: Rows, *, epoch: int, seed: int) -> Batch:  # noqa: ARG002
        """Return `input_ids` and `attention_mask`, (B, L), and `labels`, (B,), if there are any."""
        rows, lengths = self.rows[indices], self.lengths(indices)
        places = np.repeat(self._ends[rows] - lengths.cumsum(), lengths) + np.arange(lengths.sum())
        mask = filled(lengths, padded_width(int(lengths.max(initial=0)), PAD_MULTIPLE))
        found = {
            "input_ids": torch.from_numpy(scatter(self.ids[places], mask, PAD_ID)),
            "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        }
        return found if self.labels is None else {**found, "labels": torch.from_numpy(self.labels[rows])}


def prepare_texts(path: Path, facts: Mapping[str, Any], arguments: Mapping[str, Any], labelled: bool) -> OtherData:
    """Return the texts of a JSONL file, with the training's tokenizer and classes."""
    key = arguments.get("label", arguments.get("target")) if labelled else None
    texts = list(_read_lines(path, arguments["text"], key))
    labels = _numbered(texts, facts["classes"]) if labelled else None
    encode, _ = _encoder(arguments["tokenizer"])
    ids, ends = _encoded([one.text for one in texts], encode, arguments["max_length"])
    rows = TextRows(ids, ends, labels, np.arange(len(texts)))
    return OtherData(LoaderData(rows, {"bucket_batches": BUCKET_BATCHES}))


def _numbered(texts: Sequence[LabeledText], classes: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the class of each text as a number. Raises DataError for an unknown one."""
    place = {name: number for number, name in enumerate(classes)}
    for one in texts:
        if one.label not in place:
            raise DataError(f"{one.where}: the class {shorten(one.label)!r} has no training texts")
    return np.array([place[one.label] for one in texts], dtype=np.int64)


def _check_installed(arguments: Mapping[str, Any]) -> None:
    if arguments["tokenizer"] != "bytes":
        require_tokenizers()


@register("data", "jsonl", prepare=prepare_texts, check_installed=_check_installed)
def load_jsonl(
    path: str,
    text: str = "text",
    label: str = "label",
    tokenizer: str = "bytes",
    max_length: Annotated[int, Ge(1)] = 256,
    validation: Share | str = 0.1,
    test: Share | str = 0.1,
    seed: Annotated[int, Ge(0)] = 0,
) -> DataSplits:
    """A JSONL file: a JSON object with a text and its class per line.

    text, label: the keys; labels are strings, integers or booleans.
    tokenizer: `bytes` for one token per UTF-8 byte; otherwise a tokenizer.json, or a folder with one.
    max_length: longer texts are truncated to this many tokens.
    validation, test: a file, or the share of lines held out. Which lines depends on their content and `seed`.
    """
    main = list(_read_lines(Path(path).expanduser(), text, label))
    parts = {part: list(_read_lines(file, text, label)) for part, file in own_files(validation, test).items()}
    return text_splits(main, parts, shares(validation, test), seed, tokenizer, max_length)


def text_splits(
    main: Sequence[LabeledText],
    others: Mapping[str, Sequence[LabeledText]],
    held: tuple[float, float],
    seed: int,
    tokenizer: str,
    max_length: int,
) -> DataSplits:
    """Return texts as token ids by part: shares of `main` are held out, `others` are separate parts."""
    classes = in_order(sorted({one.label for one in main}))
    if len(classes) < 2:
        raise DataError(f"{main[0].where}: all texts have the class {classes[0]!r}; add texts of others")
    everything = [*main, *(one for part in others.values() for one in part)]
    labels = _numbered(everything, classes)
    encode, vocab_size = _encoder(tokenizer)
    ids, ends = _encoded([one.text for one in everything], encode, max_length)
    rows = hold_out(mix_keys(_keys(main) ^ np.uint64(seed)), *held)
    begin = len(main)
    for part, texts in others.items():
        rows[part] = np.arange(begin, begin + len(texts))
        begin += len(texts)
    found: dict[str, Any] = {
        part: LoaderData(TextRows(ids, ends, labels, one), {"bucket_batches": BUCKET_BATCHES})
        for part, one in rows.items()
    }
    facts = {"classes": classes, "rows": {part: len(one) for part, one in rows.items()}, "vocab_size": vocab_size}
    return DataSplits(
        **found,
        num_classes=len(classes),
        vocab_size=vocab_size,
        tokenizer=None if tokenizer == "bytes" else tokenizer_file(tokenizer),
        facts={"fingerprint": fingerprint([ids, ends, labels], facts), **facts},
    )


def _keys(texts: Sequence[LabeledText]) -> npt.NDArray[np.uint64]:
    """Return a number for each text that depends only on its content."""
    digests = (hashlib.blake2b(f"{one.label}\0{one.text}".encode(), digest_size=8).digest() for one in texts)
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def _read_lines(path: Path, text: str, label: str | None) -> Iterator[LabeledText]:
    found = False
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    found = True
                    yield _parse(line, text, label, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error
    if not found:
        raise DataError(f"{path} has no lines")


def _parse(line: bytes, text: str, label: str | None, where: str) -> LabeledText:
    try:
        entry = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise DataError(f"{where}: not JSON in UTF-8 ({error}); texts are read from .jsonl files") from error
    if not isinstance(entry, dict):
        wanted = " and ".join(repr(key) for key in (text, label) if key is not None)
        raise DataError(f"{where}: a {type(entry).__name__}; every line must be an object with {wanted}")
    for key in (text,) if label is None else (text, label):
        if entry.get(key) is None:
            found = f"{key!r} is null" if key in entry else f"there is no {key!r}"
            raise DataError(f"{where}: {found} (there are: {shorten(', '.join(entry))})")
    if not isinstance(entry[text], str):
        raise DataError(f"{where}: {text!r} is {shorten(repr(entry[text]))}; it must be a string")
    readable = entry[text].encode(errors="replace").decode()  # JSON may contain unpaired surrogates
    return LabeledText(readable, "" if label is None else label_name(entry[label], where), where)


def label_name(value: Any, where: str) -> str:
    """Return the name of a class. Raises DataError for an invalid value."""
    if not isinstance(value, (str, int)):
        raise DataError(f"{where}: the label is {shorten(repr(value))}; use a string, an integer or a boolean")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _encoder(tokenizer: str) -> tuple[Encode, int]:
    """Return a function that encodes texts, and the vocabulary size. For bytes, id 0 is padding."""
    if tokenizer == "bytes":
        return lambda texts: [np.frombuffer(text.encode(), np.uint8) + np.int32(1) for text in texts], 257
    found = load_tokenizer(tokenizer)
    return lambda texts: [one.ids for one in found.encode_batch(texts)], max(found.get_vocab().values()) + 1


def _encoded(texts: Sequence[str], encode: Encode, max_length: int) -> tuple[npt.NDArray[np.int32], Rows]:
    """Return the concatenated ids of all texts, and where each ends."""
    chunks: list[npt.NDArray[np.int32]] = []
    lengths: list[int] = []
    for begin in range(0, len(texts), _AT_ONCE):
        some = [np.asarray(ids[:max_length], dtype=np.int32) for ids in encode(list(texts[begin : begin + _AT_ONCE]))]
        lengths += map(len, some)
        chunks.append(np.concatenate(some))
    return np.concatenate(chunks), np.cumsum(lengths)
