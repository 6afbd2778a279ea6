"""Steps that are undone: for finding a learning rate, or a size of batches that fits into memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from etude.checkpoint import Checkpoint
from etude.checkpoint.saved_tensor import copy_of
from etude.core import Batch, Clock, StepReport
from etude.core.batch import map_tensors
from etude.core.buffers import BufferGuard
from etude.engine.explain import explained
from etude.engine.state import TrainState
from etude.engine.step import Step
from etude.optim.schedule_free import with_modes

TrialStep = Callable[[Sequence[Batch]], StepReport]


@contextmanager
def trial(state: TrainState, step: Step) -> Iterator[TrialStep]:
    """Give a function that runs a step, neither captured nor compiled; everything it changes is restored at the end.

    The state is restored as by a resume from a checkpoint in the host's memory: weights, buffers, optimizer, loss
    scale, random numbers, metrics and decisions of the loss. Callbacks are not called.
    """
    model_state, rest = state.capture()
    saved = Checkpoint(
        Path("the state before the trial"),
        map_tensors(model_state, copy_of),
        map_tensors({**rest, "callbacks": {}}, copy_of),
        {},
    )
    caches = BufferGuard(state.model, caches=True)
    caches.remember()
    modes = [(module, module.training) for module in state.model.modules()]
    gradients = [(param, param.grad) for param in step.updater.params]
    before = step.capture, step.forward, step.clock, step.watchers, step.after_update
    step.capture, step.forward, step.clock, step.watchers, step.after_update = (
        None,
        step.objective.task,
        Clock(),
        (),
        (),
    )

    @explained
    def run(batches: Sequence[Batch]) -> StepReport:
        step.updater.send_rates()
        report = step.run(batches)
        step.clock.step += 1
        return report

    state.model.train()
    for one in with_modes(state.optimizer):  # it may hold the weights to evaluate
        one.train()
    try:
        with state.random.running():
            yield run
    finally:
        step.capture, step.forward, step.clock, step.watchers, step.after_update = before
        step.objective.end_run()
        state.restore(saved)
        step.updater.forget()
        caches.restore(only_changed=True)
        for module, mode in modes:
            module.training = mode
        for param, gradient in gradients:
            param.grad = gradient
