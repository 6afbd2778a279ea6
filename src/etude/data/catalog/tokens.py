"""The data set `tokens`: token files of a folder, read as blocks, documents or packed documents."""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from etude.config.registry import register
from etude.core.errors import DataError
from etude.data.sources.base import BatchSource
from etude.data.splits import DataSplits, LoaderData, OtherData
from etude.data.text.blocks import LABELS, TokenBlocks
from etude.data.text.documents import TokenDocuments
from etude.data.text.masking import MaskedTokens
from etude.data.text.packed import PackedDocuments
from etude.data.tokens.file import TokenFile
from etude.data.tokens.opening import open_tokens
from etude.data.tokens.places import exists
from etude.data.tokens.schema import TokenSchema, find_schema, folder_of, token_fields

logger = logging.getLogger("etude")

Way = Literal["blocks", "documents", "packed"]
Length = Annotated[int, Ge(2)]
Share = Annotated[float, Ge(0), Lt(1)]

SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "val", "valid"), "test": ("test",)}
"""Usual file names of a split."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How samples are made from a token file."""

    way: Way = "blocks"
    length: int = 1024
    packing: Literal["split", "fit"] = "split"
    mask_rate: float = 0.0
    mask_id: int | None = None
    bucket_batches: int = 100
    attention: Literal["ids", "starts", "full"] = "starts"
    schema: TokenSchema | None = None
    """Defines the padding id and special tokens, if the files have a schema."""

    def source(self, file: TokenFile, *, training: bool) -> BatchSource:
        """Return the samples of a file; in training, blocks start at other tokens in each epoch."""
        source: BatchSource
        pad_id = 0 if self.schema is None else self.schema.pad_id
        # Samples with a schema are predicted token by token, whatever other labels they have.
        labels = None if self.schema is None or LABELS in file.streams else "next"
        if self.way == "blocks":
            source = TokenBlocks(file, self.length, moving=training and file.num_tokens > 2 * self.length)
        elif self.way == "packed":
            causal = self.mask_rate == 0
            source = PackedDocuments(
                file,
                self.length,
                strategy=self.packing,
                pad_id=pad_id,
                labels=labels,
                attention=self.attention,
                causal=causal,
            )
        else:
            source = TokenDocuments(file, max_length=self.length, pad_id=pad_id, long="split", labels=labels)
        return self._masked(source, file) if self.mask_rate else source

    def split(self, file: TokenFile, split: str) -> LoaderData | None:
        """Return a part of the data; one that is too short for a sample is skipped, unless it is for training."""
        try:
            return self.part(self.source(file, training=split == "train"))
        except DataError as error:
            if split == "train":
                raise
            logger.warning("there will be no %s: %s", split, error)
            return None

    def part(self, source: BatchSource) -> LoaderData:
        """Return the loader arguments; documents of similar length are bucketed."""
        return LoaderData(source, {"bucket_batches": self.bucket_batches} if self.way == "documents" else {})

    def _masked(self, source: BatchSource, file: TokenFile) -> BatchSource:
        if self.schema is None:
            special, size = file.meta.get("special_ids") or {}, file.vocab_size
        else:
            special, size = self.schema.special_ids, self.schema.vocab_size
        mask_id = self.mask_id if self.mask_id is not None else special.get("mask", special.get("MASK"))
        if mask_id is None or size is None:
            lacks = "no mask token" if mask_id is None else "no vocabulary size"
            raise DataError(
                f"{file.path} has {lacks}, which masked language modelling needs; set mask_id, or create the file "
                "with `etude tokenize`"
            )
        known = [value for value in special.values() if isinstance(value, int)]
        return MaskedTokens(source, mask_id=mask_id, vocab_size=size, rate=self.mask_rate, special_ids=sorted(known))


def prepare_tokens(
    path: Path,
    facts: Mapping[str, Any],  # noqa: ARG001
    arguments: Mapping[str, Any],
    labelled: bool,  # noqa: ARG001
) -> OtherData:
    """Return the samples of another token file, read as in training; the next tokens are their labels."""
    names = ("length", "packing", "mask_rate", "mask_id", "bucket_batches", "attention")
    settings = {name: arguments[name] for name in names if name in arguments}  # other data sets have fewer
    reading = Reading(arguments["read"], schema=find_schema(str(path.parent)), **settings)
    file = open_tokens(str(path), dtype=arguments.get("dtype"), document_end=arguments.get("document_end"))
    return OtherData(reading.part(reading.source(file, training=False)))


@register("data", "tokens", prepare=prepare_tokens)
def load_tokens(
    root: str = "data/tokenized",
    read: Way = "blocks",
    length: Length = 1024,
    packing: Literal["split", "fit"] = "split",
    mask_rate: Share = 0.0,
    mask_id: Annotated[int, Ge(0)] | None = None,
    bucket_batches: Annotated[int, Ge(0)] = 100,
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None,
    document_end: Annotated[int, Ge(0)] | None = None,
    vocab_size: Annotated[int, Gt(0)] | None = None,
    attention: Literal["ids", "starts", "full"] = "starts",
) -> DataSplits:
    """Token files train.bin, validation.bin (or val.bin) and test.bin of a folder or a URL.

    A folder with a vocab.json has several modalities: it is returned as `token_schema`.

    root: folder with the files; `etude tokenize` creates them, and those of nanoGPT, llm.c and Megatron work too.
    read: consecutive `blocks` of `length` tokens; `documents` padded to the longest of the batch; or documents
        `packed` into full blocks, with masks at their boundaries.
    length: tokens per block; longer documents are split.
    packing: `split` fills blocks to the last token and cuts documents; `fit` keeps documents whole.
    mask_rate: share of tokens hidden for masked language modelling (0.15 in BERT); 0 predicts next tokens.
    mask_id: the token that replaces hidden ones, if the file does not define it.
    bucket_batches: with `documents`, batches within which samples of similar length are grouped; 0 disables it.
    dtype: of files without a header (those of nanoGPT are uint16).
    document_end: of files without a header, the token that ends a document.
    vocab_size: if the file does not define it, or to reserve more tokens.
    attention: with `packed`, `starts` adds where documents begin, so that our transformer needs no mask on a GPU;
        `ids` omits that; `full` adds a mask of length x length for models that cannot separate documents by
        `document_ids` or `position_ids`, such as encoders.
    """
    schema = find_schema(root)
    reading = Reading(read, length, packing, mask_rate, mask_id, bucket_batches, attention, schema)
    files = {split: find_split(root, split) for split in SPLIT_NAMES}
    if files["train"] is None:
        raise DataError(f"{root} has no train.bin; create it with `etude tokenize --out {root}`, or set root")
    opened = {
        split: open_tokens(path, dtype=dtype, document_end=document_end)
        for split, path in files.items()
        if path is not None
    }
    known = token_fields(schema, opened.values(), vocab_size)
    parts: dict[str, Any] = {split: reading.split(file, split) for split, file in opened.items()}
    tokenizer = Path(root).expanduser() / "tokenizer.json"
    if not tokenizer.is_file():
        return DataSplits(**parts, **known)
    facts = {"tokenizer_fingerprint": hashlib.sha256(tokenizer.read_bytes()).hexdigest()[:32]}
    return DataSplits(**parts, tokenizer=tokenizer, facts=facts, **known)  # with another one, ids mean something else


def find_split(root: str, split: str) -> str | None:
    """Return the path or URL of a split's file below `root`, or None if there is none."""
    places = [f"{folder_of(root)}/{name}.bin" for name in SPLIT_NAMES[split]]
    return next((place for place in places if exists(place)), None)
