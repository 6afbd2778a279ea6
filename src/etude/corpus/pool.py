"""Worker processes: `concurrent.futures` with processes that are ready fast, stop at once and end with this one."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from threading import Thread
from types import ModuleType, TracebackType
from typing import Any, Self

from etude.core.errors import DataError


class Unfinished(DataError):
    """The work could not be finished this time; what is done is kept, and the same again goes on from there."""


class Workers:
    """`count` worker processes, started when they are first needed and ended with the `with` block."""

    def __init__(self, count: int, *, threads: int = 1) -> None:
        self._pool = ProcessPoolExecutor(count, get_context("spawn"), _prepare_process, (threads,))
        self._processes: list[Any] = []

    def run(self, function: Callable[..., object], tasks: Sequence[tuple[Any, ...]]) -> Iterator[int]:
        """Call `function` with each task; yield their numbers as they are done. Raises DataError if one cannot be."""
        with _starting_processes():
            futures = {self._pool.submit(function, *task): number for number, task in enumerate(tasks)}
            self._processes = list((self._pool._processes or {}).values())
        for future in as_completed(futures):
            try:
                future.result()
            except OSError as error:
                what = f"{error.filename or 'the output'} cannot be written ({error.strerror or error})"
                raise Unfinished(
                    f"{what}; fix this and run the command again, which goes on where it stopped"
                ) from None
            except MemoryError:
                why = "not enough memory; use fewer --workers, or cut long documents with --cut-chars"
                raise Unfinished(why) from None
            except BrokenProcessPool:
                raise Unfinished(self._how_one_ended()) from None
            yield futures[future]

    def _how_one_ended(self) -> str:
        """Say how a worker ended by itself; the others were then ended by the pool, with SIGTERM."""
        self._pool.shutdown()
        codes = [process.exitcode for process in self._processes]
        code = next((code for code in codes if code not in (0, None, -signal.SIGTERM)), -signal.SIGTERM)
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return (
            f"a worker process was ended {how}, perhaps for want of memory; run the command again, which goes on where "
            f"it stopped, with fewer --workers or with --cut-chars"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for process in self._processes if kind is not None else ():
            process.kill()  # a task that nobody waits for may take long
        self._pool.shutdown(cancel_futures=True)


@contextmanager
def _starting_processes() -> Iterator[None]:
    """Processes that are started here neither run the main module of this one nor get its Ctrl-C."""
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    before = set() if sys.platform == "win32" else signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if sys.platform != "win32":
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare_process(threads: int) -> None:
    # The library's own threads, in each of several processes, would fight over the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
