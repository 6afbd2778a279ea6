"""Worker processes of a torch DataLoader: signals, program exit, and random numbers of a new epoch."""

import atexit
import contextlib
import multiprocessing.util  # torch registers its exit function on import, so ours, registered later, runs first
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader, _DatasetKind
from torch.utils.data.dataloader import _BaseDataLoaderIter

from etude.core.random import mix
from etude.data.sources.global_rng import GLOBALS, differ, seed_generators
from etude.data.sources.rng import owned_generators, seed_owned

ENDING, EPOCH, SEED, DREW, PIDS = 0, 1, 2, 3, 4
GROUP_SIGNALS = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
"""Signals that a terminal or a launcher sends to all processes of a run."""
GRACE_S = 5.0
"""How long to wait at program exit for a worker before it is killed."""


class WorkerStart:
    """The `worker_init_fn` of a DataLoader used by a run.

    Workers ignore a signal to the whole process group (Ctrl-C, a closed terminal, a launcher's SIGTERM), because the
    run still needs them to finish a step. A worker ends with the program, even if that is killed; a second SIGTERM
    always ends it.

    Persistent workers are seeded for each epoch, and `set_epoch` is called on their copy of the dataset; torch does
    neither. So an epoch does not depend on whether the workers are new.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        persistent: bool = False,
        watched: bool = False,
        then: Callable[[int], None] | None = None,
    ) -> None:
        """`then` is the user's `worker_init_fn`, called afterwards. `watched` workers detect whether they draw."""
        self.persistent, self.watched, self.then = persistent, watched, then
        self._shared = torch.zeros(PIDS + num_workers, dtype=torch.int64)
        self._shared.share_memory_()
        _STARTS[self] = os.getpid()

    def begin_epoch(self, epoch: int, seed: int) -> None:
        """Set the epoch of the next iteration."""
        self._shared[EPOCH], self._shared[SEED], self._shared[DREW] = epoch, seed, 0

    @property
    def has_drawn(self) -> bool:
        """Whether a watched worker has drawn from a global generator since the epoch began."""
        return bool(self._shared[DREW])

    def end(self) -> None:
        """End the remaining workers at program exit, which would otherwise wait for them."""
        pids = set(self._shared[PIDS:].tolist())
        _end_processes(self._shared, [child for child in multiprocessing.active_children() if child.pid in pids])

    def __call__(self, worker: int) -> None:
        """Run in the worker before its first batch."""
        self._shared[PIDS + worker] = os.getpid()
        for number in GROUP_SIGNALS:
            signal.signal(number, self._on_sigterm if number == signal.SIGTERM else signal.SIG_IGN)
        if hasattr(signal, "pthread_sigmask"):
            # signals that were blocked while this process started
            signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
        threading.Thread(target=_end_with_the_parent, name="etude-parent", daemon=True).start()
        if self.then is not None:
            self.then(worker)
        if self.persistent or self.watched:
            _before_each_epoch(partial(self._reseed, worker), self._watch)

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        if self._shared[ENDING]:
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _watch(self, fetcher: Any) -> None:
        if not self.watched:
            return
        fetch, states = fetcher.fetch, [generator.read() for generator in GLOBALS.values()]

        def watched(index: Any) -> Any:
            batch = fetch(index)
            if any(map(differ, states, [generator.read() for generator in GLOBALS.values()])):
                self._shared[DREW] = 1
                fetcher.fetch = fetch
            return batch

        fetcher.fetch = watched

    def _reseed(self, worker: int, dataset: Any, collate: Any) -> None:
        if not self.persistent:
            return
        seed = int(self._shared[SEED])
        seed_generators(mix(seed, worker))
        begin_epoch((dataset,), int(self._shared[EPOCH]))
        seed_owned(owned_generators(dataset, collate), seed)


_STARTS: weakref.WeakKeyDictionary[WorkerStart, int] = weakref.WeakKeyDictionary()
"""Each with the process that created it."""


@atexit.register
def _end_workers() -> None:
    for start, process in list(_STARTS.items()):
        if process == os.getpid():
            start.end()


def begin_epoch(parts: Any, epoch: int) -> None:
    """Call `set_epoch` on the objects that have it."""
    for part in parts:
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def prepare_workers(loader: TorchLoader[Any], epoch: int, seed: int, *, watched: bool) -> None:
    """Prepare the workers of a user's loader; call it before each iteration, with the epoch's generators seeded.

    The random numbers drawn from here on do not depend on whether the workers already exist.
    """
    if loader.num_workers == 0:
        return
    start = loader.worker_init_fn
    if not isinstance(start, WorkerStart):
        loader._iterator = None  # persistent workers started without our `worker_init_fn`: end them
        persistent = loader.persistent_workers
        start = WorkerStart(loader.num_workers, persistent=persistent, watched=watched, then=start)
        loader.worker_init_fn = start
    start.begin_epoch(epoch, seed)
    if loader._iterator is not None:  # torch draws this when workers start
        iter(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def end_workers(loader: Any, batches: Any) -> None:
    """End the workers of a torch iterator after an error; the loader starts new ones when needed.

    Torch ends them when the iterator is deleted. After an error the garbage collector deletes the queues with it, so
    workers cannot be notified, and torch waits 5 s for each.
    """
    if not isinstance(batches, _BaseDataLoaderIter) or not loader.num_workers:
        return
    loader._iterator = None
    shut_down: Callable[[], None] = getattr(batches, "_shutdown_workers")  # noqa: B009 (only those with workers have it)
    with contextlib.suppress(RuntimeError):  # a worker had died, which is the error raised before
        shut_down()


def begin_workers(loader: TorchLoader[Any]) -> Iterator[Any]:
    """Return a new iterator of the loader whose workers end at once, even if it is collected as part of a cycle.

    The garbage collector calls the finalizer registered here before the iterator's `__del__`: see `end_workers`.
    """
    with starting_workers(loader):
        batches = iter(loader)
    start = loader.worker_init_fn
    if loader.num_workers and isinstance(start, WorkerStart) and batches not in _BEGUN:
        _BEGUN.add(batches)
        workers = getattr(batches, "_workers", ())
        weakref.finalize(batches, _end_left, start._shared, os.getpid(), tuple(workers)).atexit = False
    return batches


_BEGUN: weakref.WeakSet[Any] = weakref.WeakSet()


def _end_left(shared: torch.Tensor, owner: int, workers: tuple[Any, ...]) -> None:
    if os.getpid() == owner and (left := [worker for worker in workers if worker.is_alive()]):
        _end_processes(shared, left)
        shared[ENDING] = 0


def _end_processes(shared: torch.Tensor, workers: list[Any]) -> None:
    """End workers at once; kill those that do not exit."""
    shared[ENDING] = 1
    process = multiprocessing.Process
    for end in (process.terminate, partial(process.join, timeout=GRACE_S), process.kill):
        for worker in workers:
            with contextlib.suppress(RuntimeError):  # torch may raise this at any time for a worker that died before
                end(worker)


@contextlib.contextmanager
def starting_workers(loader: TorchLoader[Any]) -> Iterator[None]:
    """Block signals to the group while workers start: they inherit the mask until `WorkerStart` sets its handlers.

    Not with a fork server, whose other children would inherit it too.
    """
    context: Any = loader.multiprocessing_context or multiprocessing
    if (
        loader.num_workers == 0
        or not hasattr(signal, "pthread_sigmask")
        or context.get_start_method() == "forkserver"
    ):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _before_each_epoch(action: Callable[[Any, Any], None], then: Callable[[Any], None]) -> None:
    """Make this worker call `action` with dataset and collate_fn before each epoch, and `then` with its fetcher.

    Torch creates a new fetcher when an epoch begins.
    """
    create = _DatasetKind.create_fetcher

    def begin(kind: Any, dataset: Any, auto_collation: Any, collate: Any, *others: Any) -> Any:
        action(dataset, collate)
        fetcher = create(kind, dataset, auto_collation, collate, *others)  # type: ignore[no-untyped-call]
        then(fetcher)
        return fetcher

    _DatasetKind.create_fetcher = begin  # type: ignore[method-assign]


def _end_with_the_parent() -> None:
    """End this worker when the program is gone, even while it computes or waits to send a batch."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)
