"""The profile of some steps as numbers, as text and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from etude.callbacks.profiling.timeline import REST
from etude.callbacks.profiling.trace import Memory, Operator

PARTS = {
    "data": "data wait",
    "transfer": "transfer to the device",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "captured": "captured step",
    "logging": "logging",
    "saving": "saving",
    REST: "loop and callbacks",
}
"""Parts of a step, in the order of the table."""
BETWEEN = ("logging", "saving", "validation")
"""Parts that do not belong to every step."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What would make steps faster."""

    why: str
    """The measured number that it follows from."""
    change: str
    """The setting to change."""
    saves: float
    """The largest share of a step's time that it can save."""

    def __str__(self) -> str:
        return f"{self.why}: {self.change} would save up to {self.saves:.0%}"


@dataclass(slots=True)
class Profile:
    """Where the time of a step goes. All times are milliseconds."""

    device: str
    first: int
    """The first of the steps, counted from 1."""
    steps: int
    parts: dict[str, float]
    """By part, the time of one step; what happens every N steps counts with an N-th. They add up to `step_ms`."""
    eager: dict[str, float] = field(default_factory=dict)
    """If steps are captured: the parts of steps that are not."""
    each: dict[str, float] = field(default_factory=dict)
    """The time of one log point and of one checkpoint, if there were any."""
    intervals: dict[str, float] = field(default_factory=dict)
    """Steps between two log points and two checkpoints; missing if there are none."""
    busy_cores: float = 0.0
    """CPU cores in use on average."""
    operators: Sequence[Operator] = ()
    matrix_ms: float = 0.0
    other_ms: float = 0.0
    """Time of matrix products and of all other operators in a step; on CUDA that of the device."""
    copy_ms: float = 0.0
    """Time of copies to the device, most of it beside the kernels of earlier steps."""
    memory: dict[str, Memory] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What was said about how steps are run."""
    advice: list[Advice] = field(default_factory=list)
    warning: str = ""
    """Why the times may be wrong; empty if nothing is known."""

    @property
    def step_ms(self) -> float:
        """The time of a step."""
        return sum(self.parts.values())

    def share(self, *names: str) -> float:
        """Return the share of some parts in a step."""
        return sum(self.parts.get(name, 0.0) for name in names) / max(self.step_ms, 1e-9)

    @property
    def idle(self) -> float:
        """The share of a step in which a CUDA device does nothing."""
        return max(0.0, 1.0 - (self.matrix_ms + self.other_ms) / max(self.step_ms, 1e-9))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {"step_ms": self.step_ms} | asdict(self)

    def __str__(self) -> str:
        last = self.first + self.steps - 1
        lines = [f"steps {self.first} to {last} on {self.device}: {self.step_ms:.3f} ms per step", *self.notes, ""]
        lines += _table("part of a step", self._labelled(self.parts), self.step_ms, total="step")
        if self.eager:
            whole = sum(self.eager.values())
            lines += ["", f"the same steps without CUDA graphs: {whole:.3f} ms per step", ""]
            lines += _table("part of a step", self._labelled(self.eager), whole, total="step")
        if self.operators:
            where = "on the device" if self.device.startswith("cuda") else "on the CPU"
            lines += ["", f"operators {where}, without those that they call", ""]
            calls = {f"{one.name} ({one.calls:.4g} calls)": one.ms for one in self.operators}
            lines += _table("operator", calls, self.matrix_ms + self.other_ms)
        lines += ["", *self._memory_lines(), *self._advice_lines()]
        lines += [self.warning] if self.warning else []
        return "\n".join(lines)

    def _labelled(self, parts: Mapping[str, float]) -> dict[str, float]:
        found = {}
        for name, label in PARTS.items():
            every = f" (1 in {self.intervals[name]:,.4g} steps)" if name in self.intervals else ""
            if name in parts:
                found[label + every] = parts[name]
        return found

    def _memory_lines(self) -> list[str]:
        if not self.memory:
            return []
        most = max(self.memory, key=lambda name: self.memory[name].allocated)
        kind = "allocated" if self.device.startswith("cuda") else "resident"
        by_part = ", ".join(
            f"{PARTS.get(name, name)} {_size(one.allocated)}" for name, one in self.memory.items() if name in PARTS
        )
        reserved = max(one.reserved for one in self.memory.values())
        more = f"; {_size(reserved)} reserved" if reserved else ""
        return [f"memory: at most {_size(self.memory[most].allocated)} {kind}{more} ({by_part})", ""]

    def _advice_lines(self) -> list[str]:
        if self.advice:
            return [f"- {one}" for one in self.advice]
        named = {PARTS[name]: ms for name, ms in self.parts.items() if name in PARTS}
        largest = max(named, key=lambda name: named[name])
        share = named[largest] / max(self.step_ms, 1e-9)
        return [f"no setting is known to make these steps faster; most of their time is {largest}: {share:.0%}"]


def _table(title: str, rows: Mapping[str, float], whole: float, total: str = "") -> list[str]:
    width = max(len(title), *map(len, rows))
    lines = [f"{title:<{width}}  {'ms':>10}  {'share':>7}"]
    listed = [*rows.items(), *([(total, sum(rows.values()))] if total else [])]
    return lines + [f"{name:<{width}}  {ms:>10.3f}  {ms / max(whole, 1e-9):>7.1%}" for name, ms in listed]


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
