"""Evaluation batches as CUDA graphs: weights change between evaluations, their addresses do not.

One graph per form of batch is kept across evaluations. Decisions of the host are constants of a graph, so model and
task are inspected at the start of each evaluation, and any change invalidates all graphs. Metrics may add to sums on
the device; a batch that changes any other state of the model or task runs eagerly.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from etude.core import Batch, Task, Terms
from etude.core.batch import map_tensors
from etude.core.random import host_draws, rng_state, set_rng_state
from etude.engine.host_state import host_state
from etude.engine.recorder import GPU_BOUND, Recorder, Unfit, form_of, version_of

WARM_UP_BATCHES = 2
"""Eager batches of one form before it is recorded."""
MOST_GRAPHS = 16
MOST_LOST = 2
"""Evaluations in which graphs may be invalidated before recording is given up."""
TOLERANCE = 1e-3
SUM, COUNT = "sum", "count"


class EvaluationNumbers:
    """The values of terms: those on the device as one float64 vector, and counts that the host knows."""

    def __init__(self, terms: Terms) -> None:
        reported = {name: term for name, term in terms.items() if term.reported}
        counts = {name: term.count for name, term in reported.items()}
        self.host_counts = {name: float(count) for name, count in counts.items() if not isinstance(count, Tensor)}
        on_device = [name for name in counts if name not in self.host_counts]
        self.places = (*[(name, SUM) for name in reported], *[(name, COUNT) for name in on_device])
        self.optional = {name for name, term in reported.items() if term.optional}
        tensors = [term.sum for term in reported.values()]
        tensors += [count for count in counts.values() if isinstance(count, Tensor)]
        self.vector = torch.stack([tensor.detach().double() for tensor in tensors]) if tensors else None


@dataclass(slots=True)
class EvaluationGraph:
    """One captured batch."""

    inputs: list[Tensor]
    numbers: EvaluationNumbers
    replay: Callable[[], object]


class CapturedEvaluation:
    """Runs the batches of evaluations, captured where that is possible and faster."""

    def __init__(self, recorder: Recorder, *, needed: bool = False) -> None:
        """With `needed`, batches of any size are captured."""
        self.recorder, self.needed = recorder, needed
        self.refused: str | None = None
        """Why batches run eagerly from now on."""
        self._graphs: dict[Hashable, EvaluationGraph] = {}
        self._seen: dict[Hashable, int] = {}
        self._looked: Any = None
        self._kept: list[Tensor] = []
        """References that keep ids and addresses from being reused."""
        self._lost = 0
        self._task: Task | None = None

    def begin(self, model: nn.Module, task: Task) -> None:
        """Check whether everything is where it was in the previous evaluation."""
        if self.refused is not None:
            return
        self._model, self._task = model, task
        if self._graphs and self._look()[0] != self._looked:
            self._graphs.clear()
            self._lost += 1
            if self._lost > MOST_LOST:
                self._refuse("the model or the task is a different object in every evaluation")

    def _look(self) -> tuple[Any, list[Tensor]]:
        """Return the state of model and task and the addresses of their tensors, for comparison, and the tensors."""
        found, tensors = host_state(model=self._model, task=self._task)
        return (found, [one.data_ptr() for one in tensors if one.layout is torch.strided]), tensors

    def __call__(self, run: Callable[[Batch], Terms], batch: Batch) -> EvaluationNumbers:
        """Return the values of a batch; the next call may overwrite them."""
        tensors: list[Tensor] = []
        key: Hashable = None
        if self.refused is None and self._task is not None:
            try:
                key = (form_of(batch, tensors), self._task.version, self._task.constants())
                graph = self._graphs.get(key)
            except (Unfit, TypeError) as why:  # the key cannot be hashed or compared
                self._refuse(str(why))
            else:
                if graph is not None:
                    torch._foreach_copy_(graph.inputs, tensors, non_blocking=True)
                    graph.replay()
                    return graph.numbers
                self._seen[key] = self._seen.get(key, 0) + 1
                if self._seen[key] > WARM_UP_BATCHES and len(self._graphs) < MOST_GRAPHS:
                    return self._record(key, run, batch)
        return EvaluationNumbers(run(batch))

    def _record(self, key: Hashable, run: Callable[[Batch], Terms], batch: Batch) -> EvaluationNumbers:
        """Run a batch eagerly, and record it if that is faster and the batch changes no state."""
        drawn, (before, tensors) = host_draws(), self._look()
        versions = [version_of(tensor) for tensor in tensors]
        sums = self._sums()
        kept = [one.clone() for one in sums]
        usual, share = self.recorder.timed(lambda: EvaluationNumbers(run(batch)))
        if host_draws() != drawn:
            self._refuse("random numbers are drawn on the host")
        elif self._look()[0] != before:
            self._refuse("a batch changes state of the model or task on the host")
        elif self._changes(tensors, versions, sums):
            self._refuse("a batch changes tensors of the model or task")
        elif share < GPU_BOUND and not self.needed:
            self._refuse("the device is already fully used without it")
        elif usual.vector is not None and (not self._graphs or before == self._looked):
            self._looked, self._kept = before, tensors
            usual_sums = [one.clone() for one in sums]
            self._try(key, run, batch, usual, (sums, kept, usual_sums))
            for one, value in zip(sums, usual_sums, strict=True):
                one.copy_(value)
        return usual

    def _sums(self) -> list[Tensor]:
        """Return the tensors of the metrics, to which a batch may add."""
        assert self._task is not None
        return host_state(measures=self._task.measures)[1]

    @staticmethod
    def _changes(tensors: list[Tensor], versions: list[int], sums: list[Tensor]) -> bool:
        """Whether a tensor has changed that is not a sum of a metric."""
        allowed = {id(one) for one in sums}
        pairs = zip(tensors, versions, strict=True)
        return any(version_of(one) != version and id(one) not in allowed for one, version in pairs)

    def _try(
        self,
        key: Hashable,
        run: Callable[[Batch], Terms],
        batch: Batch,
        usual: EvaluationNumbers,
        measured: tuple[list[Tensor], list[Tensor], list[Tensor]],
    ) -> None:
        """Record a batch; keep the graph if a replay gives the values and sums of the eager run.

        `measured` holds the sums of metrics, and their values before and after the eager run.
        """
        inputs: list[Tensor] = []
        copies = map_tensors(batch, torch.clone)
        form_of(copies, inputs)
        layout: list[EvaluationNumbers] = []

        def function() -> Tensor:
            layout.append(EvaluationNumbers(run(copies)))
            assert layout[-1].vector is not None
            return layout[-1].vector

        kept = rng_state()
        try:
            vector, replay = self.recorder.record(function)
            sums, before, after = measured
            for one, value in zip(sums, before, strict=True):
                one.copy_(value)
            replay()
        except Exception as error:
            self.recorder.recover()
            self._refuse(str(error))
            return
        finally:
            set_rng_state(kept)
        layout[0].vector = vector
        assert usual.vector is not None
        pairs = [(vector, usual.vector), *zip(sums, after, strict=True)]
        if all(torch.allclose(*pair, rtol=TOLERANCE, atol=1e-6, equal_nan=True) for pair in pairs):
            self._graphs[key] = EvaluationGraph(inputs, layout[0], replay)
        else:
            self._refuse("a captured batch differs from the eager one")

    def _refuse(self, why: str) -> None:
        self.refused = why
        self._graphs.clear()
