"""Worker processes: each answers one task at a time, and none outlives this process."""

import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from etude.core.errors import DataError
from etude.corpus.worker import start

Task = dict[str, Any]


class Unfinished(DataError):
    """The work could not be finished this time; what is done is kept, and the same again goes on from there."""


def require_tokenizers() -> None:
    """Raise DataError if the library that encodes is not installed."""
    if importlib.util.find_spec("tokenizers") is None:
        raise DataError("tokenizing needs the tokenizers library; install it with: pip install 'etude[text]'")


class Workers:
    """`count` worker processes, started when they are first needed and ended with the `with` block."""

    def __init__(self, count: int, *, threads: int = 1) -> None:
        self.count = count
        self._environment = {
            **os.environ,
            # The library's own threads, in each of several processes, would fight over the cores.
            "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
            "RAYON_NUM_THREADS": str(threads),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._processes: list[subprocess.Popen[str]] = []
        self._starting, self._closed = threading.Lock(), False
        self._idle: queue.SimpleQueue[subprocess.Popen[str] | None] = queue.SimpleQueue()
        for _ in range(count):
            self._idle.put(None)

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (number of the task, answer) as tasks are finished. Raises DataError if one cannot be done."""
        with ThreadPoolExecutor(self.count, thread_name_prefix="etude-corpus") as threads:
            futures: dict[Future[dict[str, Any]], int] = {
                threads.submit(self._ask, task): number for number, task in enumerate(tasks)
            }
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                self.close()  # a task that nobody waits for may take long
                raise

    def _ask(self, task: Task) -> dict[str, Any]:
        process = self._idle.get()
        if process is None:
            process = self._start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(task) + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise Unfinished(_how_it_ended(process))
        finally:
            self._idle.put(process)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise DataError(answer["error"])
        if "unfinished" in answer:
            raise Unfinished(answer["unfinished"])
        if "crash" in answer:
            raise RuntimeError(f"a worker process failed:\n{answer['crash']}")
        done: dict[str, Any] = answer["done"]
        return done

    def _start(self) -> "subprocess.Popen[str]":
        with self._starting:
            if self._closed:
                raise CancelledError
            process = subprocess.Popen(
                # -P: the folder of the script must not shadow modules of the same name
                [sys.executable, "-P", str(Path(start.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environment,
                encoding="utf-8",
                process_group=-1
                if sys.platform == "win32"
                else 0,  # Ctrl-C is for this process, which ends the others
            )
            self._processes.append(process)
        return process

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        with self._starting:
            self._closed = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        self._processes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()


def _how_it_ended(process: "subprocess.Popen[str]") -> str:
    code = process.wait()
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    return (
        f"a worker process was ended {how}, perhaps for want of memory; run the command again, which goes on where it "
        f"stopped, with fewer --workers or with --cut-chars"
    )


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
