"""Data parallelism: wrapping a model, local gradients, shared buffers, and ranks without samples."""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from etude.core.batch import Batch, is_empty
from etude.core.errors import ConfigError, TrainingError
from etude.core.task import LossTerm, Task, Terms
from etude.distributed.lockstep import Spare
from etude.distributed.world import World


def wrap_data_parallel(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    *,
    find_unused_parameters: bool = False,
) -> nn.Module:
    """Return the model wrapped in DistributedDataParallel, if there are several ranks.

    Buffers (running statistics) are broadcast from rank 0 before every step. Raises ConfigError if the optimizer
    updates parameters outside the model, as they would differ between ranks.
    """
    own = {id(param) for param in model.parameters()}
    if any(id(param) not in own for group in optimizer.param_groups for param in group["params"]):
        raise ConfigError(
            "the optimizer has parameters outside the model (for example of the loss); with several processes add "
            "them to the model, so that they stay in sync"
        )
    device_ids = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=device_ids, find_unused_parameters=find_unused_parameters)
    if not find_unused_parameters:
        # After its first backward pass torch rebuilds the gradient buckets, which changes the order in which three or
        # more ranks are summed. Done here, the first step after a resume sums like any other.
        idle_output(wrapped).backward()
        for param in model.parameters():
            param.grad = None
    return wrapped


@contextmanager
def local_gradients(model: nn.Module) -> Iterator[None]:
    """Within this block, backward passes do not all-reduce: for all but the last micro-batch."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif is_sharded(model):
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


def share_buffers_next(model: nn.Module) -> None:
    """Broadcast the buffers of rank 0 before the next forward pass, also if the last one failed on some rank."""
    if isinstance(model, DistributedDataParallel):
        model.require_forward_param_sync = True


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
        return _nothing_of(params)
    if model.find_unused_parameters:
        params = params[:1]  # other parameters are unused in this rank's loss, which torch detects
    module = model.module
    model.module = _Idle(module, params)
    try:
        return model()  # type: ignore[no-any-return]
    finally:
        model.module = module


class _Idle(nn.Module):
    """Replaces a model for one call; it has the same buffers."""

    def __init__(self, model: nn.Module, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.model = model
        self._params_used = params

    def forward(self) -> Tensor:
        """Return 0."""
        return _nothing_of(self._params_used)


def _nothing_of(params: list[nn.Parameter]) -> Tensor:
    """Return the sum over an empty slice of every parameter."""
    return torch.stack([param.flatten()[:0].sum().float() for param in params]).sum()


def nothing_of_terms(terms: Terms) -> Tensor:
    """Return 0 with a zero gradient for whatever the terms depend on."""
    sums = [term.sum for term in terms.values()]
    trained = [one for one in sums if one.requires_grad] or sums
    return torch.stack([one.float() * 0.0 for one in trained]).sum()


def anchored(terms: Terms, model: nn.Module) -> Terms:
    """Return the terms, of which one also depends on every parameter that is gathered: its gradient is 0, not None.

    Ranks exchange the gradients of such parameters together, so all must have the same ones.
    """
    name = next((name for name, term in terms.items() if term.sum.requires_grad), None)
    if name is None:
        return terms
    gathered = [param for param in model.parameters() if param.requires_grad and type(param) is nn.Parameter]
    plain = [param for param in gathered if type(param.data) is Tensor]
    return {**terms, name: replace(terms[name], sum=terms[name].sum + _nothing_of(plain))} if plain else terms


def check_gradients(model: nn.Module, params: Iterable[nn.Parameter]) -> None:
    """Raise TrainingError if a parameter has no gradient: it was not all-reduced, so ranks would diverge."""
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters:
        return
    if all(param.grad is not None or not param.requires_grad for param in params):
        return
    missing = [name for name, p in model.module.named_parameters() if p.requires_grad and p.grad is None]
    if missing:
        rest = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise TrainingError(
            f"parameters unused in the loss: {', '.join(missing[:3])}{rest}; all processes must all-reduce every "
            "parameter: freeze them with requires_grad_(False), or set training.find_unused_parameters=true"
        )


def share_weights(model: nn.Module, world: World) -> None:
    """Broadcast the parameters and buffers of rank 0, so that all ranks begin with the same weights."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.numel() and not tensor.is_meta:
            world.broadcast(tensor.detach())


def share_buffers(model: nn.Module, world: World) -> None:
    """Broadcast the buffers of rank 0, so that all ranks evaluate the model that is saved."""
    buffers = [buffer for buffer in model.buffers() if buffer.numel()]
    if not buffers:
        return
    parts = [buffer.detach().flatten().contiguous().view(torch.uint8) for buffer in buffers]
    data = torch.cat(parts)
    world.broadcast(data)
    if world.rank == 0:
        return
    with torch.no_grad():
        for buffer, part in zip(buffers, torch.split(data, [part.numel() for part in parts]), strict=True):
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))  # the clone is aligned for any dtype


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
        runs = not idle or self.world.in_lockstep  # in lockstep all run the model, some for nothing
        try:
            if self.task.announcement() is None:  # on all ranks: they decide together
                self._decide(model, batch, idle=not runs)
            # Run the model first in both cases: it has collectives too, and ranks must run them in the same order.
            terms = self.task(model, batch, metrics=metrics) if runs else {}
            if self.world.in_lockstep and not self.task.uses_all_parameters:
                terms = anchored(terms, model)
            zero = self._zero(model, terms) if idle else None
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

    def _zero(self, model: nn.Module, terms: Terms) -> Tensor:
        """Return 0 with a zero gradient for every parameter, for a rank without samples.

        `terms` are those of a batch of another rank, if the model was run.
        """
        if not self.world.in_lockstep:
            return idle_output(model)
        self.task.judged = None  # a batch of another rank is no sample of this one
        return nothing_of_terms(terms)

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
        self._accumulates = self._accumulates or _is_local(model)
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


def _is_local(model: nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel) and not model.require_backward_grad_sync
