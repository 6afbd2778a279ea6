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

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from etude.core import Batch, StepReport, TrainingError
from etude.core.batch import map_tensors
from etude.core.random import host_draws, rng_state, set_rng_state
from etude.engine.explain import first_line, first_of, place_of
from etude.engine.graph import Graph, Inputs, Numbers
from etude.engine.host_state import Watched, host_state
from etude.engine.recorder import GPU_BOUND, CudaRecorder, Recorder, Unfit, form_of, version_of
from etude.engine.step import Step

CaptureMode = Literal["auto", "on", "off"]

WARM_UP_STEPS = 3
"""Steps of one form that are run as usual before it is recorded: libraries are loaded, buffers are made."""
MOST_GRAPHS = 16
"""Graphs that are kept; the one unused for longest is dropped."""
MOST_FORMS = 128
"""Forms of batches, of which few come again, after which recording is given up."""
FEW_FORMS = 8
"""Forms after which it is asked whether the step itself makes every one another."""
LARGEST_DIFFERENCE = 0.05
"""Of the update, by which the replayed step may differ from the usual one: kernels add up in any order."""
MOST_LOST = 4
"""Times in a row that graphs may become void before one of them was replayed."""
_PARTS = ("the form of the batches", "what the task does", "its weights", "metrics", "settings of the optimizer")
"""What the first parts of a key are."""


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
        self._watched = Watched(step.model, step.updater)
        self._recoveries = CudaRecorder.recoveries
        self._others: list[Tensor] = []
        """Tensors that model and task keep elsewhere, and that a step changes in place."""
        self._kept: list[Any] = []
        """What must live as long as the graphs."""
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()
        self._lost = 0
        """Times that graphs became void since one of them was replayed."""
        self._seen: dict[Hashable, int] = {}
        self._dropped: dict[Hashable, int] = {}
        self._checked: set[Hashable] = set()

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
        self._lost = 0
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
        form = form_of(micro_batches, tensors)
        device = step.updater.device
        if any(tensor.device != device for tensor in tensors):
            raise Unfit("batches hold tensors that are not on the device")
        if not tensors:
            raise Unfit("batches hold no tensors")
        if self._recoveries != CudaRecorder.recoveries or not self._watched.is_same():
            self._forget()
        key = (
            form,
            step.task.version,
            step.task.constants(),
            step.metrics,
            step.updater.constants(),
            self._watched.modes(),
        )
        try:
            hash(key)
        except TypeError as error:
            raise Unfit(f"batches or settings hold something that cannot be compared ({error})") from error
        return key

    def _forget(self) -> None:
        """Drop all graphs: a checkpoint was loaded, weights were swapped, a cache was replaced, a layer got a setting.

        Raises Unfit if that happens again and again.
        """
        if self._graphs:
            self._lost += 1
            self._seen.clear()
        what = self._watched.changes()
        self._graphs.clear()
        self._others, self._kept = [], []
        if self._lost > MOST_LOST:
            raise Unfit(f"{what or 'memory is replaced'} between steps, again and again")
        self._watched.look()
        self._recoveries = CudaRecorder.recoveries

    def _tensors_of_run(self) -> Iterator[Tensor]:
        """Yield everything a step changes in place: parameters, buffers, optimizer state, loss scale and so on."""
        yield from self._watched.tensors()
        yield from self._others
        if self.step.precision.scaler is not None:
            yield from self.step.precision.scaler.tensors()

    # --- recording

    def _prepare(self, key: Hashable, micro_batches: Sequence[Batch]) -> StepReport:
        """Run a step as usual, and record it once its form has come often enough."""
        if len(self._seen) >= MOST_FORMS:
            often = _most_varied(self._seen)
            self._seen.clear()
            if not self._graphs:
                return self._refuse(f"hardly two steps are alike: {often} nearly always", micro_batches)
        self._seen[key] = self._seen.get(key, 0) + 1
        is_due = self._seen[key] >= WARM_UP_STEPS and self.step.updater.has_stepped
        if not is_due and len(self._seen) != FEW_FORMS:
            return self.step.run(micro_batches)
        drawn, (before, tensors) = host_draws(), self._host_state()
        versions = [version_of(tensor) for tensor in tensors]
        report, share = self.recorder.timed(lambda: self.step.run(micro_batches))
        after, found = self._host_state()
        if host_draws() != drawn:
            self._give_up("the model draws random numbers on the host, which would be the same in every step")
        elif place := next((place for place, one in after.items() if before.get(place, self) != one), ""):
            self._give_up(f"a step changes {place} on the host, where a graph would leave it as it is")
        elif not is_due:
            return report
        elif share < GPU_BOUND and not self.needed:
            self.refused = "the device is busy without it"
            self._graphs.clear()
        else:
            known = {id(tensor) for tensor in self._tensors_of_run()}
            pairs = zip(tensors, versions, strict=True)
            self._others += [one for one, old in pairs if version_of(one) != old and id(one) not in known]
            self._kept += found
            self._record(key, micro_batches, report)
        return report

    def _host_state(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Return what model, task and optimizer keep on the host, by place, and their tensors."""
        optimizer, task = self.step.updater.optimizer, self.step.task
        groups = [{key: one for key, one in group.items() if key != "params"} for group in optimizer.param_groups]
        more = {key: one for key, one in vars(optimizer).items() if key not in ("state", "param_groups")}
        parts = {"optimizer": more, "optimizer settings": groups, "optimizer state": [*optimizer.state.values()]}
        return host_state(**{type(task).__name__: task, type(self.step.model).__name__: self.step.model, **parts})

    def _record(self, key: Hashable, micro_batches: Sequence[Batch], report: StepReport) -> None:
        """Record a step like the one that these batches have just been run in, with this report."""
        inputs, numbers = Inputs(micro_batches), Numbers(report.pack())
        tensors: list[Tensor] = []
        form_of(micro_batches, tensors)
        inputs.fill(tensors)  # whatever reads them while it is recorded finds numbers that can be
        kept = rng_state()
        try:
            layout: list[StepReport] = []

            def run() -> Tensor:
                layout.append(self.step.run(inputs.read()))
                packed = layout[-1].pack()
                numbers.write(packed)
                return packed

            _, replay = self.recorder.record(run)
        except BaseException as error:
            self.recorder.recover()
            set_rng_state(kept)
            self._give_up(_words_for(error), error)
            return
        self._graphs[key] = Graph(inputs.again(), numbers, replay, layout[0], is_checked=key in self._checked)
        while len(self._graphs) > MOST_GRAPHS:
            dropped, _ = self._graphs.popitem(last=False)
            # Recording takes as long as many steps: a form that is dropped often must come ever more often.
            self._seen[dropped] = WARM_UP_STEPS * (1 - 4 ** self._dropped.get(dropped, 0))
            self._dropped[dropped] = self._dropped.get(dropped, 0) + 1

    # --- trying it

    def _check(
        self, key: Hashable, graph: Graph, micro_batches: Sequence[Batch], tensors: list[Tensor]
    ) -> StepReport:
        """Do one step both ways from the same state; keep the replayed one if both agree."""
        state, kept = [tensor.detach() for tensor in self._tensors_of_run()], rng_state()
        try:
            before = [tensor.clone() for tensor in state]
            room = [torch.empty_like(tensor) for tensor in state]
        except torch.OutOfMemoryError:
            return self._refuse("there is no memory to compare it with the usual step", micro_batches)
        usual = self.step.run(
            [map_tensors(batch, torch.clone) for batch in micro_batches]
        )  # a model may change its input
        torch._foreach_copy_(room, state)
        drawn = rng_state()
        torch._foreach_copy_(state, before)
        set_rng_state(kept)
        report = graph.run(tensors, self.step.updater.lr)
        if (difference := _difference(before, room, state)) <= LARGEST_DIFFERENCE and _alike(usual, report):
            graph.is_checked = True
            if not self._checked:
                self.step.notice("steps are captured as CUDA graphs")
            self._checked.add(key)
            return report
        torch._foreach_copy_(state, room)
        set_rng_state(drawn)
        self._give_up(f"the recorded step differs from the usual one by {difference:.2g} of its update")
        return usual

    def _refuse(self, why: str, micro_batches: Sequence[Batch]) -> StepReport:
        self._give_up(why)
        return self.step.run(micro_batches)

    def _give_up(self, why: str, error: BaseException | None = None) -> None:
        """Run all steps as usual from now on, and say so."""
        self.refused = why
        self._graphs.clear()
        if self.needed:
            raise TrainingError(
                f"the step cannot be captured as a CUDA graph: {why}; set training.capture to auto or off"
            ) from error
        self.step.notice(f"steps are not captured as CUDA graphs: {why}")


def _words_for(error: BaseException) -> str:
    """Return what a recording has failed with, and where; raise it again if it is no error, but Ctrl-C.

    Here and not in `_record`: an error in a variable of a frame that its traceback holds is freed late, and so are
    autograd nodes of the stream of the recording, which the next backward pass would find and warn of.
    """
    cause = first_of(error)  # ending a recording that has failed fails once more
    for one in (error, cause):
        if not isinstance(one, Exception):  # later runs of the process find the device in order
            raise one from None
    where = place_of(cause)
    return f"{first_line(cause)}{f' ({where})' if where else ''}"


def _difference(before: list[Tensor], usual: list[Tensor], replayed: list[Tensor]) -> float:
    """Return the size of the difference of two steps, as a share of what the usual one changed."""
    apart = changed = 0.0
    for old, one, other in zip(before, usual, replayed, strict=True):
        if one.is_floating_point() and not _is_counter(old, one):
            apart += float((one.double() - other.double()).nan_to_num().square().sum())
            changed += float((one.double() - old.double()).nan_to_num().square().sum())
        elif not torch.equal(one, other):
            return float("inf")
    return float((apart / changed) ** 0.5) if changed else float(apart > 0)


def _is_counter(old: Tensor, one: Tensor) -> bool:
    """Whether a number counts, as that of steps: it is compared by itself, since it changes by more than weights do."""
    return not one.dim() and bool(old == old.round()) and bool(one == one.round())


def _most_varied(keys: Mapping[Any, int]) -> str:
    """Return in words which part of the keys differs most."""
    different = [len(set(values)) for values in zip(*keys, strict=True)]
    place = different.index(max(different))
    return f"{_PARTS[place] if place < len(_PARTS) else 'which layers are trained, or their hooks,'} changes"


def _alike(usual: StepReport, replayed: StepReport) -> bool:
    """Whether two reports of one step tell the same."""
    return torch.allclose(usual.pack(), replayed.pack(), rtol=LARGEST_DIFFERENCE, atol=1e-6, equal_nan=True)
