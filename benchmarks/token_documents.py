"""Documents of a token file: padded, packed and masked, and how soon any position is reached."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader as TorchLoader

from benchmarks.table import NOT_RUN, Table, failure, missing, progress
from benchmarks.token_peers import BATCH_SIZE, LENGTH, Corpus, shuffled_state
from benchmarks.token_race import Contender, Pace, race, rows_of
from etude.data import (
    DataLoader,
    MaskedTokens,
    PackedDocuments,
    TokenBlocks,
    TokenDocuments,
    TokenWriter,
    open_tokens,
)

VOCABULARY = 50257
SHORTEST, LONGEST, DOCUMENT_BATCH, POOL = 16, 512, 32, 100


def write_documents(path: Path, count: int) -> list[NDArray[np.uint16]]:
    """Write random documents of all lengths alike, and return them."""
    chance = np.random.default_rng(1)
    lengths = chance.integers(SHORTEST, LONGEST + 1, count)
    tokens = chance.integers(0, VOCABULARY, int(lengths.sum()), dtype=np.uint16)
    with TokenWriter(path) as writer:
        writer.add_many(tokens, lengths)
    return np.split(tokens, np.cumsum(lengths)[:-1])


def torch_documents(tensors: list[Tensor], *, labels: bool) -> Iterator[Any]:
    def collate(samples: list[Tensor]) -> dict[str, Tensor]:
        ids = pad_sequence(samples, batch_first=True)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(sample) for sample in samples])[:, None]
        batch = {"input_ids": ids, "attention_mask": mask.long()}
        if labels:
            batch["labels"] = torch.full_like(ids, -100)
            batch["labels"][:, :-1] = torch.where(mask[:, 1:], ids[:, 1:], -100)
        return batch

    loader: Any = TorchLoader(tensors, DOCUMENT_BATCH, shuffle=True, collate_fn=collate, drop_last=True)
    while True:
        yield from loader


def etude_documents(path: Path, *, labels: str, bucket_batches: int = 0) -> Iterator[Any]:
    source = TokenDocuments(path, labels=labels)
    return DataLoader(source, batch_size=DOCUMENT_BATCH, drop_last=True, bucket_batches=bucket_batches).stream()


def waste(batches: Iterator[Any], number: int) -> float:
    """Return the fraction of places that hold padding."""
    masks = [next(batches)["attention_mask"] for _ in range(number)]
    return 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)


def documents_table(path: Path, documents: list[NDArray[np.uint16]], pace: Pace) -> Table:
    tensors = [torch.from_numpy(document.astype(np.int64)) for document in documents]
    known = {document.tobytes() for document in documents}

    def check(name: str, batch: dict[str, Tensor]) -> None:
        places = torch.arange(batch["input_ids"].shape[1])
        for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)):
            assert torch.equal(mask, places < mask.sum()), name
            assert ids[mask].numpy().astype(np.uint16).tobytes() in known, name
            if "labels" in batch:
                following = torch.cat([ids[mask][1:], torch.full((int((~mask).sum()) + 1,), -100)])
                assert torch.equal(batch["labels"][row], following), name

    makers: dict[str, Callable[[], Iterator[Any]]] = {
        "torch DataLoader, pad_sequence": partial(torch_documents, tensors, labels=False),
        "the same, and labels": partial(torch_documents, tensors, labels=True),
        "Etude": partial(etude_documents, path, labels="none"),
        "Etude, and labels": partial(etude_documents, path, labels="next"),
        "Etude, bucketed": partial(etude_documents, path, labels="none", bucket_batches=POOL),
        "Etude, bucketed, and labels": partial(etude_documents, path, labels="next", bucket_batches=POOL),
    }
    contenders = [Contender(name, make) for name, make in makers.items()]
    pairs = race(contenders, pace, DOCUMENT_BATCH, check)
    number = len(documents) // DOCUMENT_BATCH
    rows = [
        row | {"padding": waste(makers[row["loader"]](), number)} for row in rows_of(contenders, pairs, "× torch")
    ]
    return Table(
        f"Documents of {SHORTEST} to {LONGEST} tokens, shuffled, padded, batches of {DOCUMENT_BATCH}, as int64 ids and "
        f"masks, one thread.",
        {
            "loader": "",
            "samples/s": ",.0f",
            "quartiles": "",
            "× torch": ".2f",
            "quartiles of that": "",
            "padding": ".1%",
        },
        f"{len(documents):,} documents: for torch (0 workers) a list of int64 tensors in memory, for Etude a uint16 "
        f"file.\nlabels: the next tokens, -100 at ends and padding. bucketed: bucket_batches={POOL}. padding: share of "
        f"places without a token, over an epoch.",
        rows,
    )


def readers(path: Path) -> dict[str, Callable[[], Any]]:
    """Return what makes each way to read a file of documents as blocks."""
    return {
        "blocks": lambda: TokenBlocks(path, LENGTH),
        "packed, split": lambda: PackedDocuments(path, LENGTH, "split"),
        "packed, fit": lambda: PackedDocuments(path, LENGTH, "fit"),
        "blocks, masked": lambda: MaskedTokens(TokenBlocks(path, LENGTH), VOCABULARY, VOCABULARY + 1),
    }


def packed_table(path: Path, pace: Pace) -> Table:
    sources, preparing = {}, {}
    for name, make in readers(path).items():
        begin = time.perf_counter()
        sources[name] = make()
        preparing[name] = (time.perf_counter() - begin) * 1e3
    contenders = [
        Contender(name, DataLoader(source, batch_size=BATCH_SIZE, drop_last=True).stream)
        for name, source in sources.items()
    ]

    def check(name: str, batch: dict[str, Tensor]) -> None:
        assert batch["input_ids"].shape == batch["labels"].shape == (BATCH_SIZE, LENGTH), name

    rows = rows_of(contenders, race(contenders, pace, BATCH_SIZE, check), "of blocks")
    for row in rows:
        source = sources[row["loader"]]
        row |= {"ms to open": preparing[row["loader"]], "fill": getattr(source, "fill", 1.0)}
    tokens = open_tokens(path)
    return Table(
        f"Other readings of {LENGTH:,} tokens, batches of {BATCH_SIZE}, shuffled, by Etude's DataLoader, one thread.",
        {
            "loader": "",
            "samples/s": ",.0f",
            "quartiles": "",
            "of blocks": ".1%",
            "quartiles of that": "",
            "fill": ".2%",
            "ms to open": ",.1f",
        },
        f"{len(tokens):,} documents of {SHORTEST} to {LONGEST} tokens, {tokens.num_tokens / 1e6:,.1f} M in all. Packed "
        f"batches have ids, labels, positions and numbers of documents, and masks where there is padding.",
        rows,
    )


def seeking_table(corpus: Corpus, path: Path, seeks: int, *, with_peers: bool) -> Table:
    """Return the time from asking for a position in the second half of an epoch to its first batch."""
    loaders = {
        f"blocks of {corpus.path.stat().st_size / 1e6:,.4g} MB": DataLoader(
            TokenBlocks(open_tokens(corpus.path, dtype="uint16"), LENGTH), batch_size=BATCH_SIZE
        ),
        "documents": DataLoader(TokenDocuments(path), batch_size=DOCUMENT_BATCH),
        "documents, bucketed": DataLoader(TokenDocuments(path), batch_size=DOCUMENT_BATCH, bucket_batches=POOL),
    } | {name: DataLoader(make(), batch_size=BATCH_SIZE) for name, make in readers(path).items() if name != "blocks"}
    chance = np.random.default_rng(2)
    rows: list[dict[str, Any]] = []
    for name, loader in loaders.items():
        times = []
        for epoch in range(seeks):
            half = len(loader) // 2
            position = int(chance.integers(half, len(loader))) * loader.batch_size
            begin = time.perf_counter()
            next(loader.iterate(epoch, position))
            times.append((time.perf_counter() - begin) * 1e3)
        rows.append({"loader": name, "median ms": statistics.median(times), "slowest ms": max(times)})
    if with_peers:
        rows.append({"loader": "StatefulDataLoader, blocks"} | stateful_seek(corpus))
    return Table(
        "Seeking: from asking for a position of a new epoch to its first batch.",
        {"loader": "", "median ms": ",.2f", "slowest ms": ",.2f"},
        f"{seeks} random positions in the second half of an epoch, each in another epoch. StatefulDataLoader: "
        f"once, from load_state_dict in the middle of an epoch.",
        rows,
    )


def stateful_seek(corpus: Corpus) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def seek() -> None:
        progress("StatefulDataLoader: reading half an epoch")
        resume = shuffled_state(corpus)
        begin = time.perf_counter()
        resume()
        found["median ms"] = (time.perf_counter() - begin) * 1e3
        progress("")

    why = missing(("torchdata",)) or failure(seek)
    return {NOT_RUN: why} if why else found
