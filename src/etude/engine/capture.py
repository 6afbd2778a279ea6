"""Whole steps as CUDA graphs: recorded once for every form of batch, then replayed with new data.

A small model leaves a GPU waiting for Python: some hundred kernels a step, each launched by the host. A recorded step
is one launch. Everything it reads lies at fixed addresses: batches are copied into the inputs it was recorded with,
learning rates, loss scale and learned weights are numbers on the device, and random numbers go on from where the
generator is. A step that is recorded does the same arithmetic as one that is not, so a run may mix them: it has the
same weights whenever it was stopped and resumed.

What the host decides would be frozen: which tasks are active, which parameters are trained, weight decay and so on are
part of what a graph is kept under, and memory that was replaced makes all graphs void. The first replay of every graph
is compared with the same step run as usual.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from etude.core import Batch, StepReport, TrainingError
from etude.core.batch import map_tensors
from etude.core.random import host_draws, rng_state, set_rng_state
from etude.engine.explain import first_line, first_of, place_of
from etude.engine.step import Step
from etude.engine.update import state_tensors

CaptureMode = Literal["auto", "on", "off"]

WARM_UP_STEPS = 3
"""Steps of one form that are run as usual before it is recorded: libraries are loaded, buffers are made."""
MOST_GRAPHS = 16
"""Graphs that are kept; the one unused for longest is dropped."""
MOST_FORMS = 128
"""Forms of batches, of which few come again, after which recording is given up."""
GPU_BOUND = 0.6
"""If the host needs at most this share of the device's time for a step, recording it would gain nothing."""
LARGEST_DIFFERENCE = 0.05
"""Of the update, by which the replayed step may differ from the usual one: kernels add up in any order."""
_REQUIRES_GRAD, _TRAINING = attrgetter("requires_grad"), attrgetter("training")


class Recorder(Protocol):
    """Records what a function does on the device, without doing it."""

    def record(self, function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """Return what the function returned, in memory that every replay fills, and what replays it."""

    def recover(self) -> None:
        """Put the device in order after `record` has failed."""

    def timed(self, function: Callable[[], StepReport]) -> tuple[StepReport, float]:
        """Run a step; return its report and the host's time for it as a share of the device's."""


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None

    def record(self, function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """Record the function on a stream of its own; other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        return result, graph.replay

    def recover(self) -> None:
        """Wait for the device, and give the random generator a state that no failed recording holds."""
        torch.cuda.synchronize(self.device)
        generator = torch.cuda.default_generators[self.device.index or 0]
        fresh = torch.Generator(self.device)
        generator.graphsafe_set_state(fresh.graphsafe_get_state())

    def timed(self, function: Callable[[], StepReport]) -> tuple[StepReport, float]:
        """Run a step alone on the device, and wait for it."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.device)
        begin.record()
        start = time.perf_counter()
        report = function()
        seconds = time.perf_counter() - start
        end.record()
        end.synchronize()
        return report, 1e3 * seconds / max(begin.elapsed_time(end), 1e-6)


class Unfit(Exception):
    """Why a step cannot be recorded, in words for people."""


@dataclass(slots=True)
class Graph:
    """One recorded step."""

    inputs: list[Tensor]
    """The tensors of the batches it was recorded with."""
    packed: Tensor
    """All numbers of its report."""
    replay: Callable[[], object]
    layout: StepReport
    """The report it was recorded with; tensors in it stand for places in `packed`."""
    is_checked: bool = False

    def run(self, tensors: list[Tensor], lr: float) -> StepReport:
        """Do the step with the tensors of other batches."""
        torch._foreach_copy_(self.inputs, tensors, non_blocking=True)
        self.replay()
        layout, (norm, skipped, *numbers) = self.layout, self.packed.clone().unbind()
        fresh = iter(numbers)
        divisor = next(fresh) if isinstance(layout.divisor, Tensor) else layout.divisor
        sums = dict(zip(layout.sums, fresh, strict=False))
        counts = {name: next(fresh) if isinstance(one, Tensor) else one for name, one in layout.counts.items()}
        return StepReport(sums, counts, norm, divisor, skipped, lr, layout.optional)


class Capture:
    """Runs the steps of a `Step`, recorded where that is possible and gains something.

    With `needed`, a step that cannot be recorded is an error, and none is too large to be.
    """

    def __init__(self, step: Step, recorder: Recorder | None = None, *, needed: bool = False) -> None:
        self.step = step
        self.recorder = recorder if recorder is not None else CudaRecorder(step.updater.device)
        self.needed = needed
        self.refused: str | None = None
        """Why steps are run as usual from now on."""
        self._modules: list[nn.Module] = []
        self._hooks: list[dict[int, Any]] = []
        self._buffers: list[dict[str, Tensor | None]] = []
        self._attributes: list[tuple[dict[str, Any], str]] = []
        """Tensors that modules keep beside parameters and buffers, such as caches."""
        self._kept: list[list[Any]] = []
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()
        self._seen: dict[Hashable, int] = {}
        self._checked: set[Hashable] = set()
        self._memory: list[int] = []

    def __call__(self, micro_batches: Sequence[Batch]) -> StepReport:
        """Train on the micro-batches of one step."""
        if self.refused is not None or not self.step.objective.is_usual(self.step.clock.step):
            return self.step.run(micro_batches)
        tensors: list[Tensor] = []
        try:
            key = self._key(micro_batches, tensors)
        except Unfit as why:
            return self._refuse(str(why), micro_batches)
        graph = self._graphs.get(key)
        if graph is None:
            return self._prepare(key, micro_batches)
        self._graphs.move_to_end(key)
        if not graph.is_checked:
            return self._check(key, graph, micro_batches, tensors)
        return graph.run(tensors, self.step.updater.lr)

    # --- what a graph is kept under

    def _key(self, micro_batches: Sequence[Batch], tensors: list[Tensor]) -> Hashable:
        """Return everything that the host decides about a step; raise Unfit if it cannot be recorded at all.

        The tensors of the batches are put into the list.
        """
        step = self.step
        if step.watchers:
            raise Unfit("a callback looks at the gradients of every step")
        if not step.objective.is_capturable:
            raise Unfit(f"{type(step.objective).__name__} decides on the host")
        form = _form(micro_batches, tensors)
        device = step.updater.device
        if any(tensor.device != device for tensor in tensors):
            raise Unfit("batches hold tensors that are not on the device")
        if self._memory_now() != self._memory:
            self._forget()
        key = (
            form,
            step.task.version,
            step.task.constants(),
            step.metrics,
            step.updater.constants(),
            tuple(map(_REQUIRES_GRAD, step.updater.params)),
            tuple(map(_TRAINING, self._modules)),
            sum(map(len, self._hooks)),
        )
        try:
            hash(key)
        except TypeError as error:
            raise Unfit(f"batches or settings hold something that cannot be compared ({error})") from error
        return key

    def _memory_now(self) -> list[int]:
        """Return where everything lies that a recorded step reads and writes."""
        step, attributes = self.step, self._attributes
        return [
            *map(Tensor.data_ptr, step.updater.params),
            *map(id, chain.from_iterable(map(dict.values, step.updater.optimizer.state.values()))),
            *map(id, chain.from_iterable(map(dict.values, self._buffers))),
            *[id(values[name]) for values, name in attributes],
        ]

    def _forget(self) -> None:
        """Drop all graphs: a checkpoint was loaded, weights were swapped, a cache was replaced."""
        self._graphs.clear()
        model = self.step.model
        self._modules = list(model.modules())
        self._hooks = [hooks for one in self._modules for hooks in (one._forward_hooks, one._forward_pre_hooks)]
        self._buffers = [one._buffers for one in self._modules if one._buffers]
        self._attributes = [
            (vars(one), name)
            for one in self._modules
            for name, value in vars(one).items()
            if isinstance(value, Tensor)
        ]
        self._memory = self._memory_now()
        # As long as these live, nothing else has their addresses.
        self._kept = [
            list(chain.from_iterable(map(dict.values, self.step.updater.optimizer.state.values()))),
            list(chain.from_iterable(map(dict.values, self._buffers))),
            [values[name] for values, name in self._attributes],
        ]

    def _tensors_of_run(self) -> Iterator[Tensor]:
        """Yield everything a step changes in place: parameters, buffers, optimizer state, loss scale."""
        yield from (param.data for param in self.step.updater.params)
        yield from (buffer for buffers in self._buffers for buffer in buffers.values() if buffer is not None)
        yield from state_tensors(self.step.updater.optimizer)
        if self.step.precision.scaler is not None:
            yield from self.step.precision.scaler.tensors()

    # --- recording

    def _prepare(self, key: Hashable, micro_batches: Sequence[Batch]) -> StepReport:
        """Run a step as usual, and record it once its form has come often enough."""
        if len(self._seen) >= MOST_FORMS:
            self._seen.clear()
            if not self._graphs:
                return self._refuse("hardly two batches have the same form; give them few lengths", micro_batches)
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] < WARM_UP_STEPS:
            return self.step.run(micro_batches)
        drawn, plain = host_draws(), self._plain_attributes()
        report, share = self.recorder.timed(lambda: self.step.run(micro_batches))
        changed = [place for place, value in self._plain_attributes().items() if plain.get(place) != value]
        if host_draws() != drawn:
            self._give_up("the model draws random numbers on the host, which would be the same in every step")
        elif changed:
            self._give_up(f"a step changes {changed[0]} on the host, where a graph would leave it as it is")
        elif share < GPU_BOUND and not self.needed:
            self.refused = "the device is busy without it"
        else:
            self._record(key, micro_batches)
        return report

    def _plain_attributes(self) -> dict[str, Any]:
        """Return the numbers and words that the modules keep, by name: a graph does not see that they change."""
        return {
            f"{type(module).__name__} {name}.{attribute}".replace(" .", " "): value
            for name, module in self.step.model.named_modules()
            for attribute, value in vars(module).items()
            if isinstance(value, (bool, int, float, str))
        }

    def _record(self, key: Hashable, micro_batches: Sequence[Batch]) -> None:
        """Record the step with copies of these batches as its inputs."""
        tensors: list[Tensor] = []
        inputs = [map_tensors(batch, torch.clone) for batch in micro_batches]
        _form(inputs, tensors)
        kept = rng_state()
        try:
            layout: list[StepReport] = []

            def run() -> Tensor:
                layout.append(self.step.run(inputs))
                return _packed(layout[-1])

            packed, replay = self.recorder.record(run)
        except Exception as error:
            self.recorder.recover()
            set_rng_state(kept)
            cause = first_of(error)  # ending a recording that has failed fails once more
            where = place_of(cause)
            self._give_up(f"{first_line(cause)}{f' ({where})' if where else ''}", error)
            return
        self._graphs[key] = Graph(tensors, packed, replay, layout[0], is_checked=key in self._checked)
        while len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)

    # --- trying it

    def _check(
        self, key: Hashable, graph: Graph, micro_batches: Sequence[Batch], tensors: list[Tensor]
    ) -> StepReport:
        """Do one step both ways from the same state; keep the replayed one if both agree."""
        state, kept = list(self._tensors_of_run()), rng_state()
        try:
            before = [tensor.clone() for tensor in state]
            room = [torch.empty_like(tensor) for tensor in state]
        except torch.OutOfMemoryError:
            return self._refuse("there is no memory to compare it with the usual step", micro_batches)
        usual = self.step.run(micro_batches)
        torch._foreach_copy_(room, state)
        drawn = rng_state()
        torch._foreach_copy_(state, before)
        set_rng_state(kept)
        report = graph.run(tensors, self.step.updater.lr)
        if (difference := _difference(before, room, state)) <= LARGEST_DIFFERENCE and _alike(usual, report):
            graph.is_checked = True
            self._checked.add(key)
            return report
        torch._foreach_copy_(state, room)
        set_rng_state(drawn)
        self._give_up(f"the recorded step differs from the usual one by {difference:.2g} of its update")
        return usual

    def _refuse(self, why: str, micro_batches: Sequence[Batch]) -> StepReport:
        self._give_up(why)
        return self.step.run(micro_batches)

    def _give_up(self, why: str, error: Exception | None = None) -> None:
        """Run all steps as usual from now on, and say so."""
        self.refused = why
        self._graphs.clear()
        if self.needed:
            raise TrainingError(
                f"the step cannot be captured as a CUDA graph: {why}; set training.capture to auto or off"
            ) from error
        self.step.notice(f"steps are not captured as CUDA graphs: {why}")


def _form(value: Any, tensors: list[Tensor]) -> Hashable:
    """Return the shape of a batch: of tensors their sizes and types, of everything else its value.

    The tensors themselves are put into the list.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.dtype
    if isinstance(value, (tuple, list)):
        return type(value), *[_form(one, tensors) for one in value]
    if isinstance(value, Mapping):
        return tuple([(key, _form(one, tensors)) for key, one in value.items()])
    return value  # type: ignore[no-any-return]


def _packed(report: StepReport) -> Tensor:
    """Return all numbers of a report that are on the device as one vector."""
    values = (report.norm, report.skipped, report.divisor, *report.sums.values(), *report.counts.values())
    tensors = [value for value in values if isinstance(value, Tensor)]
    if all(tensor.dtype is torch.float32 for tensor in tensors):  # one kernel
        return torch.stack(tensors)
    return torch.stack([tensor.double() for tensor in tensors])


def _difference(before: list[Tensor], usual: list[Tensor], replayed: list[Tensor]) -> float:
    """Return the size of the difference of two steps, as a share of what the usual one changed."""
    apart = changed = 0.0
    for old, one, other in zip(before, usual, replayed, strict=True):
        if one.is_floating_point() and one.dim():
            apart += float((one.double() - other.double()).nan_to_num().square().sum())
            changed += float((one.double() - old.double()).nan_to_num().square().sum())
        elif not torch.equal(one, other):
            return float("inf")
    return float((apart / changed) ** 0.5) if changed else float(apart > 0)


def _alike(usual: StepReport, replayed: StepReport) -> bool:
    """Whether two reports of one step tell the same."""
    return torch.allclose(_packed(usual), _packed(replayed), rtol=LARGEST_DIFFERENCE, atol=1e-6, equal_nan=True)
