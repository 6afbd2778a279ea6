"""How contestants of the GPU benchmark are run: in processes of their own, a result as soon as it is known."""

import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.memory import memory, now, peak_memory
from benchmarks.table import NOT_RUN, ROOT, Row, in_short, last_line, missing, quartiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MARK = "\x1eresult "
"""Begins a line of a child's output that is for its parent; libraries print others."""
CHILD = (sys.executable, "-m", "benchmarks.gpu")
LONGEST_S = 240.0
"""A contestant of which nothing has been heard for so long is stopped."""
ROUND_S = 0.02
"""Of contestants that take turns: at least so long."""
PAUSE_S = 0.05
"""Before a round: a GPU that is busy without a pause is slowed down to what its power supply allows."""
MOST_CALLS = 1024
"""In a round."""
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Contestant:
    """One way to do the work."""

    run: Callable[[], Any]
    """Returns its numbers; in a section that is interleaved, the function that is timed."""
    needs: Sequence[str] = ()
    """Modules of others."""
    cuda: bool = True
    is_peer: bool = False

    def obstacle(self) -> str | None:
        """Return why it cannot be run here."""
        return "needs CUDA" if self.cuda and DEVICE.type != "cuda" else missing(self.needs)


@dataclass(frozen=True)
class Section:
    """One table: contestants that do the same work."""

    title: str
    columns: Mapping[str, str]
    how: str
    contestants: Mapping[str, Contestant]
    compared: tuple[str, str]
    """The column that is compared, and that of the ratios."""
    references: Callable[[str], Sequence[str]]
    """Whom a contestant is compared with: the best of these."""
    rounds: int = 0
    """If not 0 all are timed in turns, so many times."""
    alone: bool = False
    """Whether each has a process of its own."""
    starts_processes: bool = False
    """Whether the contestants are commands: they need no other process around them."""

    def measure(self, names: Sequence[str]) -> Iterator[tuple[str, Numbers | None]]:
        """Yield every name when it begins, with None, and when it is known, with its numbers."""
        return self._in_turns(names) if self.rounds else self._one_by_one(names)

    def _one_by_one(self, names: Sequence[str]) -> Iterator[tuple[str, Numbers | None]]:
        for name in names:
            yield name, None
            clean_up()
            yield name, attempt(self.contestants[name].run)

    def _in_turns(self, names: Sequence[str]) -> Iterator[tuple[str, Numbers | None]]:
        steps: dict[str, Callable[[], object]] = {}
        found: dict[str, Numbers] = {}
        for name in names:
            yield name, None
            found[name] = attempt(lambda name=name: prepared(steps.setdefault(name, self.contestants[name].run())))
            if NOT_RUN in found[name]:
                steps.pop(name, None)
                yield name, found[name]
                now(DEVICE)  # raises if the device is lost to this process: the others go on in a new one
        ways = {(name, False): step for name, step in steps.items()}
        ways |= {(name, True): graph for name, step in steps.items() if (graph := recorded(step)) is not None}
        calls = {way: calls_in_a_row(step) for way, step in ways.items()}
        times: dict[tuple[str, bool], list[float]] = {way: [] for way in ways}
        for _ in range(self.rounds):
            for way, step in ways.items():
                time.sleep(PAUSE_S if DEVICE.type == "cuda" else 0.0)
                times[way].append(1e3 * timed(step, calls[way]) / calls[way])
        for name in steps:
            low, middle, high = quartiles(times.get((name, True), times[name, False]))
            called = quartiles(times[name, False])[1]
            yield name, {"ms": middle, "from": low, "to": high, "called ms": called, **found[name]}

    def with_ratios(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows with their ratios to the best of their references."""
        value, ratio = self.compared
        label = next(iter(self.columns))
        known = {row[label]: row[value] for row in rows if value in row}
        best = min if value == "ms" else max
        result: list[Row] = []
        for row in rows:
            theirs = [known[name] for name in self.references(row[label]) if name in known]
            result.append({**row, ratio: row[value] / best(theirs)} if theirs and value in row else row)
        return result


def attempt(run: Callable[[], Numbers]) -> Numbers:
    """Return the numbers, or the reason why there are none."""
    try:
        return run()
    except (Exception, SystemExit) as error:
        return {NOT_RUN: f"failed: {in_short(error)}"}


def prepared(step: Callable[[], object]) -> Numbers:
    """Run a step for the first time, which compiles, and again; return the seconds and the memory of one of them."""
    begin = now(DEVICE)
    step()
    ready = now(DEVICE) - begin
    step()
    clean_up(compiled=False)
    before = memory(DEVICE)
    step()
    now(DEVICE)
    return {"MiB": (peak_memory(DEVICE) - before) / 2**20, "ready s": ready}


def recorded(step: Callable[[], object]) -> Callable[[], object] | None:
    """Return the step as a CUDA graph, which takes the device's time whatever the host's; None if it cannot be one."""
    if DEVICE.type != "cuda":
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except Exception:  # it waits for the device, or decides by what it finds there
        torch.cuda.synchronize()
        return None
    return graph.replay


def timed(step: Callable[[], object], calls: int) -> float:
    """Return the seconds of so many calls in a row, as in a training: the device is waited for once, at the end."""
    begin = now(DEVICE)
    for _ in range(calls):
        step()
    return now(DEVICE) - begin


def calls_in_a_row(step: Callable[[], object]) -> int:
    """Return how many calls take about as long as a round should: the launch of a single one would be part of it."""
    calls = 1
    while calls < MOST_CALLS and timed(step, calls) < ROUND_S:
        calls *= 2
    return calls


def clean_up(*, compiled: bool = True) -> None:
    """Give back what the last contestant left; compiled code too, unless it is still to be timed."""
    gc.collect()
    if compiled and "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@dataclass
class Stopwatch:
    """Called after every step of a training: times stretches of steps after the warm-up."""

    warmup: int
    stretch: int
    rounds: int

    def __post_init__(self) -> None:
        self.begin = time.perf_counter()
        self.steps = 0
        self.marks: list[float] = []

    @property
    def num_steps(self) -> int:
        """Steps of the whole training."""
        return self.warmup + self.stretch * self.rounds

    def __call__(self) -> None:
        self.steps += 1
        if self.steps >= self.warmup and (self.steps - self.warmup) % self.stretch == 0:
            self.marks.append(now(DEVICE))  # waits for the device

    def numbers(self, unit: str, per_step: int) -> Numbers:
        """Return median and quartiles of `unit` (tokens/s, steps/s), of which a step has so many."""
        if len(self.marks) <= self.rounds:
            raise RuntimeError(f"the training ended after {self.steps} of {self.num_steps} steps")
        pairs = zip(self.marks, self.marks[1:], strict=False)
        low, middle, high = quartiles([self.stretch * per_step / (end - begin) for begin, end in pairs])
        peak = peak_memory(DEVICE) / 2**30
        return {unit: middle, "from": low, "to": high, "ready s": self.marks[0] - self.begin, "peak GiB": peak}


def run_section(section: Section, arguments: Sequence[str], *, peers: bool) -> Iterator[tuple[str, Numbers]]:
    """Yield the numbers of every contestant, or the reason why it has none; without arguments for a child, run here."""
    wanted = [name for name, one in section.contestants.items() if peers or not one.is_peer]
    obstacles = {name: section.contestants[name].obstacle() for name in wanted}
    yield from ((name, {NOT_RUN: why}) for name, why in obstacles.items() if why is not None)
    left = [name for name in wanted if obstacles[name] is None]
    if not arguments:
        yield from ((name, numbers) for name, numbers in section.measure(left) if numbers is not None)
        return
    while left:
        known: set[str] = set()
        for name, numbers in in_child([*arguments, "--run", *(left[:1] if section.alone else left)]):
            known.add(name)
            yield name, numbers
        left = [name for name in left if name not in known]


def child(section: Section, names: Sequence[str]) -> None:
    """Measure contestants and print what the parent reads; end after one that failed, as it may have left anything."""
    for name, numbers in section.measure(names):
        print(f"\n{MARK}{json.dumps([name, numbers])}", flush=True)
        if numbers is not None and NOT_RUN in numbers and not section.rounds:
            return


def in_child(arguments: Sequence[str]) -> Iterator[tuple[str, Numbers]]:
    """Yield what a process of its own finds; the contestant during which it dies, or hangs, gets the reason."""
    command = [*CHILD, *arguments]
    current: str | None = arguments[arguments.index("--run") + 1]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        watchdog = Watchdog(process)
        try:
            for line in process.stdout:
                if line.startswith(MARK):
                    watchdog.start()
                    name, numbers = json.loads(line.removeprefix(MARK))
                    current = name if numbers is None else None
                    if numbers is not None:
                        yield name, numbers
            process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            watchdog.cancel()
        if current is not None:
            errors.seek(0)
            why = f"nothing for {LONGEST_S:g} s" if watchdog.has_ended else last_line(errors.read())
            yield current, {NOT_RUN: f"failed: {in_short(why)}"}


class Watchdog:
    """Ends a process that has not been heard of for a while."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.has_ended = False
        self._timer: threading.Timer | None = None
        self.start()

    def start(self) -> None:
        """Wait from now on."""
        self.cancel()
        self._timer = threading.Timer(LONGEST_S, self._end)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """Wait no longer."""
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        self.has_ended = True
        self.process.kill()
