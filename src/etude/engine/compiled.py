"""The mathematics of a step as one compiled region: model, loss terms and metrics together.

Compiled alone, a model hands its output to a loss that runs piece by piece, with copies of it in float32; compiled
together, these are one kernel or two. Every shape of batch is compiled for itself. Where the size of whole batches is
known and they are alike, what a batch is computed with does not depend on what came before it: a resumed run computes
as the run that never stopped did. A batch that is smaller than the others, as the last one of an epoch, is run as
usual: compiling would take longer than it ever could save.
"""

from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from etude.core import Batch, Task, Terms, num_samples
from etude.core.buffers import probing
from etude.core.task import LossTerm
from etude.engine.explain import first_line, first_of
from etude.engine.meter import count_forward, matrix_parameters

CompileMode = Literal["auto", "off", "model", "step"]

MOST_SHAPES = 64
"""Shapes of batches that are compiled; batches of others are run as usual."""
COMPILE_S, COMPILE_LAYER_S = 6.0, 0.3
"""About how long compiling takes, and how much longer for every layer."""
SAVED, SAVED_LAYER_S, FLOPS_PER_S = 0.2, 4e-6, 2e14
"""About what it saves: a share of the time for a step's FLOPs, and some launches for every layer."""
WORTH = 2.0
"""Compiling by itself must save this many times what it takes."""


class CompiledTask:
    """Runs a task by compiled code; the terms are those of the task.

    `batch_size` is that of whole batches, None if only the batches show it. `is_worthwhile` is asked once, with the
    model and the first whole batch, whether to compile at all.
    """

    def __init__(
        self,
        task: Task | Callable[..., Terms],
        *,
        batch_size: int | None = None,
        is_worthwhile: Callable[[nn.Module, Batch], bool] | None = None,
        notice: Callable[[str], None],
        warn: Callable[[str], None],
        backend: Any = "inductor",
    ) -> None:
        self.task = task
        self.backend = backend
        self.notice, self.warn = notice, warn
        self.refused: str | None = None
        """Why batches are run as usual."""
        self._batch_size = batch_size
        self._largest = 0
        self._is_worthwhile = is_worthwhile
        self._compiled: Callable[..., dict[str, tuple[Any, ...]]] | None = None

    def __call__(self, model: nn.Module, batch: Batch, *, metrics: bool | None) -> Terms:
        """Run the model on the batch and return its terms."""
        if self.refused is not None or not self._is_whole(batch):
            return self.task(model, batch, metrics=metrics)
        if self._compiled is None and not self._begin(model, batch, metrics):
            return self.task(model, batch, metrics=metrics)
        assert self._compiled is not None
        try:
            found = self._compiled(self.task, model, batch, metrics)
        except Exception as error:
            if not _is_of_compiler(error):
                raise
            self.refused = first_line(first_of(error))
            self.warn(f"the step is not compiled: {self.refused}")
            return self.task(model, batch, metrics=metrics)
        return {name: LossTerm(*parts) for name, parts in found.items()}

    def _is_whole(self, batch: Batch) -> bool:
        size = num_samples(batch)
        self._largest = max(self._largest, size)
        return size >= (self._largest if self._batch_size is None else self._batch_size)

    def _begin(self, model: nn.Module, batch: Batch, metrics: bool | None) -> bool:
        """Compile, unless that is not worthwhile; say so, as it takes a while."""
        if self._is_worthwhile is not None and not self._is_worthwhile(model, batch):
            self.refused = "the run is too short"
            return False
        with probing(model, training=True):
            self.task(model, batch, metrics=metrics)  # what the first batch decides is no part of compiled code
        import torch._dynamo

        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_SHAPES)
        self._compiled = torch.compile(_parts, dynamic=False, backend=self.backend)
        self.notice("compiling the step; later runs take it from a cache")
        return True


def _parts(task: Task, model: nn.Module, batch: Batch, metrics: bool | None) -> dict[str, tuple[Any, ...]]:
    terms = task(model, batch, metrics=metrics)
    return {name: (one.sum, one.count, one.weight, one.reported, one.optional) for name, one in terms.items()}


def _is_of_compiler(error: Exception) -> bool:
    """Whether the compiler has failed, and not the code that it compiles."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch.fx"))


def saves_time(steps: int | None, micro_batches: int, run: Callable[[nn.Module, Batch], Any]) -> Callable[..., bool]:
    """Return a function of model and batch that says whether compiling saves more than it takes in so many steps.

    It looks at sizes alone, never at a clock: the same run decides the same again.
    """

    def decide(model: nn.Module, batch: Batch) -> bool:
        if any(one._forward_hooks or one._forward_pre_hooks for one in model.modules()):
            return False  # somebody looks into the layers
        if steps is None:
            return True
        layers = sum(1 for one in model.modules() if next(one.children(), None) is None)
        try:
            flops = 3.0 * count_forward(model, batch, run) * num_samples(batch)
        except Exception:  # code of any kind, on tensors it was not written for
            flops = 6.0 * matrix_parameters(model) * num_samples(batch)
        saved = steps * micro_batches * (SAVED * flops / FLOPS_PER_S + SAVED_LAYER_S * layers)
        return saved > WORTH * (COMPILE_S + COMPILE_LAYER_S * layers)

    return decide
