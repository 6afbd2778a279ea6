"""Streams for config files: several data sets under names, trained on in given proportions."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from etude.config.registry import Section, register
from etude.core.errors import DataError
from etude.data.sources.mixture import TokenMixture
from etude.data.splits import DataSplits, Draw, LoaderData, Streams
from etude.data.text import MaskedTokens, PackedDocuments, TokenDocuments
from etude.data.text.blocks import TokenBlocks
from etude.data.tokens.schema import check_same_schema

SPLITS = ("train", "validation", "test")


@register("data", "streams")
def load_streams(
    streams: dict[str, Annotated[Any, Section("data")]],
    weights: dict[str, float] | None = None,
    draw: Draw = "alternate",
    epoch_samples: Annotated[int, Ge(1)] | None = None,
) -> DataSplits:
    """Several data sets under names: a training batch comes from one of them, or from all.

    streams: a data set for each name, with its own arguments.
    weights: proportions of training samples, by the same names; in proportion to their sizes by default. A stream of
        weight 0 is read only in phases that name it.
    draw: `alternate` makes every batch of one stream; with `together` every batch has samples of each.
    epoch_samples: samples of an epoch; by default as many as all streams have. Streams go on where they stopped.
    """
    return combine_streams(streams, weights, draw, epoch_samples)


def combine_streams(
    splits: Mapping[str, DataSplits],
    weights: Mapping[str, float] | None = None,
    draw: Draw = "alternate",
    epoch_samples: int | None = None,
) -> DataSplits:
    """Return data sets as one whose parts are `Streams`; a part lacks the streams that do not have it.

    Raises DataError for names, weights and numbers that cannot be, and if token ids of streams mean different things.

    >>> import torch
    >>> from etude.data.splits import TensorData
    >>> digits, dice = (DataSplits(TensorData(torch.arange(n))) for n in (10, 6))
    >>> len(combine_streams({"digits": digits, "dice": dice}, weights={"digits": 1, "dice": 3}).train)
    16
    """
    for name, data in splits.items():
        if not isinstance(data, DataSplits):
            raise DataError(f"stream '{name}' is a {type(data).__name__}; a data component returns a DataSplits")
    _check_same_tokenizer(splits)
    schemas = {name: data.token_schema for name, data in splits.items() if data.token_schema is not None}
    check_same_schema(schemas, "streams")
    _check_no_tokenizer(splits, schemas)
    parts: dict[str, Any] = {}
    for split in SPLITS:
        there = {name: part for name, data in splits.items() if (part := getattr(data, split)) is not None}
        if there or split == "train":
            parts[split] = Streams(there, absent=frozenset(splits) - frozenset(there))
    parts["train"] = replace(parts["train"], weights=weights, draw=draw, epoch_samples=epoch_samples)
    sizes = [data.vocab_size for data in splits.values() if data.vocab_size is not None]
    return DataSplits(
        **parts,
        num_classes=_common(data.num_classes for data in splits.values()),
        input_shape=_common(data.input_shape for data in splits.values()),
        vocab_size=max(sizes, default=None),
        tokenizer=next((data.tokenizer for data in splits.values() if data.tokenizer is not None), None),
        token_schema=next(iter(schemas.values()), None),
        num_types=max((data.num_types for data in splits.values() if data.num_types is not None), default=None),
        num_targets=_common(data.num_targets for data in splits.values()),
        facts={name: data.facts for name, data in splits.items() if data.facts},
    )


def _common(values: Any) -> Any:
    """What all streams agree on, or None."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _check_no_tokenizer(splits: Mapping[str, DataSplits], schemas: Collection[str]) -> None:
    """Refuse text of a tokenizer beside streams with a schema, which says that ids mean something else."""
    for name, data in splits.items():
        if schemas and name not in schemas and _tokenizer_print(data) is not None:
            raise DataError(
                f"stream '{name}' has the ids of a text tokenizer, and a file beside '{next(iter(schemas))}' says that "
                f"its ids mean something else; one model cannot learn from both"
            )


def _check_same_tokenizer(splits: Mapping[str, DataSplits]) -> None:
    """Refuse to train one model on ids that mean different things."""
    prints = {name: _tokenizer_print(data) for name, data in splits.items()}
    known = [(name, found) for name, found in prints.items() if found is not None]
    for name, found in known[1:]:
        if found != known[0][1]:
            raise DataError(
                f"streams '{known[0][0]}' and '{name}' were made with different tokenizers, so their ids mean "
                f"different things; tokenize them with the same --tokenizer"
            )


def _tokenizer_print(data: DataSplits) -> str | None:
    """The checksum of the tokenizer that made the ids, as far as the files tell."""
    part = data.train.data if isinstance(data.train, LoaderData) else data.train
    found = _print_in(part)
    if found is None and isinstance(data.tokenizer, Path):
        return hashlib.sha256(data.tokenizer.read_bytes()).hexdigest()
    return found


def _print_in(source: Any) -> str | None:
    if isinstance(source, MaskedTokens):
        return _print_in(source.source)
    if isinstance(source, TokenMixture):
        return next((found for part in source.sources if (found := _print_in(part)) is not None), None)
    if isinstance(source, (TokenBlocks, TokenDocuments, PackedDocuments)):
        found = source.file.meta.get("tokenizer_sha256")
        return found if isinstance(found, str) else None
    return None
