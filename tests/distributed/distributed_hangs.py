"""Components that hang on one rank: a loss, a data set, a process that is stopped, one that has failed."""

import logging
import os
import signal
import threading
import time

from distributed_toy import RANK, At, Points, SeveralTerms, features

from etude.config import register
from etude.data import DataSplits
from etude.distributed import note_progress, watchdog
from etude.engine.callback import Callback


def hang_forever():
    """Wait for something that never comes."""
    while True:
        time.sleep(0.01)


@register("loss", "toy_endless_loss")
class EndlessLoss(SeveralTerms):
    """Never returns on one rank, after some calls; it may ask the launcher to stop just before."""

    def __init__(self, rank: int = 1, calls: int = 10, stop: bool = False) -> None:
        super().__init__()
        self.rank, self.calls, self.stop = rank, calls, stop
        if stop:
            watchdog.STOP_S = 1.0

    def terms(self, output, batch, *, metrics):
        self.calls -= 1
        if self.rank == RANK and self.calls == 0:
            if self.stop:
                os.kill(os.getppid(), signal.SIGTERM)
            hang_forever()
        return super().terms(output, batch, metrics=metrics)


class EndlessPoints(Points):
    """Hangs on one rank when a sample is read for the second time."""

    def __init__(self, samples: int, rank: int) -> None:
        super().__init__(samples)
        self.rank, self.seen = rank, set()

    def __getitem__(self, index: int):
        if self.rank == RANK and index in self.seen:
            hang_forever()
        self.seen.add(index)
        return super().__getitem__(index)


@register("data", "toy_endless_data")
def endless_data(rank: int = 1) -> DataSplits:
    """Return points whose second epoch never begins on one rank."""
    return DataSplits(EndlessPoints(50, rank), features(21, 2))


@register("callback", "toy_stays")
class StaysAfterFailure(Callback):
    """Never returns from its hook after an error: a tool that waits for a server that is gone."""

    def on_exception(self, error):
        if isinstance(error, ZeroDivisionError):
            hang_forever()


@register("callback", "toy_slow_save")
class SlowSave(Callback):
    """Takes its time when rank 0 saves, as a slow disk does."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def on_save_begin(self):
        if RANK == 0:
            time.sleep(self.seconds)


@register("callback", "toy_slow_rank")
class SlowRank(At):
    """Takes its time on rank 0 after a step, and notes that it makes progress; files of its thread sync slowly too."""

    def __init__(self, step: int, seconds: float) -> None:
        super().__init__(step)
        self.seconds = seconds

    def act(self):
        for _ in range(10):
            time.sleep(self.seconds / 10)
            note_progress()
        sync, delays = os.fsync, [self.seconds]

        def slow_sync(file):
            if threading.current_thread() is not threading.main_thread() and delays:
                time.sleep(delays.pop())
            sync(file)

        os.fsync = slow_sync


@register("callback", "toy_stop")
class StopAt(At):
    """Stops its process, which then does nothing at all; not again after a restart."""

    def act(self):
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), signal.SIGSTOP)


@register("callback", "toy_warn")
class WarnAt(At):
    """Warns of something that only this rank knows, and of something that all ranks know."""

    def on_step_end(self, report):
        if self.run.clock.step == self.step:
            logging.getLogger("etude").warning("all know this")
        super().on_step_end(report)

    def act(self):
        logging.getLogger("etude").warning("only I know this")


class SlowPoints(Points):
    """Takes a while for every sample, on one rank."""

    def __init__(self, samples: int, rank: int, seconds: float) -> None:
        super().__init__(samples)
        self.seconds = seconds if rank == RANK else 0.0

    def __getitem__(self, index: int):
        time.sleep(self.seconds)
        return super().__getitem__(index)


@register("data", "toy_slow")
def slow(rank: int = 1, seconds: float = 0.0) -> DataSplits:
    """Return points that one rank reads slowly."""
    return DataSplits(SlowPoints(50, rank, seconds), features(21, 2))


class NanPoints(Points):
    """Points that are not numbers, on one rank."""

    def __getitem__(self, index: int):
        x, y = super().__getitem__(index)
        return (x * float("nan") if RANK == 1 else x), y


@register("data", "toy_nan")
def nan() -> DataSplits:
    """Return points of which one rank's are NaN."""
    return DataSplits(NanPoints(50), features(21, 2))


@register("loss", "toy_signal_loss")
class SignalLoss(SeveralTerms):
    """Sends its process a signal at the n-th call in training or validation, on some ranks."""

    def __init__(self, ranks: list[int], call: int = 1, training: bool = True) -> None:
        super().__init__()
        self.ranks, self.call, self.training = ranks, call, training

    def terms(self, output, batch, *, metrics):
        self.call -= output.requires_grad == self.training
        if RANK in self.ranks and self.call == 0:
            self.call = -1
            os.kill(os.getpid(), signal.SIGTERM)
        return super().terms(output, batch, metrics=metrics)


@register("data", "toy_signal_data")
def signalled(rank: int = 1) -> DataSplits:
    """Send one process a signal while the data is being made."""
    if rank == RANK:
        os.kill(os.getpid(), signal.SIGTERM)
    return DataSplits(Points(50), features(21, 2))
