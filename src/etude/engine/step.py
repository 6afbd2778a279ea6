"""One training step: forward and backward over the micro-batches, one division, one update."""

from collections.abc import Callable, Sequence

from torch import nn

from etude.core import Batch, Clock, StepReport, Task, Terms
from etude.core.buffers import BufferGuard
from etude.core.task import as_task
from etude.distributed import World
from etude.engine.callback import Gradients
from etude.engine.explain import explained
from etude.engine.objective import Objective, ObjectiveParts
from etude.engine.precision import Precision
from etude.engine.update import Updater


class Step:
    """Runs one optimizer step on a list of micro-batches; waits for nothing and reads nothing from the device."""

    def __init__(
        self,
        model: nn.Module,
        task: Task | Callable[..., Terms],
        updater: Updater,
        precision: Precision,
        *,
        world: World | None = None,
        metrics: bool = False,
    ) -> None:
        """Bind the parts; `task` is a `Task` or a function in its place.

        With `metrics`, terms of weight 0 (accuracy …) are computed in training too.
        """
        self.model = model
        self.task = as_task(task)
        self.updater = updater
        self.precision = precision
        self.world = world if world is not None else World()
        self.metrics = metrics
        parts = ObjectiveParts(model, updater.params, updater.device, self.world, precision)
        self.objective: Objective = self.task.objective(parts) or Objective(self.task, parts)
        self.clock = Clock()
        self.watchers: Sequence[Callable[[Gradients], None]] = ()
        """Called with the gradients of every step before they are applied."""
        self._buffers = BufferGuard(model)

    @explained
    def __call__(self, micro_batches: Sequence[Batch]) -> StepReport:
        """Zero the gradients, run every micro-batch forward and backward, divide, clip, update."""
        objective, updater = self.objective, self.updater
        updater.zero_grad()
        self._buffers.remember()
        objective.begin(micro_batches, self.clock.step)
        for place, batch in enumerate(micro_batches):
            with objective.micro_batch(place):
                with self.precision.autocast():
                    terms = objective.task(self.model, batch, metrics=self.metrics)
                objective.backward(terms)
        count = objective.finish()
        for watch in self.watchers:
            watch(Gradients(self.model, updater.params, count, self.precision))
        divisor = self.precision.unscale(count)  # now: the update may change the loss scale
        norm, skipped = updater.apply(divisor)
        objective.after_update()
        self._buffers.put_back(skipped)
        return StepReport(objective.sums, objective.counts, norm, divisor, skipped, updater.lr, objective.optional)
