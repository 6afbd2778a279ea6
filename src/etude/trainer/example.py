"""Keeping an example of the training batches in the folder of a run that is made in Python."""

import logging
from collections.abc import Iterator
from pathlib import Path

from etude.checkpoint.example import save_example
from etude.core import Batch, Clock, EtudeError, Loader, Task
from etude.core.batch import is_empty
from etude.core.loader import BatchIterator
from etude.core.run_layout import EXAMPLE
from etude.distributed import World
from etude.monitor import RunFolder

logger = logging.getLogger("etude")


def keeping_example(loader: Loader, task: Task, folder: RunFolder | None, world: World, clock: Clock) -> Loader:
    """Return the loader; if the run cannot be rebuilt from its config, one that keeps an example of its batches."""
    is_plain = type(task).predict is Task.predict
    if folder is None or folder.is_rebuildable or not is_plain or not world.is_main:
        return loader
    return ExampleLoader(loader, folder.path, is_new=clock.step == 0)


class ExampleLoader:
    """Keeps samples of the first batch of another loader that has some; later epochs are those of that loader."""

    def __init__(self, loader: Loader, folder: Path, *, is_new: bool) -> None:
        """`is_new` if the run begins: an example that is there is not its own."""
        self.loader, self._folder = loader, folder
        self._is_due = is_new or not (folder / EXAMPLE).exists()

    def __len__(self) -> int:
        return len(self.loader)

    def iterate(self, epoch: int, position: int = 0) -> BatchIterator:
        """Return the batches of an epoch."""
        batches = self.loader.iterate(epoch, position)
        due, self._is_due = self._is_due, False
        return _FirstKept(batches, self._folder) if due else batches


class _FirstKept:
    def __init__(self, batches: BatchIterator, folder: Path) -> None:
        self._batches, self._folder, self._is_first = batches, folder, True

    @property
    def position(self) -> int:
        return self._batches.position

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        if self._is_first and not is_empty(batch):  # this rank may have nothing of a small batch
            self._is_first = False
            try:
                (self._folder / EXAMPLE).unlink(missing_ok=True)
                save_example(batch, self._folder)
            except (EtudeError, OSError, RuntimeError, TypeError) as error:  # it serves only `etude export`
                logger.debug("no example of the batches is kept: %s", error)
        return batch

    def close(self) -> None:
        self._batches.close()
