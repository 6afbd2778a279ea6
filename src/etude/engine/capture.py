"""Whole steps as CUDA graphs: recorded once for every form of batch, then replayed with new data.

With a small model the GPU waits for Python: a step has hundreds of kernels, each launched by the host. A captured
step is one launch. Everything it reads has a fixed address: batches are copied into the inputs it was recorded with;
learning rates, loss scale and learned weights are tensors on the device; random numbers continue from the generator's
state. Captured and eager steps do the same arithmetic, so a run may mix them: stopping and resuming it does not
change its weights.

Decisions of the host become constants of a graph. So the active tasks, the trained parameters, weight decay and so on
are part of the key of a graph, and replacing memory invalidates all graphs. The first replay of every graph is
compared with the same step run eagerly.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from etude.core import Batch, StepReport, TrainingError
from etude.core.batch import map_tensors
from etude.core.random import host_draws, rng_state, set_rng_state
from etude.core.spans import needs_eager_steps, span
from etude.engine.explain import first_line, first_of, place_of
from etude.engine.graph import Graph, Inputs, Numbers
from etude.engine.host_state import Watched, host_state
from etude.engine.recorder import GPU_BOUND, CudaRecorder, Recorder, Unfit, form_of, version_of
from etude.engine.step import Step

CaptureMode = Literal["auto", "on", "off"]

WARM_UP_STEPS = 3
"""Eager steps of one form before it is recorded: libraries are loaded, buffers are allocated."""
MOST_GRAPHS = 16
"""Number of graphs to keep; the least recently used one is dropped."""
MOST_FORMS = 128
"""Number of forms of batches, few of them repeated, after which recording is given up."""
FEW_FORMS = 8
"""Number of forms after which the step itself is checked for making every form different."""
LARGEST_DIFFERENCE = 0.05
"""Largest difference between replayed and eager step, relative to the update: kernels sum in any order."""
MOST_LOST = 4
"""Times in a row that graphs may be invalidated before one of them was replayed."""
MOST_BYTES_ON_HOST = 2**32
"""Size of weights and optimizer state up to which they are copied to the host, not to the device, to be compared."""
_PARTS = ("the form of the batches", "what the task does", "its weights", "metrics", "settings of the optimizer")
"""Names of the first components of a key."""


class Capture:
    """Runs the steps of a `Step`, captured where that is possible and faster.

    With `needed`, a step that cannot be captured is an error, and steps of any size are captured.
    """

    def __init__(self, step: Step, recorder: Recorder | None = None, *, needed: bool = False) -> None:
        self.step = step
        self.recorder = recorder if recorder is not None else CudaRecorder(step.updater.device)
        self.needed = needed
        self.refused: str | None = None
        """Why steps run eagerly from now on."""
        self._watched = Watched(step.model, step.updater)
        step.splitter.listeners.append(self._graphs_of_other_sizes)
        self._recoveries = CudaRecorder.recoveries
        self._others: list[Tensor] = []
        """Other tensors of model and task that a step changes in place."""
        self._kept: list[Any] = []
        """Objects that must live as long as the graphs."""
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()
        self._has_noticed_changes = False
        self._lost = 0
        """Times that graphs were invalidated since one of them was replayed."""
        self._seen: dict[Hashable, int] = {}
        self._dropped: dict[Hashable, int] = {}
        self._checked: set[Hashable] = set()

    def __call__(self, micro_batches: Sequence[Batch]) -> StepReport:
        """Train on the micro-batches of one step."""
        number = self.step.clock.step
        if self.refused is not None or not self.step.objective.is_usual(number) or needs_eager_steps():
            return self.step.run(micro_batches)
        if self.step.changed_settings:
            return self._run_changed(micro_batches)
        if any(one.gradients_every > 1 and one.wants_gradients(number) for one in self.step.watchers):
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
        with span("captured"):
            return graph.run(tensors, self.step.updater.lr)

    def _run_changed(self, micro_batches: Sequence[Batch]) -> StepReport:
        """Run a step eagerly: learning rates are on the device, other settings are constants of a graph."""
        what = ", ".join(self.step.changed_settings)
        if self.needed:
            self._give_up(f"a schedule changes {what} between steps")
        if not self._has_noticed_changes:
            self._has_noticed_changes = True
            self.step.notice(f"steps in which a schedule changes {what} are not captured as CUDA graphs")
        return self.step.run(micro_batches)

    # --- the key of a graph

    def _key(self, micro_batches: Sequence[Batch], tensors: list[Tensor]) -> Hashable:
        """Return everything that the host decides about a step; raise Unfit if the step cannot be captured.

        The tensors of the batches are appended to the list.
        """
        step = self.step
        if any(one.gradients_every == 1 for one in step.watchers):
            raise Unfit("a callback reads the gradients of every step")
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
            step.splitter.size,
        )
        try:
            hash(key)
        except TypeError as error:
            raise Unfit(f"batches or settings hold something that cannot be compared ({error})") from error
        return key

    def _forget(self) -> None:
        """Drop all graphs: a checkpoint was loaded, or weights, a cache or a setting of a layer were replaced.

        Raises Unfit if that keeps happening.
        """
        if self._graphs:
            self._lost += 1
            self._seen.clear()
        what = self._watched.changes()
        self._graphs.clear()
        self._others, self._kept = [], []
        if self._lost > MOST_LOST:
            raise Unfit(f"{what or 'memory is replaced'} between steps again and again")
        self._watched.look()
        self._recoveries = CudaRecorder.recoveries

    def _graphs_of_other_sizes(self) -> None:
        """Drop all graphs, and their memory: steps are divided into other micro-batches from now on."""
        self._graphs.clear()
        self._seen.clear()

    def _tensors_of_run(self) -> Iterator[Tensor]:
        """Yield everything a step changes in place: parameters, buffers, optimizer state, loss scale and so on."""
        yield from self._watched.tensors()
        yield from self._others
        if self.step.precision.scaler is not None:
            yield from self.step.precision.scaler.tensors()

    # --- recording

    def _prepare(self, key: Hashable, micro_batches: Sequence[Batch]) -> StepReport:
        """Run a step eagerly, and record it once its form has occurred often enough."""
        if len(self._seen) >= MOST_FORMS:
            often = _most_varied(self._seen)
            self._seen.clear()
            if not self._graphs:
                return self._refuse(f"hardly two steps are alike: {often} nearly always", micro_batches)
        self._seen[key] = self._seen.get(key, 0) + 1
        is_due = self._seen[key] >= WARM_UP_STEPS and self.step.updater.has_stepped
        if not is_due and len(self._seen) != FEW_FORMS:
            return self.step.run(micro_batches)
        drawn, (before, tensors), size = host_draws(), self._host_state(), self.step.splitter.size
        versions = [version_of(tensor) for tensor in tensors]
        report, share = self.recorder.timed(lambda: self.step.run(micro_batches))
        if self.step.splitter.size != size:  # memory ran out: the next steps are divided
            return report
        after, found = self._host_state()
        if host_draws() != drawn:
            self._give_up("the model draws random numbers on the host, which a graph would repeat in every step")
        elif place := next((place for place, one in after.items() if before.get(place, self) != one), ""):
            self._give_up(f"a step changes {place} on the host, which a graph cannot do")
        elif not is_due:
            return report
        elif share < GPU_BOUND and not self.needed and not self.recorder.has_room():
            self.refused = "the device is already fully used without it, and its memory is short"
            self._graphs.clear()
        else:
            known = {id(tensor) for tensor in self._tensors_of_run()}
            pairs = zip(tensors, versions, strict=True)
            self._others += [one for one, old in pairs if version_of(one) != old and id(one) not in known]
            self._kept += found
            self._record(key, micro_batches, report)
        return report

    def _host_state(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Return what model, task and optimizer keep on the host, by path, and their tensors."""
        optimizer, task = self.step.updater.optimizer, self.step.task
        groups = [{key: one for key, one in group.items() if key != "params"} for group in optimizer.param_groups]
        more = {key: one for key, one in vars(optimizer).items() if key not in ("state", "param_groups")}
        parts: dict[str, Any] = {"optimizer": more, "optimizer settings": groups, "callbacks": self.step.after_update}
        parts["optimizer state"] = [*optimizer.state.values()]
        return host_state(**{type(task).__name__: task, type(self.step.model).__name__: self.step.model, **parts})

    def _record(self, key: Hashable, micro_batches: Sequence[Batch], report: StepReport) -> None:
        """Record a step like the eager one that these batches have just run in, with this report."""
        inputs, numbers = Inputs(micro_batches), Numbers(report.pack())
        tensors: list[Tensor] = []
        form_of(micro_batches, tensors)
        # code that reads the rates during the recording gets device tensors, which can be recorded
        inputs.fill(tensors)
        kept = rng_state()
        try:
            layout: list[StepReport] = []

            def run() -> Tensor:
                layout.append(self.step.run(inputs.read()))
                packed = layout[-1].pack()
                numbers.write(packed)
                return packed

            second = self.step.second_pass
            _, replay = self.recorder.record(run, second.before_recording() if second is not None else None)
        except BaseException as error:
            self.recorder.recover()
            set_rng_state(kept)
            self._give_up(_words_for(error), error)
            return
        self._graphs[key] = Graph(inputs.again(), numbers, replay, layout[0], is_checked=key in self._checked)
        while len(self._graphs) > MOST_GRAPHS:
            dropped, _ = self._graphs.popitem(last=False)
            # Recording costs as much as many steps: a form that was dropped must occur more often before it is
            # recorded again.
            self._seen[dropped] = WARM_UP_STEPS * (1 - 4 ** self._dropped.get(dropped, 0))
            self._dropped[dropped] = self._dropped.get(dropped, 0) + 1

    # --- checking a recording

    def _check(
        self, key: Hashable, graph: Graph, micro_batches: Sequence[Batch], tensors: list[Tensor]
    ) -> StepReport:
        """Run one step both ways from the same state; keep the result of the replay if both agree."""
        state, kept = [tensor.detach() for tensor in self._tensors_of_run()], rng_state()
        try:
            before, room = _room_for(state), _room_for(state)
        except torch.OutOfMemoryError:
            return self._refuse("there is not enough memory to compare it with the eager step", micro_batches)
        torch._foreach_copy_(before, state)
        usual = self.step.run(
            [map_tensors(batch, torch.clone) for batch in micro_batches]
        )  # a model may modify its input
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
            torch.cuda.empty_cache()  # the memory of eager steps: the graph has its own
            return report
        torch._foreach_copy_(state, room)
        set_rng_state(drawn)
        self._give_up(f"the captured step differs from the eager one by {difference:.2g} of its update")
        return usual

    def _refuse(self, why: str, micro_batches: Sequence[Batch]) -> StepReport:
        self._give_up(why)
        return self.step.run(micro_batches)

    def _give_up(self, why: str, error: BaseException | None = None) -> None:
        """Run all steps eagerly from now on, and report why."""
        self.refused = why
        self._graphs.clear()
        if self.needed:
            raise TrainingError(
                f"the step cannot be captured as a CUDA graph: {why}; set training.capture to auto or off"
            ) from error
        self.step.notice(f"steps are not captured as CUDA graphs: {why}")


def _words_for(error: BaseException) -> str:
    """Return the error of a failed recording and its location; raise it again if it is Ctrl-C.

    This is not done in `_record`: a frame that holds an error whose traceback holds the frame is freed late. So are
    the autograd nodes of the recording's stream, about which the next backward pass would warn.
    """
    cause = first_of(error)  # ending a failed recording raises once more
    for one in (error, cause):
        if not isinstance(one, Exception):  # later runs of the process need the device in a usable state
            raise one from None
    where = place_of(cause)
    return f"{first_line(cause)}{f' ({where})' if where else ''}"


def _room_for(state: list[Tensor]) -> list[Tensor]:
    """Return memory for a copy of these tensors: on the host, so that the device needs none, unless it is large."""
    is_large = sum(tensor.nbytes for tensor in state) > MOST_BYTES_ON_HOST
    return [torch.empty_like(tensor, device=tensor.device if is_large else "cpu") for tensor in state]


def _difference(before: list[Tensor], usual: list[Tensor], replayed: list[Tensor]) -> float:
    """Return the difference of two steps relative to the size of the eager update."""
    apart = changed = 0.0
    for *copies, other in zip(before, usual, replayed, strict=True):
        old, one = (copy.to(other.device) for copy in copies)
        if one.is_floating_point() and not _is_counter(old, one):
            apart += float((one.double() - other.double()).nan_to_num().square().sum())
            changed += float((one.double() - old.double()).nan_to_num().square().sum())
        elif not torch.equal(one, other):
            return float("inf")
    return float((apart / changed) ** 0.5) if changed else float(apart > 0)


def _is_counter(old: Tensor, one: Tensor) -> bool:
    """Whether a tensor is a counter, such as the number of steps: it changes by more than weights do."""
    return not one.dim() and bool(old == old.round()) and bool(one == one.round())


def _most_varied(keys: Mapping[Any, int]) -> str:
    """Describe which component of the keys differs most."""
    different = [len(set(values)) for values in zip(*keys, strict=True)]
    place = different.index(max(different))
    return f"{_PARTS[place] if place < len(_PARTS) else 'which layers are trained, or their hooks,'} changes"


def _alike(usual: StepReport, replayed: StepReport) -> bool:
    """Whether two reports of one step agree."""
    return torch.allclose(usual.pack(), replayed.pack(), rtol=LARGEST_DIFFERENCE, atol=1e-6, equal_nan=True)
