"""One training step: forward and backward over the micro-batches, one division, one update.

`GradientAccumulator` says how many micro-batches make a step.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn

from etude.core import Batch, Clock, StepReport, Task, Terms
from etude.core.buffers import BufferGuard
from etude.core.by_epoch import ByEpoch
from etude.core.spans import span
from etude.core.task import as_task
from etude.distributed import World
from etude.distributed.agreement import check_losses
from etude.engine.callback import Callback, Gradients
from etude.engine.explain import raise_misfit
from etude.engine.objective import Objective, ObjectiveParts
from etude.engine.precision import MixedPrecision
from etude.engine.second_pass import SecondPass
from etude.engine.splitter import MicroBatchSplitter
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
        splitter: MicroBatchSplitter | None = None,
    ) -> None:
        """Connect the components; `task` is a `Task` or a function with its signature.

        With `metrics`, terms of weight 0 (accuracy …) are computed in training too; None: those that cost little.
        `splitter` divides batches that are too large for the device.
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
        self.changed_settings: Sequence[str] = ()
        """Settings of the optimizer, other than learning rates, that a schedule has changed for this step."""
        self.after_update: Sequence[Callable[[Tensor], None]] = ()
        """Called with `skipped` at the end of every step, on the device."""
        self.batches: Sequence[Batch] = ()
        """The micro-batches of the last step."""
        self.splitter = splitter if splitter is not None else MicroBatchSplitter(world=self.world)
        self.splitter.warn = lambda words: self.warn(words)
        self._buffers = BufferGuard(model)
        self.second_pass: SecondPass | None = None
        """Computes the gradients again, at other weights, if the optimizer needs that."""
        if updater.needs_second_gradient:
            self.second_pass = SecondPass(model, self.objective, updater)
        self._is_announced = False
        self._is_compared = False

    def __call__(self, micro_batches: Sequence[Batch]) -> StepReport:
        """Train on the micro-batches of one step; raise DataError for mismatched tensors."""
        self.batches = micro_batches
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
        """Pass on what the optimizer has chosen and the task has decided on its first batches."""
        text = self.task.announcement()
        self._is_announced = text is not None
        if self._is_announced:
            for words in filter(None, (self.updater.announcement(), text)):
                self.notice(words)

    def run(self, micro_batches: Sequence[Batch]) -> StepReport:
        """Zero the gradients, run every micro-batch forward and backward, divide, clip, update."""
        objective, updater = self.objective, self.updater
        self._buffers.remember()
        if self.second_pass is not None:
            self.second_pass.remember()
        count = self._gradients(micro_batches)
        sums, counts = objective.sums, objective.counts
        if self.world.parent is not None and not self._is_compared:
            self._is_compared = True
            check_losses(self.world, sums)
        if self.second_pass is not None:
            count = self.second_pass.run(lambda: self._gradients(micro_batches))
        for one in self.watchers:
            if one.wants_gradients(self.clock.step):
                one.on_gradients(Gradients(self.model, updater.params, count, self.precision))
        with span("optimizer"):
            divisor = self.precision.unscale(count)  # before the update, which may change the loss scale
            norm, skipped = updater.apply(divisor)
            objective.after_update()
            self._buffers.put_back(skipped)
            for follow in self.after_update:
                follow(skipped)
        return StepReport(sums, counts, norm, divisor, skipped, updater.lr, objective.optional)

    def _gradients(self, micro_batches: Sequence[Batch]) -> Tensor | float:
        """Compute the gradients of all micro-batches; return what they are to be divided by."""
        self.splitter.run(micro_batches, self._backward, self.model, self._buffers.restore)
        with span("backward"):
            self.objective.all_reduce()
            return self.objective.finish()

    def _backward(self, micro_batches: Sequence[Batch]) -> None:
        """Run every micro-batch forward and backward, and add up the gradients."""
        objective = self.objective
        self.updater.zero_grad()
        objective.begin(micro_batches, self.clock.step)
        for place, batch in enumerate(micro_batches):
            with objective.micro_batch(place):
                with span("forward"), self.precision.autocast():
                    terms = self.forward(self.model, batch, metrics=self.metrics)
                if objective.is_repeating:
                    self.task.judged = None  # metrics are those of the first pass
                else:
                    self.splitter.observe(self.task, batch)
                with span("backward"):
                    objective.backward(terms)


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
        self.optimizer = optimizer
        self.schedule = ByEpoch("accumulation_steps", accumulation_steps)
        self.most = max(self.schedule.values)
        """The largest number of micro-batches per step."""

    def steps_at(self, epoch: int) -> int:
        """Return the number of micro-batches per step in `epoch`."""
        return self.schedule.at(epoch)

    def num_steps(self, num_batches: int, epochs: range) -> int:
        """Return the optimizer steps in `epochs`, with `num_batches` batches in each, in constant time.

        >>> GradientAccumulator(accumulation_steps={0: 1, 5: 4}).num_steps(8, range(10**9))
        2000000030
        """
        return sum((span.stop - span.start) * -(-num_batches // steps) for span, steps in self.schedule.spans(epochs))

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
