"""The step log: metrics of steps, kept on the device and read by the host in one transfer at log points."""

import math
import time
from dataclasses import asdict, dataclass, field, fields
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.core import StepReport
from etude.core.report import joined
from etude.distributed import World
from etude.engine.flops import FLOPS_PER_WEIGHT, matrix_parameters, peak_flops
from etude.engine.meter import NO_AMOUNTS, Amounts
from etude.engine.step import Step

Rows = npt.NDArray[np.float64]
TOKENS, SKIPPED = -4, -1
"""Indices among the rows that are read: samples, uncounted, tokens, norm, divisor and skipped come last."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(slots=True)
class RunningSums:
    """Sums and counts of some steps on the host, in float64 and over all ranks."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    samples: float = 0.0
    uncounted: float = 0.0
    """Batches with an unknown number of samples."""
    tokens: float = 0.0
    skipped: int = 0
    """Updates that were not finite."""
    bad_losses: int = 0
    """Steps with a loss or metric that was not finite."""
    first_skipped: list[int] | None = None
    """The first skipped update: its step, and the range of its samples in the epoch."""
    norm_sum: float = 0.0
    norm_count: int = 0
    norm_min: float = math.inf
    norm_max: float = -math.inf
    seconds: float = 0.0
    waited: float = 0.0
    """The part of `seconds` spent waiting for data."""

    @classmethod
    def of(cls, saved: dict[str, Any]) -> "RunningSums":
        """Return the sums of a checkpoint; older ones may have more keys."""
        return cls(**{one.name: saved[one.name] for one in fields(cls) if one.name in saved})

    def add(self, names: list[str], optional: set[str], rows: Rows, places: list[tuple[int, int, int]]) -> None:
        """Add the values of some steps, one column per step: sum and count of every name, then what `_read` lists.

        They are added one by one in step order, so that sums do not depend on when the host reads them.
        """
        samples, uncounted, tokens, norms, divisors, skipped = rows[2 * len(names) :]
        finite = np.isfinite(rows[: 2 * len(names) : 2])
        self.steps += rows.shape[1]
        self.samples += float(samples.sum())
        self.uncounted += float(uncounted.sum())
        self.tokens += float(tokens.sum())
        self.skipped += int(skipped.sum())
        self.bad_losses += int((~finite).any(axis=0).sum())
        if self.first_skipped is None and skipped.any():
            self.first_skipped = list(places[int(skipped.argmax())])
        for index, name in enumerate(names):
            sums, counts = rows[2 * index : 2 * index + 2]
            if name not in optional or counts.any():
                self.sums[name] = _add_up(sums[finite[index]], self.sums.get(name, 0.0))
                self.counts[name] = _add_up(counts[finite[index]], self.counts.get(name, 0.0))
        with np.errstate(all="ignore"):
            good = (norms / divisors)[skipped == 0]
        if good.size:
            self.norm_sum = _add_up(good, self.norm_sum)
            self.norm_count += good.size
            self.norm_min, self.norm_max = (
                min(self.norm_min, float(good.min())),
                max(self.norm_max, float(good.max())),
            )

    def means(self) -> dict[str, float]:
        """Return sum/count by name; nan where nothing finite was counted."""
        return {name: self.sums[name] / count if (count := self.counts[name]) else math.nan for name in self.sums}

    def logs(self) -> dict[str, float]:
        """Return averages and rates in the form that callbacks receive."""
        return self.means() | self.rates()

    def rates(self) -> dict[str, float]:
        """Return gradient norms, skipped updates and rates per second."""
        logs: dict[str, float] = {}
        if self.norm_count:
            logs |= {"grad_norm": self.norm_sum / self.norm_count}
            logs |= {"grad_norm_min": self.norm_min, "grad_norm_max": self.norm_max}
        logs["skipped"] = self.skipped
        if self.seconds > 0:
            if self.uncounted:
                logs["batches_per_s"] = self.uncounted / self.seconds
            if self.samples or not self.uncounted:
                logs["samples_per_s"] = self.samples / self.seconds
            if self.tokens:
                logs["tokens_per_s"] = self.tokens / self.seconds
            logs["data_wait"] = self.waited / self.seconds
        return logs


class _Entry(NamedTuple):
    """One step that has not been read from the device yet."""

    report: StepReport
    amounts: Amounts
    place: tuple[int, int, int]
    """The number of the step, and the range of its samples in the epoch."""


class StepLog:
    """Collects step reports; `flush` reads them all at once. The only place where training synchronises."""

    def __init__(self, world: World | None = None) -> None:
        self.world = world if world is not None else World()
        self.window = RunningSums()
        """Since the last log point."""
        self.epoch = RunningSums()
        """Since the start of the epoch."""
        self.tokens = 0.0
        """Since the start of the run, over all ranks: integers, exact in float64."""
        self.bad_streak = 0
        """Consecutive skipped updates up to now."""
        self._pending: list[_Entry] = []
        self._peak: float | None = None
        self._since = time.perf_counter()
        self._waited = 0.0

    def add(
        self, report: StepReport, amounts: Amounts = NO_AMOUNTS, step: int = 0, start: int = 0, end: int = 0
    ) -> None:
        """Store the report of `step`, whose samples are `start` to `end` of the epoch, without reading it."""
        self._pending.append(_Entry(report, amounts, (step, start, end)))

    def add_wait(self, seconds: float) -> None:
        """Count time spent waiting for data."""
        self._waited += seconds

    def restart_timer(self) -> None:
        """Exclude the time since the last flush (validation, saving) from the rates."""
        self._since = time.perf_counter()
        self._waited = 0.0

    def flush(self) -> None:
        """Read all pending reports from the device (an intended host synchronisation) and add them up."""
        if not self._pending:
            return
        entries, self._pending = self._pending, []
        names, optional, rows = self._read(entries)
        now = time.perf_counter()
        for tally in (self.window, self.epoch):
            tally.add(names, optional, rows, [entry.place for entry in entries])
            tally.seconds += now - self._since
            tally.waited += self._waited
        self._since, self._waited = now, 0.0
        self.tokens += float(rows[TOKENS].sum())
        for bad in rows[SKIPPED].tolist():
            self.bad_streak = self.bad_streak + 1 if bad else 0

    def take_window(self) -> RunningSums:
        """Flush, return the sums since the last log point, and start a new window."""
        self.flush()
        tally, self.window = self.window, RunningSums()
        return tally

    def take_epoch(self) -> RunningSums:
        """Flush, return the sums of the epoch, and start a new epoch."""
        self.flush()
        tally, self.epoch = self.epoch, RunningSums()
        return tally

    def state_dict(self) -> dict[str, Any]:
        """Return the running sums, so that a resumed run logs what an uninterrupted one would."""
        self.flush()
        return {
            "window": asdict(self.window),
            "epoch": asdict(self.epoch),
            "tokens": self.tokens,
            "bad_streak": self.bad_streak,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the running sums."""
        self._pending = []
        self.window, self.epoch = RunningSums.of(state["window"]), RunningSums.of(state["epoch"])
        self.tokens = state.get("tokens", 0.0)  # older checkpoints lack token counts
        self.bad_streak = state["bad_streak"]

    def numbers(self, tally: RunningSums, step: Step) -> dict[str, float]:
        """Return averages, metrics derived by the task, norms and rates of some steps, as callbacks receive them.

        With tokens, their total and the MFU are included.
        """
        logs = {**step.task.summary(tally.means()), **tally.rates(), **step.task.numbers()}
        if tally.tokens and tally.seconds > 0:
            logs["mfu"] = tally.tokens / tally.seconds / self._peak_tokens_per_s(step)
        if self.tokens:
            logs["tokens"] = int(self.tokens)
        return logs

    def _peak_tokens_per_s(self, step: Step) -> float:
        """Return how many tokens per second all ranks could train on at peak matrix-product speed."""
        if self._peak is None:
            dtype = _DTYPES.get(step.precision.name, next(step.model.parameters()).dtype)
            passes = 1 if step.second_pass is None else 2
            flops_per_token = passes * FLOPS_PER_WEIGHT * max(matrix_parameters(step.model), 1)
            self._peak = self.world.size * peak_flops(step.updater.device, dtype) / flops_per_token
            self.restart_timer()  # exclude the measurement from the step's time
        return self._peak

    def _read(self, entries: list[_Entry]) -> tuple[list[str], set[str], Rows]:
        """Return the names of the terms, the optional ones, and one row for every value of the steps."""
        # A single process reads replayed steps as they are stored on the device: anything else is extra host work.
        reports = joined([entry.report for entry in entries], on_host=self.world.size == 1)
        # Steps may differ in their terms, and a rank without samples knows only some of them.
        names = self.world.union(list(dict.fromkeys(name for report in reports for name in report.sums)))
        optional = set(self.world.union(sorted(set().union(*(report.optional for report in reports)))))
        columns: list[Tensor] = []
        for name in names:
            columns += [_column([getattr(r, key).get(name, 0.0) for r in reports]) for key in ("sums", "counts")]
        columns += [_column([getattr(e.amounts, key) for e in entries]) for key in ("samples", "uncounted", "tokens")]
        device = reports[0].norm.device
        per_rank = self.world.sum(torch.stack([column.to(device) for column in columns]))
        shared = torch.stack(
            [_column([getattr(r, key) for r in reports]).to(device) for key in ("norm", "divisor", "skipped")]
        )
        rows = torch.cat([per_rank, shared]).cpu()  # the only transfer
        return names, optional, rows.numpy()


def _column(values: list[Any]) -> Tensor:
    """Return numbers and tensors as one float64 vector, on the device of the tensors."""
    tensor = next((value for value in values if isinstance(value, Tensor)), None)
    if tensor is None:
        return torch.from_numpy(np.array(values, dtype=np.float64))
    if len(values) == 1:  # all steps have the same value
        return tensor.reshape(-1).double()
    # A count can be a number in one step and a tensor in another: an inactive term has the number 0.
    numbers = {v: tensor.new_full((), v) for v in values if not isinstance(v, Tensor)}
    return torch.stack([v if isinstance(v, Tensor) else numbers[v] for v in values]).double()


def _add_up(values: Rows, total: float) -> float:
    """Return `total` plus the values added one by one; the builtin `sum` rounds differently."""
    return reduce(add, values.tolist(), total)
