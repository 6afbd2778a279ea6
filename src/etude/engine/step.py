"""One training step: forward and backward over the micro-batches, one division, one update.

`GradientAccumulator` says how many micro-batches make a step.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn

from etude.core import Batch, Clock, ConfigError, StepReport, Task, Terms
from etude.core.arguments import as_whole
from etude.core.buffers import BufferGuard
from etude.core.task import as_task
from etude.distributed import World
from etude.engine.callback import Callback, Gradients
from etude.engine.explain import raise_misfit
from etude.engine.objective import Objective, ObjectiveParts
from etude.engine.precision import MixedPrecision
from etude.engine.update import Updater

logger = logging.getLogger("etude")


class Step:
    """Runs one optimizer step on a list of micro-batches without synchronising with the device."""

    def __init__(
        self,
        model: nn.Module,
        task: Task | Callable[..., Terms],
        updater: Updater,
        precision: MixedPrecision,
        *,
        world: World | None = None,
        metrics: bool | None = False,
    ) -> None:
        """Connect the components; `task` is a `Task` or a function with its signature.

        With `metrics`, terms of weight 0 (accuracy …) are computed in training too; None: those that cost little.
        """
        self.model = model
        self.task = as_task(task)
        self.updater = updater
        self.precision = precision
        self.world = world if world is not None else World()
        self.metrics = True if metrics is None and not self.task.chooses_metrics else metrics
        parts = ObjectiveParts(model, updater.params, updater.device, self.world, precision)
        self.objective: Objective = self.task.objective(parts) or Objective(self.task, parts)
        self.forward: Callable[..., Terms] = self.objective.task
        """Computes the terms of a micro-batch: the task, or its compiled version."""
        self.clock = Clock()
        self.capture: Callable[[Sequence[Batch]], StepReport] | None = None
        """Replaces `run` if steps are captured as CUDA graphs."""
        self.notice: Callable[[str], None] = logger.info
        """Receives information for the user about how steps are run; not a warning."""
        self.warn: Callable[[str], None] = logger.warning
        """Receives a message about a failure that does not stop training."""
        self.watchers: Sequence[Callback] = ()
        """Callbacks that look at the gradients of some steps before they are applied."""
        self.after_update: Sequence[Callable[[Tensor], None]] = ()
        """Called with `skipped` at the end of every step, on the device."""
        self._buffers = BufferGuard(model)
        self._is_announced = False

    def __call__(self, micro_batches: Sequence[Batch]) -> StepReport:
        """Train on the micro-batches of one step; raise DataError for mismatched tensors."""
        try:
            self.updater.send_rates()
            for batch in micro_batches:
                self.task.trained_on(batch)
            report = (self.capture or self.run)(micro_batches)
            if not self._is_announced:
                self._announce()
            return report
        except Exception as error:
            raise_misfit(error)
            raise

    def _announce(self) -> None:
        """Pass on what the task has decided on its first batches."""
        text = self.task.announcement()
        self._is_announced = text is not None
        if text:
            self.notice(text)

    def run(self, micro_batches: Sequence[Batch]) -> StepReport:
        """Zero the gradients, run every micro-batch forward and backward, divide, clip, update."""
        objective, updater = self.objective, self.updater
        updater.zero_grad()
        self._buffers.remember()
        objective.begin(micro_batches, self.clock.step)
        for place, batch in enumerate(micro_batches):
            with objective.micro_batch(place):
                with self.precision.autocast():
                    terms = self.forward(self.model, batch, metrics=self.metrics)
                self.task.observe(batch)
                objective.backward(terms)
        count = objective.finish()
        for one in self.watchers:
            if one.wants_gradients(self.clock.step):
                one.on_gradients(Gradients(self.model, updater.params, count, self.precision))
        divisor = self.precision.unscale(count)  # before the update, which may change the loss scale
        norm, skipped = updater.apply(divisor)
        objective.after_update()
        self._buffers.put_back(skipped)
        for follow in self.after_update:
            follow(skipped)
        return StepReport(objective.sums, objective.counts, norm, divisor, skipped, updater.lr, objective.optional)


class GradientAccumulator:
    """Groups batches into steps of `accumulation_steps` micro-batches.

    The step that receives them divides once by their common count, so the result equals that of one large batch.
    A mapping gives a schedule: `{0: 1, 5: 4}` uses 1 micro-batch from epoch 0 on and 4 from epoch 5 on.

    >>> [len(group) for group in GradientAccumulator(accumulation_steps=2).group(range(5), epoch=0)]
    [2, 2, 1]
    >>> GradientAccumulator(accumulation_steps={0: 1, 5: 4}).steps_at(7)
    4
    """

    def __init__(self, optimizer: Any = None, accumulation_steps: int | Mapping[int, int] = 1) -> None:
        """Set the number of micro-batches. `optimizer` is accepted only for readability at the call site."""
        schedule = dict(accumulation_steps) if isinstance(accumulation_steps, Mapping) else {0: accumulation_steps}
        if 0 not in schedule or any(epoch < 0 for epoch in schedule):
            raise ConfigError(
                f"an accumulation schedule must start at epoch 0, got epochs {sorted(schedule)}; write {{0: 1, 5: 4}}"
            )
        schedule = {epoch: as_whole("accumulation_steps", steps, least=1) for epoch, steps in schedule.items()}
        self.optimizer = optimizer
        self.most = max(schedule.values())
        """The largest number of micro-batches per step."""
        self._schedule = sorted(schedule.items())

    def steps_at(self, epoch: int) -> int:
        """Return the number of micro-batches per step in `epoch`."""
        return next(steps for first, steps in reversed(self._schedule) if first <= epoch)

    def num_steps(self, num_batches: int, epochs: range) -> int:
        """Return the optimizer steps in `epochs`, with `num_batches` batches in each, in constant time.

        >>> GradientAccumulator(accumulation_steps={0: 1, 5: 4}).num_steps(8, range(10**9))
        2000000030
        """
        assert epochs.step == 1
        total = 0
        ends = [first for first, _ in self._schedule[1:]] + [epochs.stop]
        for (first, steps), end in zip(self._schedule, ends, strict=True):
            num_epochs = max(0, min(end, epochs.stop) - max(first, epochs.start))
            total += num_epochs * -(-num_batches // steps)
        return total

    def group(self, batches: Iterable[Batch], epoch: int) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step; the last step of an epoch may have fewer."""
        steps = self.steps_at(epoch)
        if steps == 1:
            for batch in batches:
                yield [batch]
        else:
            iterator = iter(batches)
            while group := list(islice(iterator, steps)):
                yield group
