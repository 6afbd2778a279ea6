"""Model, loss terms and metrics of a step compiled as one region.

If only the model is compiled, the loss runs eagerly on its output, with float32 copies of it; compiled together, this
is one kernel or two. Each shape of batch is compiled separately. A batch smaller than the others, such as the last
one of an epoch, runs eagerly: compiling would take longer than it can save.

Compiled and eager code round differently. So checkpoints keep a run's decisions: whether it compiles, the size of a
full batch, and which shapes are compiled. A resumed run then computes exactly what an uninterrupted run does.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any, Literal
from weakref import WeakSet

import torch
from annotated_types import Ge, Lt
from torch import Tensor, nn

from etude.core import Batch, Task, Terms, num_samples
from etude.core.batch import map_tensors
from etude.core.buffers import probing
from etude.core.forms import parts_of
from etude.core.task import LossTerm
from etude.engine.explain import compiler_problem, is_of_compiler
from etude.engine.flops import FLOPS_PER_WEIGHT, matrix_parameters
from etude.engine.recompute import forget_cache, is_recomputed, recompute_compiled
from etude.engine.recorder import Unfit, form_of as batch_form

CompileMode = Literal["auto", "off", "model", "step"]
Way = Literal["usual", "model", "step"]
"""What is compiled: nothing, the model alone, or the step."""
DECISIONS = {"mode": CompileMode, "way": Way, "largest": Annotated[int, Ge(0), Lt(2**63)], "shapes": list[str]}
"""What `CompiledTask.decisions` returns; shapes are digests of what `form_of` returns."""

MOST_SHAPES = 64
"""Number of batch shapes that are compiled; batches of other shapes run eagerly."""
FORMS = 8
"""Number of times that a block is compiled: in training and validation, frozen and not, for new shapes."""
COMPILE_S, COMPILE_LAYER_S = 6.0, 0.3
"""Approximate time to compile, and the additional time per layer."""
SAVED, SAVED_LAYER_S, FLOPS_PER_S = 0.25, 1e-5, 2e14
"""Approximate savings: a share of the time for a step's FLOPs, and some kernels per layer."""
WORTH = 2.0
"""In auto mode, compiling must save this many times what it costs."""
_compiled_here: WeakSet[nn.Module] = WeakSet()
"""What `compile_in_place` has compiled; modules that users compiled are not among it."""


class CompiledTask:
    """Runs a task as compiled code; the terms are those of the task.

    `mode` is the setting. `way` is the decision if the mode alone determines it, None if the step is or may be
    compiled. `batch_size` is that of full batches, None if it must be read from the batches.
    """

    def __init__(
        self,
        task: Task | Callable[..., Terms],
        *,
        mode: CompileMode = "step",
        way: Way | None = None,
        batch_size: int | None = None,
        notice: Callable[[str], None],
        warn: Callable[[str], None],
        backend: Any = "inductor",
    ) -> None:
        self.task = task
        self.mode = mode
        self.backend = backend
        self.notice, self.warn = notice, warn
        self.is_worthwhile: Callable[[nn.Module, Batch], bool] = lambda _model, _batch: True
        """Decides in auto mode, given the model and the first full batch, whether to compile at all."""
        self._given_way = way
        self._batch_size = batch_size
        self._forget()

    def _forget(self) -> None:
        self.refused: str | None = None
        """Why batches run eagerly."""
        self._way = self._given_way
        self._largest = 0
        self._shapes: dict[str, None] = {}
        self._known: set[Hashable] = set()
        """Forms of batches known to have one of the compiled shapes."""
        self._compiled: Callable[..., dict[str, tuple[Any, ...]]] | None = None

    def __call__(self, model: nn.Module, batch: Batch, *, metrics: bool | None) -> Terms:
        """Run the model on the batch and return its terms."""
        if self.refused is not None or not self._is_whole(batch):
            return self.task(model, batch, metrics=metrics)
        if self._compiled is None:
            self._begin(model, batch, metrics)
        if self._compiled is None or not self._has_place(form_of(batch)):
            return self.task(model, batch, metrics=metrics)
        try:
            found = self._compiled(self.task, model, batch, metrics)
        except Exception as error:
            if not is_of_compiler(error):
                raise
            self._refuse(compiler_problem(error))
            self.warn(f"the step is not compiled: {self.refused}")
            return self.task(model, batch, metrics=metrics)
        return {name: LossTerm(*parts) for name, parts in found.items()}

    def resize(self) -> None:
        """Compile smaller batches too: from now on they are divided differently."""
        self._batch_size, self._largest = None, 0

    # --- what is decided

    def decisions(self) -> dict[str, Any]:
        """Return the decisions as plain data for checkpoints; empty if they follow from the machine."""
        if self._way is None or (self.mode == "auto" and self._given_way is not None):
            return {}
        return {"mode": self.mode, "way": self._way, "largest": self._largest, "shapes": list(self._shapes)}

    def decide(self, decisions: Mapping[str, Any]) -> None:
        """Replace all decisions by those that `decisions` returned, unless the mode requires something else."""
        self._forget()
        way = decisions.get("way", "model")
        asked_for = way == "step" or self.mode in ("auto", decisions.get("mode"))
        if way == "model" or not asked_for or self._given_way is not None:
            return
        if way == "usual":
            self._refuse("it was not compiled before the checkpoint")
        self._way, self._largest = way, decisions["largest"]
        self._shapes = dict.fromkeys(decisions["shapes"])

    def difference(self, decisions: Mapping[str, Any]) -> str:
        """Describe how these decisions differ from the current ones or from the mode; empty if they do not."""
        if decisions and self._way != decisions["way"]:
            before = {"usual": "nothing", "model": "the model alone", "step": "the step"}[decisions["way"]]
            return (
                f"before the checkpoint {before} was compiled, and training.compile is {self.mode} now: weights may "
                "differ in the last bits from those of an uninterrupted run"
            )
        if self.refused and self.mode == "step":
            return "the step is not compiled: the compiler failed before the checkpoint"
        return ""

    def _is_whole(self, batch: Batch) -> bool:
        size = num_samples(batch)
        self._largest = max(self._largest, size)
        return size >= (self._largest if self._batch_size is None else self._batch_size)

    def _has_place(self, form: Hashable) -> bool:
        """Whether batches of a form are compiled: only the first few forms are."""
        if form in self._known:
            return True
        # a digest, because a batch may hold long texts
        shape = blake2b(repr(form).encode(), digest_size=8).hexdigest()
        if shape not in self._shapes:
            if len(self._shapes) >= MOST_SHAPES:
                return False
            self._shapes[shape] = None
            if len(self._shapes) == MOST_SHAPES:
                self.notice(f"{MOST_SHAPES} batch shapes are compiled; batches of other shapes run eagerly")
        self._known.add(form)
        return True

    def _is_of_no_use(self, model: nn.Module, batch: Batch) -> str:
        """Return why auto mode does not compile; empty if compiling is worthwhile."""
        try:
            batch_form(batch, [])
        except Unfit as why:  # code is compiled for known shapes, and these are unknown
            return str(why)
        return "" if self.is_worthwhile(model, batch) else "the run is too short"

    def _refuse(self, why: str) -> None:
        self.refused, self._way = why, "usual"

    def _begin(self, model: nn.Module, batch: Batch, metrics: bool | None) -> None:
        """Compile if worthwhile, and notify the user, because it takes a while."""
        if self._way is None and self.mode == "auto" and (why := self._is_of_no_use(model, batch)):
            self._refuse(why)
            return
        with probing(model, training=True):
            self.task(model, batch, metrics=metrics)  # decisions taken on the first batch must not be traced
        from torch._dynamo import config

        config.recompile_limit = max(config.recompile_limit, 2 * MOST_SHAPES)
        self._way, self._compiled = "step", torch.compile(_parts, dynamic=False, backend=self.backend)
        self.notice("compiling the step; later runs use the compilation cache")


def compile_blocks(model: nn.Module, names: Sequence[str]) -> None:
    """Compile blocks of a model in place, which share code where they are alike."""
    from torch._dynamo import config

    forget_cache(model)  # each block has its own place there, and would be compiled for it
    forms = FORMS * len(names)  # torch counts all blocks as one
    config.recompile_limit = max(config.recompile_limit, forms)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, forms)
    for name in names:
        compile_in_place(model.get_submodule(name))


def compile_in_place(module: nn.Module) -> None:
    """Compile a module; its class and parameter names stay. If it is recomputed, what is recomputed is compiled.

    A forward pass that was set on the module itself is kept. Copies and pickles are not compiled.
    """
    _compiled_here.add(module)
    if is_recomputed(module):
        recompute_compiled(module, torch.compile(_forward))
    elif "forward" not in vars(module) and (module.forward.__module__ or "").startswith("torch.nn."):
        # Of modules of torch, such as nn.Sequential, `compile` leaves the forward pass as it is.
        module._compiled_call_impl = functools.partial(_call, module, torch.compile(_forward))
    else:
        module.compile()


def undo_compiling(model: nn.Module) -> None:
    """Let the modules of a model that `compile_in_place` has compiled run eagerly again."""
    for module in model.modules():
        if module in _compiled_here:
            _compiled_here.discard(module)
            module._compiled_call_impl = None
            if is_recomputed(module):
                recompute_compiled(module, None)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _call(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module with compiled code in place of its forward pass; its hooks, as of FSDP2, are not compiled."""
    module.forward = functools.partial(forward, module)
    try:
        return module._call_impl(*args, **kwargs)
    finally:
        del module.forward


def form_of(batch: Batch) -> Hashable:
    """Return what code is compiled for: shapes and dtypes of tensors, and all other plain values.

    >>> import torch
    >>> form_of({"x": torch.zeros(2, 3), "causal": True})
    (('x', (torch.Size([2, 3]), torch.float32)), ('causal', True))
    """
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    parts = parts_of(batch)
    if parts is not None:
        forms = [form_of(value) for value in parts.values()]
        return tuple(forms if isinstance(batch, (tuple, list)) else zip(parts, forms, strict=True))
    return batch if isinstance(batch, (bool, int, float, str)) else type(batch).__name__


def _parts(task: Task, model: nn.Module, batch: Batch, metrics: bool | None) -> dict[str, tuple[Any, ...]]:
    terms = task(model, batch, metrics=metrics)
    return {name: (one.sum, one.count, one.weight, one.reported, one.optional) for name, one in terms.items()}


def saves_time(steps: int | None, micro_batches: int, run: Callable[[nn.Module, Batch], Any]) -> Callable[..., bool]:
    """Return a predicate of model and batch: whether compiling saves more than it costs in so many steps.

    It depends on sizes alone, never on measured time, so the same run always decides the same.
    """

    def decide(model: nn.Module, batch: Batch) -> bool:
        if any(one._forward_hooks or one._forward_pre_hooks for one in model.modules()):
            return False  # hooks need the layers
        if steps is None:
            return True
        layers = sum(1 for one in model.modules() if next(one.children(), None) is None)

        def pays(flops: float) -> bool:
            saved = steps * micro_batches * (SAVED * flops / FLOPS_PER_S + SAVED_LAYER_S * layers)
            return saved > WORTH * (COMPILE_S + COMPILE_LAYER_S * layers)

        # Importing the counter imports the compiler, which takes seconds.
        return pays(most_flops(model, batch)) and pays(count_flops(model, batch, run))

    return decide


def count_flops(model: nn.Module, batch: Batch, run: Callable[[nn.Module, Batch], Any]) -> float:
    """Return the approximate FLOPs of a training step on the batch: three times those of a forward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    with probing(model, training=True), FlopCounterMode(display=False) as counter:
        run(model, batch)
    return max(
        3.0 * int(counter.get_total_flops()), float(FLOPS_PER_WEIGHT * matrix_parameters(model) * num_samples(batch))
    )


def most_flops(model: nn.Module, batch: Batch) -> float:
    """Return an upper bound of a step's FLOPs: ten times one use of every weight for every input value.

    The factor covers products of activations: attention exceeds it if sequences are 50 times longer than the model
    width.
    """
    numbers = 0

    def add(tensor: Tensor) -> Tensor:
        nonlocal numbers
        numbers += tensor.numel()
        return tensor

    map_tensors(batch, add)
    return 10.0 * FLOPS_PER_WEIGHT * matrix_parameters(model) * numbers
