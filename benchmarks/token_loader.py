"""How many samples of token files per second: blocks, padded documents, packed and masked ones, for Etude and others.

python -m benchmarks.token_loader [--quick] [--no-peers] [--json FILE] [--megabytes 1000] [--rounds 21]
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import token_peers
from benchmarks.table import Table, publish, read_options
from benchmarks.token_documents import VOCABULARY, documents_table, packed_table, seeking_table, write_documents
from benchmarks.token_peers import BATCH_SIZE, LENGTH, Corpus, Peer
from benchmarks.token_race import Contender, Pace, private_memory, race, rows_of
from etude.data import DataLoader, TokenBlocks, open_tokens

MEMORY_TOKENS = 200_000_000


@dataclass(frozen=True)
class Size:
    tokens: int
    """Of the file of blocks."""
    converted_tokens: int
    documents: int
    seeks: int
    pace: Pace


FULL = Size(500_000_000, 100_000_000, 100_000, 50, Pace(21, 0.1))
QUICK = Size(200_000, 100_000, 400, 3, Pace(2, 0.002))


def in_order(corpus: Corpus) -> Iterator[Any]:
    """The least that must be done: consecutive blocks are copied into one buffer, which is never a new one."""
    tokens = corpus.touched()
    blocks = tokens[: len(tokens) // (BATCH_SIZE * LENGTH) * BATCH_SIZE * LENGTH].reshape(-1, BATCH_SIZE, LENGTH)
    buffer = np.empty((BATCH_SIZE, LENGTH), np.int64)
    while True:
        for batch in blocks:
            np.copyto(buffer, batch)
            yield buffer


def etude_blocks(corpus: Corpus, *, prefetch: int) -> Iterator[Any]:
    loader = DataLoader(
        TokenBlocks(open_tokens(corpus.path, dtype="uint16"), LENGTH), batch_size=BATCH_SIZE, prefetch=prefetch
    )
    for _ in loader:  # touches every page
        pass
    return loader.stream()


def write_tokens(path: Path, count: int) -> None:
    """Write random tokens, a piece at a time."""
    chance = np.random.default_rng(0)
    with path.open("wb") as file:
        while count:
            piece = chance.integers(0, VOCABULARY, min(count, 2**24), dtype=np.uint16)
            piece.tofile(file)
            count -= len(piece)


def find(corpus: Corpus, row: NDArray[Any]) -> int:
    """Return at which token of the file a row begins; -1 if it is not there."""
    tokens, wanted, piece = corpus.mapped(), row.astype(np.uint16).tobytes(), 2**23
    for start in range(0, len(tokens), piece):
        place = tokens[start : start + piece + len(row)].tobytes().find(wanted)
        if place >= 0:
            return start + place // 2
    return -1


def check_blocks(corpus: Corpus, name: str, batch: Any) -> None:
    """Make sure that a batch holds tokens of the file with the next ones as labels, and is shuffled."""
    if isinstance(batch, np.ndarray):
        assert np.array_equal(batch.reshape(-1), corpus.mapped()[: batch.size]), name
        return
    ids, labels = batch.values() if isinstance(batch, dict) else batch
    assert ids.shape == labels.shape == (BATCH_SIZE, LENGTH), (name, ids.shape)
    assert ids.dtype == labels.dtype == torch.int64, (name, ids.dtype)
    assert torch.equal(ids[:, 1:], labels[:, :-1]), name
    first, second = (find(corpus, torch.cat([ids[row], labels[row, -1:]]).numpy()) for row in (0, 1))
    assert min(first, second) >= 0, f"{name} gives tokens that are not in the file"
    assert not 0 < second - first <= LENGTH + 1, f"{name} does not shuffle"


def memory_line(corpus: Corpus) -> str:
    """Say how much memory of its own the process takes while the loader reads."""
    loader = DataLoader(TokenBlocks(open_tokens(corpus.path, dtype="uint16"), LENGTH), batch_size=BATCH_SIZE)
    batches, wanted = loader.stream(), MEMORY_TOKENS // (BATCH_SIZE * LENGTH)
    for _ in range(50):
        next(batches)
    before = most = private_memory()
    if before is None or most is None:
        return ""
    for number in range(min(wanted, 2 * len(loader))):
        next(batches)
        if number % 64 == 0:
            most = max(most, private_memory() or 0)
    read = min(wanted, 2 * len(loader)) * BATCH_SIZE * LENGTH
    grown = (most - before) / 1e6
    return f"\nMemory of the process itself while Etude reads {read / 1e6:,.1f} M tokens: {grown:+.1f} MB."


def blocks_table(corpus: Corpus, size: Size, peers: Sequence[Peer]) -> Table:
    contenders = [
        Contender("in order, into one int64 buffer", partial(in_order, corpus)),
        Contender("Etude DataLoader", partial(etude_blocks, corpus, prefetch=0)),
        Contender("Etude DataLoader, prefetch=2", partial(etude_blocks, corpus, prefetch=2)),
        *(Contender(peer.name, partial(peer.batches, corpus), peer.needs) for peer in peers),
    ]
    memory = memory_line(corpus)
    pairs = race(contenders, size.pace, BATCH_SIZE, partial(check_blocks, corpus))
    converting = " and ".join(peer.name for peer in peers if peer.converts)
    remark = f"{converting} read the first {size.converted_tokens * 2 / 1e6:,.4g} MB, in a format of their own.\n"
    return Table(
        f"Shuffled blocks of {LENGTH:,} tokens, batches of {BATCH_SIZE}, from a file of {size.tokens * 2 / 1e6:,.4g} "
        f"MB of uint16 in the page cache, as int64 ids and next tokens, one thread.",
        {"loader": "", "samples/s": ",.0f", "quartiles": "", "of the limit": ".1%", "quartiles of that": ""},
        f"Medians of {size.pace.rounds} whiles of {size.pace.seconds * 1e3:g} ms, in turns; the limit, the first row, "
        f"is measured right before each of them.\nEvery page has been looked at before, but nanoGPT and litdata map "
        f"files again. prefetch=2 has a second thread, 2 workers are two more processes.\n"
        f"{remark if converting else ''}A batch of each was compared with the file.{memory}",
        rows_of(contenders, pairs, "of the limit"),
    )


def measure(size: Size, with_peers: bool) -> list[Table]:
    token_peers.quiet()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus, path = Corpus(folder / "blocks.bin", folder, size.converted_tokens), folder / "documents.bin"
        write_tokens(corpus.path, size.tokens)
        documents = write_documents(path, size.documents)
        peers = token_peers.PEERS if with_peers else ()
        return [
            blocks_table(corpus, size, peers),
            documents_table(path, documents, size.pace),
            packed_table(path, size.pace),
            seeking_table(corpus, path, size.seeks, with_peers=with_peers),
        ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--megabytes", type=int)
    parser.add_argument("--rounds", type=int)
    own, rest = parser.parse_known_args(argv)
    options = read_options("Samples per second of token files (also: --megabytes of the file, --rounds).", rest)
    torch.set_num_threads(1)
    size = QUICK if options.quick else FULL
    if own.megabytes is not None:
        tokens = own.megabytes * 500_000
        size = replace(size, tokens=tokens, converted_tokens=min(size.converted_tokens, tokens))
    if own.rounds is not None:
        size = replace(size, pace=replace(size.pace, rounds=own.rounds))
    publish("token_loader", measure(size, options.peers), options)


if __name__ == "__main__":
    main()
