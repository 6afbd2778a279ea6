"""Trying validation before the first step: an unsuitable validation set is found at once, not after an epoch.

The check changes nothing: random generators, buffers, modes, metrics and decisions of the loss are restored, so a run
gives the same bytes with and without it.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader as TorchDataLoader, IterableDataset

from etude.core import ConfigError, DataError, EtudeError, Loader, Task, TrainingError
from etude.core.batch import is_empty
from etude.core.buffers import probing
from etude.core.model import unwrap
from etude.data.sources.adapters import ForeignLoader
from etude.distributed.world import is_lost_connection
from etude.engine.evaluation import evaluate
from etude.trainer.changed_loaders import DeviceLoader
from etude.trainer.machine import Machine

_SMALL = 1 << 20


def check_validation(model: nn.Module, task: Task, loader: Loader, num_batches: int, machine: Machine) -> None:
    """Evaluate the first `num_batches` batches and discard the result; raise DataError if they do not fit.

    The check is skipped if it could change the run: a loader that can be read only once, or a model with lazy layers.
    Each rank tries its own share, and all fail if one does.
    """
    source, model = repeatable(loader), unwrap(model)
    if source is None or any(is_lazy(one) for one in (*model.parameters(), *model.buffers())):
        return
    trial, modules = copy_apart(task)
    # Few batches may lack anything. A task may be frozen, so that its attributes are not assigned to.
    vars(trial).update(no_data=lambda: None, no_numbers=lambda: None)
    first = _FirstBatches(source, num_batches)
    world = machine.data_world if machine.data_world.in_lockstep else None
    with ExitStack() as stack:
        for one in (model, *modules):
            stack.enter_context(probing(one, training=False))

        def attempt() -> None:
            with _explained(together=machine.world.size > 1), machine.validating():
                evaluate(model, trial, first, precision=machine.precision, world=world)

        if world is None:
            machine.world.attempt(attempt)
        else:  # a rank that failed would exchange something else than the others, in the midst of their rounds
            attempt()


class _FirstBatches:
    """The first non-empty batches of another loader."""

    def __init__(self, loader: Loader, count: int) -> None:
        self.loader, self.count = loader, count

    def iterate(self, epoch: int, position: int = 0) -> Any:
        batches = self.loader.iterate(epoch, position)
        try:
            yield from islice((batch for batch in batches if not is_empty(batch)), self.count)
        finally:
            batches.close()

    def __len__(self) -> int:
        return self.count


@contextmanager
def _explained(*, together: bool) -> Iterator[None]:
    """Add the location to an error; turn any error into an EtudeError if all ranks must fail together."""
    place = "in validation, tried before the first step"
    try:
        yield
    except (ConfigError, DataError, TrainingError) as error:
        raise type(error)(f"{place}: {error}") from error
    except EtudeError:
        raise
    except Exception as error:
        if is_lost_connection(error):  # the other process reports why
            raise
        if not together:  # an error in user code, which needs its traceback
            error.add_note(place)
            raise
        text = " ".join(str(error).split()) or "no message"
        raise DataError(f"{place}: {type(error).__name__}: {text}") from error


def repeatable(loader: Loader) -> Loader | None:
    """Return a loader whose first batches can be read without affecting the run; None if there is none.

    Loaders of etude return the same batches every time. So do lists and torch's DataLoader over a map-style dataset;
    persistent workers, which would keep state, are replaced by temporary ones.
    """
    inner = loader.loader if isinstance(loader, DeviceLoader) else loader
    if not isinstance(inner, ForeignLoader):
        return loader
    source = inner.source
    if isinstance(source, Sequence):
        return loader
    if not isinstance(source, TorchDataLoader) or isinstance(source.dataset, IterableDataset):
        return None
    if any(isinstance(one, Iterator) for one in (source.sampler, source.batch_sampler)):
        return None
    if not source.persistent_workers:
        return loader
    other, plain = copy.copy(inner), copy.copy(source)
    vars(plain).update(persistent_workers=False, _iterator=None)
    other.source = plain
    return DeviceLoader(other, loader.device) if isinstance(loader, DeviceLoader) else other


# ------------------------------------------------------------------------------------------------ no side effects


def copy_apart(task: Task) -> tuple[Task, list[nn.Module]]:
    """Return a copy of a task, and the modules that the copy shares with it.

    Changes to losses and metrics stay in the copy. Modules and large tensors, such as a teacher's, are shared. If the
    task holds something that cannot be copied, everything is shared.
    """
    shared = list(_too_large(task, set()))
    modules = [one for one in shared if isinstance(one, nn.Module)]
    try:
        return copy.deepcopy(task, {id(one): one for one in shared}), modules
    except Exception:  # any object may be uncopyable: a lock, a generator, an open file
        return copy.copy(task), modules


def _too_large(tree: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the modules and large tensors among the attributes and containers of an object."""
    if id(tree) in seen:
        return
    seen.add(id(tree))
    if isinstance(tree, nn.Module) or (isinstance(tree, Tensor) and (tree.requires_grad or tree.numel() > _SMALL)):
        yield tree
    elif isinstance(tree, dict):
        for value in (*tree.keys(), *tree.values()):
            yield from _too_large(value, seen)
    elif isinstance(tree, (list, tuple, set, frozenset)):
        for value in tree:
            yield from _too_large(value, seen)
    elif not isinstance(tree, (type, Tensor)):
        yield from _too_large(getattr(tree, "__dict__", {}), seen)
        yield from _too_large(getattr(tree, "__self__", None), seen)  # the object of a bound method
