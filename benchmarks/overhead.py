"""What a step costs beyond the same step in a loop written by hand, for Etude and for others.

python -m benchmarks.overhead [--quick] [--no-peers] [--json FILE]
"""

import gc
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.counters import InstructionCounter
from benchmarks.table import (
    NOT_RUN,
    Row,
    Table,
    failure,
    median,
    missing,
    progress,
    publish,
    quartiles,
    read_options,
)
from benchmarks.work import (
    BATCH_SIZE,
    CLIP_NORM,
    LEARNING_RATE,
    LOG_EVERY,
    Batches,
    Mark,
    Probe,
    Work,
    make_data,
    terminal,
)
from etude import Trainer
from etude.optim import cosine


def by_hand(work: Work, *, fused: bool | None) -> None:
    model = work.model()
    optimizer, schedule = work.optimizer(model, fused=fused)
    losses = []
    for x, y in work.cheapest_batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())


def etude(work: Work, *, everything: bool, metrics: bool, saves: bool = False) -> None:
    config = {
        "epochs": 1,
        "batch_size": BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
        "gradient_clip_norm": CLIP_NORM,
        "log_interval": LOG_EVERY,
        "train_metrics": metrics,
        "device": "cpu",
        "precision": "fp32",
        "save_every_steps": work.save_every if saves else None,
    }
    trainer = Trainer(
        work.model(),
        (work.data, work.labels) if work.batches is None else work.batches,
        config=config,
        scheduler=cosine(total_steps=work.num_steps),
        output_dir=work.folder / "run" if everything else None,
        progress=everything,
    )
    trainer.train()


REFERENCE, PLAIN = "by hand, fused AdamW", "by hand, torch's default AdamW"


@dataclass(frozen=True)
class Contestant:
    name: str
    run: Callable[[Work], None]
    what: str = ""
    needs: tuple[str, ...] = ()
    every: int = 1
    """Takes part in every so many rounds."""


OWN = (
    Contestant(REFERENCE, partial(by_hand, fused=True)),
    Contestant(PLAIN, partial(by_hand, fused=None)),
    Contestant("Etude, everything on", partial(etude, everything=True, metrics=True), "display log finite save acc"),
    Contestant("Etude, without accuracy", partial(etude, everything=True, metrics=False), "display log finite save"),
    Contestant(
        "Etude, saving while timed", partial(etude, everything=True, metrics=True, saves=True), "the same, and 1 save"
    ),
    Contestant("Etude, bare", partial(etude, everything=False, metrics=False), "finite"),
)
PEERS = tuple(Contestant(name, run, needs=needs, every=4) for name, (run, needs) in peers.PEERS.items())
REMARKS = {
    "ignite": "–",
    "Fabric": "–",
    "accelerate": "–",
    "HF Trainer": "log",
    "Lightning, bare": "–",
    "Lightning, logging": "log",
    "Lightning, default bar": "display log save",
}


@dataclass(frozen=True)
class Size:
    warmup: int
    timed: int
    rounds: int


FULL, QUICK = Size(warmup=150, timed=1000, rounds=16), Size(warmup=3, timed=10, rounds=1)
"""The timed stretch holds ten log points, about two refreshes of the display and, where saving is timed, one save."""


@dataclass(frozen=True)
class Stage:
    """Runs contestants on one kind of work."""

    size: Size
    data: Tensor
    labels: Tensor
    batches: Batches | None
    counter: InstructionCounter

    def run(self, contestant: Contestant) -> Mark:
        """Return microseconds and instructions per step of one run."""
        gc.collect()
        probe = Probe(self.size.warmup, self.size.timed, self.counter)
        with tempfile.TemporaryDirectory() as folder:
            num_steps = len(self.data) // BATCH_SIZE
            work = Work(self.data, self.labels, self.batches, num_steps, self.size.timed, Path(folder), probe)
            contestant.run(work)
        return probe.per_step()

    def warm_up(self, contestants: Sequence[Contestant]) -> dict[str, str]:
        """Run all once, to touch their memory; return why a peer does not run here, by name."""
        absent = {}
        for one in contestants:
            if not one.needs:
                self.run(one)
            elif why := failure(partial(self.run, one)):
                absent[one.name] = why
        return absent

    def pairs(self, contestants: Sequence[Contestant], rounds: int) -> dict[str, list[tuple[Mark, Mark]]]:
        """Return, for every contestant, its runs, each with a run of the reference right before or after it."""
        reference, *others = contestants
        pairs: dict[str, list[tuple[Mark, Mark]]] = {one.name: [] for one in others}
        for turn in range(rounds):
            first = turn % len(others)
            for one in others[first:] + others[:first]:
                if turn % one.every:
                    continue
                progress(f"round {turn + 1} of {rounds}: {one.name}")
                if turn % 2:
                    theirs, base = self.run(one), self.run(reference)
                else:
                    base, theirs = self.run(reference), self.run(one)
                pairs[one.name].append((theirs, base))
        progress("")
        return pairs


def rows_of(
    contestants: Sequence[Contestant], pairs: dict[str, list[tuple[Mark, Mark]]], absent: Mapping[str, str]
) -> list[Row]:
    """Return the rows of the table; the reference's own numbers come from all its runs."""
    bases = [base for runs in pairs.values() for _, base in runs]
    plain = median([theirs.wall / base.wall for theirs, base in pairs[PLAIN]])
    rows: list[Row] = [_row(contestants[0], bases) | {"× plain": 1 / plain if plain else None, "× fused": 1.0}]
    for one in contestants[1:]:
        if one.name in absent:
            rows.append({"loop": one.name, NOT_RUN: absent[one.name]})
            continue
        runs = pairs[one.name]
        low, middle, high = quartiles([theirs.wall - base.wall for theirs, base in runs])
        ratio = median([theirs.wall / base.wall for theirs, base in runs])
        rows.append(
            _row(one, [theirs for theirs, _ in runs])
            | {
                "+µs": middle,
                "quartiles": f"{low:+.0f} … {high:+.0f}",
                "+CPU µs": median([theirs.cpu - base.cpu for theirs, base in runs]),
                "× fused": ratio,
                "× plain": ratio / plain if ratio and plain else None,
                "pairs": len(runs),
            }
        )
    return rows


def _row(one: Contestant, runs: Sequence[Mark]) -> dict[str, object]:
    return {
        "loop": one.name,
        "µs/step": median([run.wall for run in runs]),
        "CPU µs": median([run.cpu for run in runs]),
        "instructions": median([run.instructions for run in runs]),
        "on": one.what or REMARKS.get(one.name),
    }


COLUMNS = {
    "loop": "",
    "µs/step": ".1f",
    "+µs": "+.1f",
    "quartiles": "",
    "× fused": ".2f",
    "× plain": ".2f",
    "CPU µs": ".1f",
    "+CPU µs": "+.1f",
    "instructions": ",.0f",
    "pairs": "d",
    "on": "",
}


def measure(size: Size, with_peers: bool) -> list[Table]:
    """Return the table of the step alone and the table with data loading."""
    contestants = OWN + (PEERS if with_peers else ())
    peers.quiet()
    absent = {one.name: why for one in contestants if (why := missing(one.needs))}
    num_steps = size.warmup + size.timed + 1
    data, labels = make_data(num_steps)
    batches = Batches(data, labels)
    counter = InstructionCounter()
    tables = []
    for title, given, rounds in (
        ("The step alone: every loop is given the same list of batches.", batches, size.rounds),
        (
            "With data loading: tensors in memory, shuffled, each loop with its own loader.",
            None,
            size.rounds // 3 or 1,
        ),
    ):
        stage = Stage(size, data, labels, given, counter)
        with terminal():
            absent |= stage.warm_up([one for one in contestants if one.name not in absent])
            gc.freeze()  # what the trainers have imported need not be searched for garbage again and again
            pairs = stage.pairs([one for one in contestants if one.name not in absent], rounds)
        table = Table(
            f"Time of a training step, MLP 32-64-10, batch {BATCH_SIZE}, one thread. {title}", COLUMNS, how(size)
        )
        table.rows.extend(rows_of(contestants, pairs, absent))
        tables.append(table)
    counter.close()
    return tables


def how(size: Size) -> str:
    return (
        f"µs/step: median over runs of {size.timed} steps after {size.warmup} to warm up, timed between two forward "
        f"passes.\n+µs: median of the differences to a run of the loop by hand with fused AdamW right before or after; "
        f"× likewise.\nAll loops: zero_grad, forward, cross entropy, backward, clip to norm {CLIP_NORM:g}, AdamW "
        f"(fused but for the plain loop), cosine schedule, loss kept on the device.\n"
        f"on: live display on a terminal, log to the run folder every {LOG_EVERY} steps, skipping of updates that are "
        f"not finite, saving enabled, accuracy of every training batch."
    )


def main(argv: Sequence[str] | None = None) -> None:
    options = read_options("What a step costs beyond the same step in a loop written by hand.", argv)
    torch.set_num_threads(1)
    publish("overhead", measure(QUICK if options.quick else FULL, options.peers), options)


if __name__ == "__main__":
    main()
