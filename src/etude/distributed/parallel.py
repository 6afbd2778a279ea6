"""Data parallelism: wrapping a model, local gradients, and ranks without samples."""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from etude.core.batch import Batch, is_empty
from etude.core.errors import ConfigError, TrainingError
from etude.core.model import is_divided, linked
from etude.core.task import LossTerm, Task, Terms
from etude.distributed.lockstep import Spare
from etude.distributed.shards import model_param
from etude.distributed.sharing import share
from etude.distributed.world import World

_FLOATS = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_BROADCAST = _FLOATS | {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool}
"""Types that both gloo and NCCL communicate."""


def wrap_data_parallel(
    model: nn.Module, world: World, device: torch.device, *, find_unused_parameters: bool = False
) -> nn.Module:
    """Return the model wrapped in DistributedDataParallel.

    Buffers (running statistics) are broadcast from rank 0 in every step (`begin_reduction`).
    """
    whole = model if find_unused_parameters else _Carrying(model, device)
    # Of types that DDP cannot broadcast there are constants, such as the angles of rotary positions: once is enough.
    unknown = {name: one for name, one in model.named_buffers() if one.dtype not in _BROADCAST and one.numel()}
    if unknown:
        share([*unknown.values()], world)
        ignored = [*unknown, *(f"model.{name}" for name in unknown)]  # also inside `_Carrying` and `_Idle`
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(whole, ignored)
    frozen = [param for param in model.parameters() if not param.requires_grad]
    device_ids = [device.index] if device.type == "cuda" else None
    if any(param.dim() == 4 and 1 in param.shape[1:] for param in model.parameters()):
        # Both memory formats fit such a weight, and its gradient may have the other one: a few numbers are copied.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    wrapped = DistributedDataParallel(whole, device_ids=device_ids, find_unused_parameters=find_unused_parameters)
    # torch all-reduces in the first backward pass after a forward pass, which may be one that a task runs itself.
    wrapped.require_backward_grad_sync = False  # `run_backward` chooses the pass
    _FROZEN[wrapped] = frozen
    if not isinstance(whole, _Carrying):
        return wrapped
    wrapped.module, _CARRIERS[wrapped] = model, whole.carrier
    # After its first backward pass torch rebuilds the gradient buckets, which changes the order in which three or
    # more ranks are summed. Done here, the first step after a resume sums like any other.
    run_backward(wrapped, idle_output(wrapped))
    for param in model.parameters():
        param.grad = None
    return wrapped


_CARRIERS: WeakKeyDictionary[nn.Module, nn.Parameter] = WeakKeyDictionary()
"""By wrapped model, a parameter that is not trained: its gradient is a count, which is all-reduced with the others."""

_DUE: WeakSet[nn.Module] = WeakSet()
"""Wrapped models whose gradients have not been all-reduced in this step."""
_FROZEN: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()
"""By wrapped model, the parameters that were frozen when it was wrapped: torch does not all-reduce their gradients."""


class _Carrying(nn.Module):
    """A model with a carrier beside it, of a dtype that shares a bucket with others."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        dtypes = {param.dtype for param in model.parameters() if param.requires_grad}
        exact = torch.float64 if torch.float64 in dtypes and torch.float32 not in dtypes else torch.float32
        self.model, self.carrier = model, nn.Parameter(torch.zeros((), dtype=exact, device=device))


def begin_reduction(model: nn.Module) -> None:
    """Begin a step: buffers of rank 0 are broadcast before its first forward pass, also if the last step failed.

    Only there: a rank without samples runs the model once, however often the task runs it.
    """
    if isinstance(model, DistributedDataParallel):
        _DUE.add(model)
        model.require_forward_param_sync = True


def run_backward(model: nn.Module, loss: Tensor, count: Tensor | float = 0.0) -> None:
    """Run a backward pass, which all-reduces the gradients of a wrapped model except in `local_gradients`.

    The count of the step goes with them: a collective of its own for one number would take as long as one for all
    gradients of a small model.
    """
    if not isinstance(model, DistributedDataParallel) or model in _LOCAL:
        loss.backward()
        return
    _DUE.discard(model)
    model.reducer.prepare_for_backward([loss] if model.find_unused_parameters else [])
    if (carrier := _CARRIERS.get(model)) is None:
        loss.backward()
        return
    carrier.grad = None
    number = count.to(carrier) if isinstance(count, Tensor) else torch.full_like(carrier, count)
    torch.autograd.backward([loss, carrier], [None, number.detach().reshape(())])


def finish_reduction(model: nn.Module, count: Tensor | float) -> None:
    """All-reduce the gradients of a step, and its count, unless a backward pass has done so."""
    if model in _DUE:
        run_backward(model, idle_output(model), count)


def mean_count(model: nn.Module) -> Tensor | None:
    """Return the mean over ranks of the counts of the last `run_backward`; None if counts do not go with gradients."""
    return None if (carrier := _CARRIERS.get(model)) is None else carrier.grad


def check_whole(model: nn.Module) -> None:
    """Raise ConfigError for a model that other code has wrapped or divided: its gradients would be averaged twice.

    A step that does not know of the other processes would divide them by the count of its own samples.
    """
    wrappers = [one for one in model.modules() if isinstance(one, DistributedDataParallel)]
    if any(one.process_group.size() > 1 for one in wrappers) or any(map(is_divided, model.parameters())):
        raise ConfigError(
            "the model is wrapped or divided over processes already, by DistributedDataParallel, FSDP or an earlier "
            "Trainer; give a plain model to a Trainer, which divides it as its `parallel` says"
        )


def check_inside(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if an optimizer updates parameters outside the model: they would differ between ranks."""
    own = {id(param) for param in model.parameters()}
    if any(id(model_param(param)) not in own for group in optimizer.param_groups for param in group["params"]):
        raise ConfigError(
            "the optimizer has parameters outside the model (for example of the loss); with several processes add "
            "them to the model, so that they stay in sync"
        )


_LOCAL: WeakSet[nn.Module] = WeakSet()
"""Models whose backward passes do not all-reduce now."""


@contextmanager
def local_gradients(model: nn.Module) -> Iterator[None]:
    """Within this block, backward passes do not all-reduce: for all but the last micro-batch."""
    _LOCAL.add(model)
    try:
        with _without_sync(model):
            yield
    finally:
        _LOCAL.discard(model)


@contextmanager
def _without_sync(model: nn.Module) -> Iterator[None]:
    if is_sharded(model):
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)  # type: ignore[operator]
    else:
        yield


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards a model; its package, which takes long to import, is then imported."""
    package = sys.modules.get("torch.distributed.fsdp")
    return package is not None and isinstance(model, package.FSDPModule)


def reshard(model: nn.Module) -> None:
    """Free the gathered weights of a sharded model, so that its parameters are the shards again."""
    if is_sharded(model):
        for module in model.modules():
            if is_sharded(module):
                module.reshard()  # type: ignore[operator]


def idle_output(model: nn.Module) -> Tensor:
    """Return 0 with a zero gradient for every parameter: what a rank without samples adds to a step.

    The model itself is not run: few models accept an empty batch. The gradients are still all-reduced. Raises
    TrainingError for a sharded model, which can only take part by being run.
    """
    if is_sharded(model):
        raise TrainingError(
            "no process has anything to learn from the last micro-batch of a step, which sharded models do not "
            "support; drop samples without labels, or set parallel.shard to 1"
        )
    params = [param for param in model.parameters() if param.requires_grad]
    if not isinstance(model, DistributedDataParallel):
        return _nothing_of(params, set())
    module = model.module
    model.module = _Idle(module, params, are_used=not model.find_unused_parameters)
    try:
        return model(0)  # type: ignore[no-any-return]
    finally:
        model.module = module


class _Idle(nn.Module):
    """Replaces a model for one call; it has the same buffers."""

    def __init__(self, model: nn.Module, params: list[nn.Parameter], *, are_used: bool) -> None:
        super().__init__()
        self.model = model
        self._params, self._are_used = params, are_used
        self._sparse = {one.weight for one in sparse_layers(model).values()}

    def forward(self, _: int) -> Tensor:
        """Return 0, with zero gradients; without any if torch looks for parameters that no rank has used.

        The argument is for DistributedDataParallel, which fails without one on CUDA.
        """
        if self._are_used:
            return _nothing_of(self._params, self._sparse)
        return linked(torch.zeros((), device=self._params[0].device), self._params[0])  # torch needs one to begin


def _nothing_of(params: list[nn.Parameter], sparse: set[Tensor]) -> Tensor:
    """Return the sum over an empty slice of every parameter; the gradient of those in `sparse` is sparse."""
    nowhere = torch.empty(0, dtype=torch.int64, device=params[0].device)
    parts = (F.embedding(nowhere, one, sparse=True) if one in sparse else one.flatten()[:0] for one in params)
    return torch.stack([part.sum().real.float() for part in parts]).sum()


def sparse_layers(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Return the layers whose weights have sparse gradients, by name."""
    layers = {name: one for name, one in model.named_modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag))}
    return {name: one for name, one in layers.items() if one.sparse}


def nothing_of_terms(terms: Terms) -> Tensor:
    """Return 0 with a zero gradient for whatever the loss depends on: terms that are only watched have no gradient."""
    chosen = [term for term in terms.values() if term.is_weighted] or [*terms.values()]
    sums = [term.sum for term in chosen]
    trained = [one for one in sums if one.requires_grad] or sums
    return torch.stack([one.float() * 0.0 for one in trained]).sum()


def check_frozen(model: nn.Module) -> None:
    """Raise TrainingError if a parameter is trained that was frozen when the model was wrapped: ranks would diverge."""
    if any(param.requires_grad for param in _FROZEN.get(model, ())):
        raise TrainingError(
            "a parameter that was frozen when training began requires a gradient now, which processes would not "
            "all-reduce; unfreeze it by training.unfreeze, or make a new Trainer"
        )


def check_gradients(model: nn.Module) -> None:
    """Raise TrainingError if the last backward pass missed a parameter: then nothing was all-reduced."""
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters:
        return
    try:
        model._check_reducer_finalized()
    except RuntimeError as error:
        frozen = set(_FROZEN.get(model, ()))
        missing = [name for name, p in model.module.named_parameters() if p.grad is None and p not in frozen]
        rest = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        named = f"parameters unused in the loss: {', '.join(missing[:3])}{rest}"
        raise TrainingError(
            f"{named if missing else 'parameters unused in the last micro-batch of a step'}; all processes must "
            "all-reduce every parameter: freeze them with requires_grad_(False) before training, or set "
            "training.find_unused_parameters=true"
        ) from error


class RankTask(Task):
    """Runs a task on this rank's share of a batch.

    A rank may have no samples of the last batch of an epoch. It takes part in the step with sums and counts of 0,
    under the names of the other ranks, which are exchanged at the first batch. A weight that is or becomes 0 must not
    change which counts are all-reduced, because a rank without samples could not know. So a term that may be trained
    stays one: with weight 0 it is a constant of the loss.
    """

    def __init__(self, task: Task, world: World) -> None:
        self.task = task
        self.world = world
        self._agreed: dict[str, list[bool]] = {}
        """Names of all terms, in the same order on every rank, and whether each is trained, reported and optional."""
        self._accumulates = False
        self._knows_counts: bool | None = None
        self._spare = Spare(world)

    def __call__(self, model: nn.Module, batch: Batch, *, metrics: bool | None) -> Terms:
        """Return the terms of this rank's samples; raise TrainingError if their names change."""
        idle = is_empty(batch)
        if self.world.in_lockstep:
            batch = self._spare.instead_of(batch)
        try:
            if self.task.announcement() is None:  # on all ranks: they decide together
                self._decide(model, batch, idle=idle and not self.world.in_lockstep)
            # Run the model first in both cases: it has collectives too, and ranks must run them in the same order.
            terms = {} if idle else self.task(model, batch, metrics=metrics)
            zero = self._zero(model, batch) if idle else None
            if self.world.in_lockstep and not idle:
                self._spare.judge(terms)
        except torch.OutOfMemoryError:
            if not self._agreed:  # other ranks wait for the names of the terms
                self._agreed = self._agree({}, keeps=True)
            raise
        keeps = idle or self._keeps_terms(model, batch)
        if not self._agreed:
            self._agreed = self._agree({} if idle else terms, keeps=keeps)
        if zero is not None:
            return {
                name: LossTerm(zero if trained else zero.detach(), 0.0, float(trained), reported, optional)
                for name, (trained, reported, optional) in self._agreed.items()
            }
        if terms.keys() != self._agreed.keys():
            raise TrainingError(
                f"the terms of the loss changed from {', '.join(self._agreed)} to {', '.join(terms)}; with several "
                "processes every batch must have the same terms: return sum 0 and count 0 for a term that does not "
                "apply"
            )
        return self._with_constants({name: terms[name] for name in self._agreed}, keeps=keeps)

    def _zero(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return 0 with a zero gradient for every parameter, for a rank without samples.

        In lockstep the model is run on `batch`, one of another rank.
        """
        return nothing_of_terms(self.task.lend(model, batch)) if self.world.in_lockstep else idle_output(model)

    def _decide(self, model: nn.Module, batch: Batch, *, idle: bool) -> None:
        """Take the decisions of the first batches alike: of ranks that differ, the first one counts."""
        failure = None
        try:
            if not idle:
                self.task.decide_on(model, batch)
        except torch.OutOfMemoryError as error:
            failure = error
        mine, agreed = json.dumps(self.task.decisions()), dict[str, object]()
        for text in self.world.gather_text(mine):
            agreed = {**json.loads(text), **agreed}
        if agreed != json.loads(mine):
            self.task.decide(agreed)
        self._agreed = {}  # a decision may change the terms
        if failure is not None:  # raised only now: other ranks wait for the decisions
            raise failure

    def _keeps_terms(self, model: nn.Module, batch: Batch) -> bool:
        """Whether several terms may be trained: with gradient accumulation this requires known counts."""
        self._accumulates = self._accumulates or model in _LOCAL
        if self._accumulates and self._knows_counts is None:
            self._knows_counts = self.task.counts(batch) is not None
        return not self._accumulates or bool(self._knows_counts)

    def _agree(self, terms: Terms, *, keeps: bool) -> dict[str, list[bool]]:
        """Return the terms of any rank; one with a gradient may get a weight later."""
        mine = {
            name: [term.is_weighted or (keeps and term.sum.requires_grad), term.reported, term.optional]
            for name, term in terms.items()
        }
        agreed: dict[str, list[bool]] = {}
        for text in self.world.gather_text(json.dumps(mine)):
            for name, kind in json.loads(text).items():
                agreed.setdefault(name, kind)
        return agreed

    def _with_constants(self, terms: Terms, *, keeps: bool) -> Terms:
        """Return the terms; trained ones whose weight is 0 now become constants, so that they are counted."""
        if not any(term.is_weighted for term in terms.values()):
            return terms  # no rank has anything to learn from
        for name, term in terms.items():
            self._agreed[name][0] = term.is_weighted or (keeps and self._agreed[name][0])
        return {
            name: replace(term, sum=term.sum.detach(), weight=torch.zeros(()))
            if self._agreed[name][0] and not term.is_weighted
            else term
            for name, term in terms.items()
        }
