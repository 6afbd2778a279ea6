"""The data sets `streams` and `token_mixture`: several named data sets, trained on in given proportions."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from etude.config.registry import Section, register
from etude.core.errors import ConfigError, DataError
from etude.core.spelling import listed
from etude.data.catalog.tokens import Length, Share, Way, load_tokens, prepare_tokens
from etude.data.sources.base import BatchSource
from etude.data.sources.mixture import TokenMixture
from etude.data.splits import DataSplits, Draw, LoaderData, OtherData, Streams
from etude.data.text.blocks import TokenBlocks
from etude.data.text.documents import TokenDocuments
from etude.data.text.masking import MaskedTokens
from etude.data.text.packed import PackedDocuments
from etude.data.tokens.schema import check_same_schema, check_shared_schema

SPLITS = ("train", "validation", "test")
BUCKETS = "bucket_batches"
Mixing = Literal[Draw, "mixed"]


def prepare_streams(
    path: Path,
    facts: Mapping[str, Any],  # noqa: ARG001
    arguments: Mapping[str, Any],
    labelled: bool,  # noqa: ARG001
) -> OtherData:
    """Raise ConfigError: a file does not say to which stream it belongs."""
    raise ConfigError(
        f"{path}: the run was trained on the streams {listed(arguments['streams'])}, each prepared in its own way, and "
        "a file does not say which it belongs to; in Python: etude.predict(load_model(RUN_DIR), inputs)"
    )


@register("data", "streams", prepare=prepare_streams)
def load_streams(
    streams: dict[str, Annotated[Any, Section("data")]],
    weights: dict[str, float] | None = None,
    draw: Mixing = "alternate",
    epoch_samples: Annotated[int, Ge(1)] | None = None,
) -> DataSplits:
    """Several data sets under names: a training batch comes from one of them, or from all.

    streams: a data set for each name, with its own arguments.
    weights: proportions of training samples, by name; by default in proportion to their sizes. A stream of weight 0
        is read only in phases that name it.
    draw: with `alternate` every batch has one stream; with `together` every batch has samples of each; with `mixed`
        samples of token data are drawn one by one into one batch, which names no stream.
    epoch_samples: samples per epoch; by default as many as all streams have. Streams continue where they stopped.
    """
    return combine_streams(streams, weights, draw, epoch_samples)


@register("data", "token_mixture", prepare=prepare_tokens)
def load_token_mixture(
    roots: dict[str, str],
    weights: dict[str, Annotated[float, Gt(0)]],
    read: Way = "blocks",
    length: Length = 1024,
    packing: Literal["split", "fit"] = "split",
    mask_rate: Share = 0.0,
    bucket_batches: Annotated[int, Ge(0)] = 100,
    epoch_samples: Annotated[int, Ge(1)] | None = None,
) -> DataSplits:
    """Several folders of token files, drawn in given proportions for training; validated on all of them.

    The same as `streams` of `tokens` with `draw: mixed`.

    roots: a folder or URL for each name.
    weights: the proportions, by the same names; they need not add up to 1.
    epoch_samples: samples per epoch; by default as many as there are.

    The other arguments are those of the data set `tokens`. All files must have the same tokenizer.
    """
    check_shared_schema(roots)
    splits = {}
    for name, root in roots.items():
        try:
            splits[name] = load_tokens(root, read, length, packing, mask_rate, bucket_batches=bucket_batches)
        except DataError as error:
            raise DataError(f"'{name}': {error}") from error
    return combine_streams(splits, weights, "mixed", epoch_samples)


def combine_streams(
    splits: Mapping[str, DataSplits],
    weights: Mapping[str, float] | None = None,
    draw: Mixing = "alternate",
    epoch_samples: int | None = None,
) -> DataSplits:
    """Return data sets as one whose parts are `Streams`, or a `TokenMixture` if `draw` is "mixed".

    A part contains only the streams that have it.

    Raises DataError for invalid names, weights and numbers, and if token ids of streams have different meanings.

    >>> import torch
    >>> from etude.data.splits import TensorData
    >>> digits, dice = (DataSplits(TensorData(torch.arange(n))) for n in (10, 6))
    >>> len(combine_streams({"digits": digits, "dice": dice}, weights={"digits": 1, "dice": 3}).train)
    16
    """
    for name, data in splits.items():
        if not isinstance(data, DataSplits):
            raise DataError(f"stream '{name}' is a {type(data).__name__}; it must be a DataSplits")
    _check_same_tokenizer(splits)
    schemas = {name: data.token_schema for name, data in splits.items() if data.token_schema is not None}
    check_same_schema(schemas, "streams")
    _check_no_tokenizer(splits, schemas)
    parts: dict[str, Any] = {}
    for split in SPLITS:
        there = {name: part for name, data in splits.items() if (part := getattr(data, split)) is not None}
        of_training = (weights, epoch_samples) if split == "train" else (None, None)
        if draw == "mixed" and there:
            parts[split] = _mixed(there, *of_training)
        elif there or split == "train":
            parts[split] = Streams(there, absent=frozenset(splits) - frozenset(there))
    if draw != "mixed":
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


def _mixed(parts: Mapping[str, Any], weights: Mapping[str, float] | None, size: int | None) -> LoaderData:
    """Return parts as one source; samples are bucketed by length if any of the parts requires it."""
    whole = {name: part if isinstance(part, LoaderData) else LoaderData(part) for name, part in parts.items()}
    for name, part in whole.items():
        if not isinstance(part.data, BatchSource) or set(part.options) - {BUCKETS}:
            raise DataError(
                f"stream '{name}' has no token data, or its own options, and cannot be mixed into one batch; set "
                "draw to alternate or together"
            )
    buckets = max(part.options.get(BUCKETS, 0) for part in whole.values())
    mixture = TokenMixture({name: part.data for name, part in whole.items()}, weights, size)
    return LoaderData(mixture, {BUCKETS: buckets} if buckets else {})


def _common(values: Any) -> Any:
    """What all streams agree on, or None."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _check_no_tokenizer(splits: Mapping[str, DataSplits], schemas: Collection[str]) -> None:
    """Refuse text tokens beside streams with a schema, which gives ids another meaning."""
    for name, data in splits.items():
        if schemas and name not in schemas and _tokenizer_print(data) is not None:
            raise DataError(
                f"stream '{name}' has the ids of a text tokenizer, but a file beside '{next(iter(schemas))}' gives "
                "its ids another meaning; train them separately"
            )


def _check_same_tokenizer(splits: Mapping[str, DataSplits]) -> None:
    """Refuse to train one model on ids with different meanings."""
    prints = {name: _tokenizer_print(data) for name, data in splits.items()}
    known = [(name, found) for name, found in prints.items() if found is not None]
    for name, found in known[1:]:
        if found != known[0][1]:
            raise DataError(
                f"streams '{known[0][0]}' and '{name}' have different tokenizers, so their ids mean different "
                "things; tokenize them with the same --tokenizer"
            )


def _tokenizer_print(data: DataSplits) -> str | None:
    """The checksum of the tokenizer of the ids, if the files record it."""
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
