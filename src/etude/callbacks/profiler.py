"""Profile some steps of a run: where their time goes, the most expensive operators, memory, a trace, advice."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch.utils.data import DataLoader as TorchDataLoader

from etude.callbacks.monitored import resolve
from etude.callbacks.profiling.advice import Facts, Source, advise
from etude.callbacks.profiling.profile import BETWEEN, PARTS, Profile
from etude.callbacks.profiling.timeline import Timeline
from etude.callbacks.profiling.trace import Trace
from etude.callbacks.recorder import peak_memory
from etude.config.registry import register
from etude.core import StepReport
from etude.core.arguments import checked
from etude.core.files import write_text
from etude.core.loader import Loader
from etude.core.spans import is_watched, watch
from etude.data import DataLoader
from etude.data.sources.adapters import ForeignLoader
from etude.engine.callback import Callback, Logs, RunInfo, RunParts
from etude.engine.compiled import CompiledTask
from etude.optim.kernels import KernelOptimizer, choose_kernel

TRACED = 3
"""Steps under torch.profiler."""
SETTLING = 3
"""Eager steps of a captured run before they are timed: they allocate memory of their own."""
FILES = TABLE, NUMBERS, TRACE = "profile.txt", "profile.json", "trace.json.gz"


@register("callback", "profiler")
class Profiler(Callback):
    """Profiles `steps` steps after step `start`, and writes a table, its numbers and a trace for Perfetto to `folder`.

    The steps are timed as they run, without waiting for the device in them. If they are captured as CUDA graphs, as
    many eager ones follow, to tell their parts apart. Three more run under torch.profiler: these are slower. Weights
    are those of a run without a profile.
    """

    @checked
    def __init__(
        self, start: Annotated[int, Ge(1)] = 10, steps: Annotated[int, Ge(1)] = 20, folder: str = "profile"
    ) -> None:
        """`folder` is inside the run folder; without a run folder only `profile` is set."""
        super().__init__()
        self.start, self.steps, self.folder = start, steps, folder
        self.profile: Profile | None = None
        """The result, once there is one."""
        self.settings: Mapping[str, Any] = {}
        self._parts: RunParts | None = None
        self._run: RunInfo | None = None
        self._notes: list[str] = []
        self._due = -1
        """The step after which the next stage begins; -1 if there is none."""
        self._timeline: Timeline | None = None
        self._eager: Timeline | None = None
        self._trace: Trace | None = None

    @classmethod
    def writes(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        """Return its three files."""
        return [f"{arguments.get('folder', 'profile')}/{name}" for name in FILES]

    def acts_in_steps(self) -> bool:
        """True: it times them."""
        return True

    def bind(self, parts: RunParts) -> None:
        """Keep what advice depends on."""
        self._parts, self.settings = parts, dict(parts.settings)

    def on_train_begin(self, run: RunInfo) -> None:
        """Wait for step `start`."""
        self._leave()
        self._run, self._notes = run, []
        if run.is_main and run.clock.step < self.start:
            self.profile, self._due = None, self.start
        elif run.is_main and self.profile is None and not (resolve(self.folder, run) / TABLE).exists():
            self.notify(f"profiler: the run continues after step {self.start}, so nothing is profiled")

    def on_step_end(self, report: StepReport) -> None:
        """Begin the next stage, if it is time."""
        if self._run is not None and self._run.clock.step == self._due:
            self._next_stage(self._run)

    def on_notice(self, message: str, facts: Mapping[str, Any]) -> None:
        """Keep what is said about how steps are run."""
        if facts.get("event") == "execution":
            self._notes.append(message)

    def on_train_end(self, result: Logs) -> None:
        """Say so if the run was too short."""
        if self._due >= 0:
            eager = 0 if self._eager is None else SETTLING + self.steps
            needed = self.start + self.steps + eager + TRACED
            self.notify(f"profiler: the run ended before the profile was complete, which needs {needed} steps")
        self._leave()

    def on_exception(self, error: BaseException) -> None:
        """Stop watching."""
        self._leave()

    # --- stages

    def _next_stage(self, run: RunInfo) -> None:
        if self._timeline is None:
            self.begin(run)
            return
        if self._trace is not None:
            watch(None)
            self._trace.end(TRACED)
            self._due = -1
            self.finish(run)
            self._leave()
            return
        if self._eager is None:
            self._timeline.end()
            if not {"forward", "captured"} & self._timeline.counts.keys():
                self._leave()
                self.notify("profiler: the steps of this loop have no parts that can be timed; there is no profile")
                return
            if "captured" in self._timeline.counts:
                self._eager = Timeline(run.device)
                watch(lambda _name: nullcontext(), eager=True)
                self._due += SETTLING
                return
        elif not self._eager.has_begun:
            self._time(self._eager, eager=True)
            return
        else:
            self._eager.end()
        self._trace = Trace(run.device)
        self._trace.begin()
        watch(self._trace.span, eager=True)
        self._due += TRACED

    def begin(self, run: RunInfo) -> None:
        """Begin with the steps as they are."""
        if is_watched():
            self._due = -1
            self.notify("profiler: another profile is being made, so there is none of these steps")
            return
        self._timeline = Timeline(run.device)
        self._time(self._timeline, eager=False)

    def _time(self, timeline: Timeline, *, eager: bool) -> None:
        self._due += self.steps
        watch(timeline.span, eager=eager)
        timeline.begin()

    def _leave(self) -> None:
        if self._due >= 0:
            watch(None)
        if self._trace is not None and self._due >= 0:
            self._trace.stop()
        self._timeline = self._eager = self._trace = None
        self._due = -1

    # --- the result

    def finish(self, run: RunInfo) -> None:
        """Make the profile and write it."""
        self.profile = self._made(run)
        self.profile.advice = advise(self.profile, self._facts(run))
        if run.run_dir is not None:
            try:
                self.write(resolve(self.folder, run))
            except (OSError, RuntimeError) as error:  # a full disk must not end the run
                self.notify(f"profiler: cannot write to {resolve(self.folder, run)}: {error}")
        where = "" if run.run_dir is None else f"; see {resolve(self.folder, run) / TABLE}"
        share = ", ".join(
            f"{PARTS[name]} {self.profile.share(name):.0%}" for name in self.profile.parts if name in PARTS
        )
        self.notify(f"profile: {self.profile.step_ms:.3f} ms per step ({share}){where}", event="profile")
        for one in self.profile.advice:
            self.notify(f"profile: {one}", event="profile")

    def write(self, folder: Path) -> None:
        """Write table, numbers and trace."""
        assert self.profile is not None
        assert self._trace is not None
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / TABLE, f"{self.profile}\n")
        write_text(folder / NUMBERS, json.dumps(self.profile.to_dict(), indent=2) + "\n")
        self._trace.write(folder / TRACE)

    def _made(self, run: RunInfo) -> Profile:
        assert self._timeline is not None
        assert self._trace is not None
        totals, counts, trace = self._timeline.totals_ms(), self._timeline.counts, self._trace
        if run.device.type == "cpu":  # batches are there already
            totals["data"] = totals.get("data", 0.0) + totals.pop("transfer", 0.0)
        intervals = {name: one for name, one in self._intervals(run).items() if counts.get(name)}
        each = {name: totals[name] / counts[name] for name in intervals}
        parts = {name: ms / self.steps for name, ms in totals.items() if name not in BETWEEN}
        parts |= {name: each[name] / intervals[name] for name in intervals}
        eager = {} if self._eager is None else self._eager.totals_ms()
        return Profile(
            device=str(run.device),
            first=self.start + 1,
            steps=self.steps,
            parts={name: parts[name] for name in PARTS if name in parts},
            eager={name: eager[name] / self.steps for name in PARTS if name in eager and name not in BETWEEN},
            each=each,
            intervals=intervals,
            busy_cores=1e3 * self._timeline.cpu_s / max(sum(totals.values()), 1e-9),
            operators=trace.operators,
            matrix_ms=trace.matrix_ms,
            other_ms=trace.other_ms,
            copy_ms=trace.copy_ms,
            memory={name: one for name, one in trace.memory.items() if name in totals or name in eager},
            notes=self._notes,
            warning=_crowded(torch.get_num_threads()),
        )

    def _intervals(self, run: RunInfo) -> dict[str, float]:
        """Return the steps between log points, and between checkpoints, as the settings say."""
        every, epochs = self.settings.get("save_every_steps"), self.settings.get("checkpoint_interval")
        saves = (1 / every if every else 0.0) + (
            1 / (epochs * run.steps_per_epoch) if epochs and run.steps_per_epoch else 0.0
        )
        logs = self.settings.get("log_interval")
        return {**({"logging": float(logs)} if logs else {}), **({"saving": 1 / saves} if saves else {})}

    def _facts(self, run: RunInfo) -> Facts:
        parts, settings, is_cuda = self._parts, self.settings, run.device.type == "cuda"
        step = None if parts is None else parts.step
        source, loads = _source_of(None if parts is None else parts.train_loader)
        forward = None if step is None else step.forward
        compiled = forward.decisions().get("way") if isinstance(forward, CompiledTask) else None
        return Facts(
            is_cuda=is_cuda,
            precision="fp32" if step is None else step.precision.name,
            has_bf16=is_cuda and torch.cuda.is_bf16_supported(including_emulation=False),
            is_compiled=compiled == "step" or settings.get("compile") == "model",
            is_tf32=torch.get_float32_matmul_precision() != "highest",
            capture=settings.get("capture", "auto"),
            pin_memory=settings.get("pin_memory", True),
            batch_size=settings.get("batch_size") if isinstance(loads, DataLoader) else None,
            can_fuse=_can_fuse(run.optimizer),
            cores=_cores(),
            threads=torch.get_num_threads(),
            free_memory=_free_memory(run.device) if is_cuda else 0.0,
            save_every_steps=settings.get("save_every_steps"),
            checkpoint_interval=settings.get("checkpoint_interval", 1),
            source=source,
            num_workers=loads.num_workers if isinstance(loads, TorchDataLoader) else settings.get("num_workers", 0),
            prefetch=loads.prefetch if isinstance(loads, DataLoader) else 0,
        )


def _source_of(loader: Loader | None) -> tuple[Source, Any]:
    """Return who makes the batches, and the loader that does."""
    if isinstance(loader, DataLoader):
        return "dataset" if loader.can_use_workers else "memory", loader
    if isinstance(loader, ForeignLoader) and isinstance(loader.source, TorchDataLoader):
        return "torch", loader.source
    return "other", loader


def _can_fuse(optimizer: torch.optim.Optimizer | None) -> bool:
    if optimizer is None or (isinstance(optimizer, KernelOptimizer) and optimizer._kernel == "auto"):
        return False
    groups = [group for group in optimizer.param_groups if "fused" in group and not group["fused"]]
    return any(choose_kernel(group["params"]) == "fused" for group in groups)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _crowded(threads: int) -> str:
    """Return a sentence if other programs keep the CPU busy; empty if not, or where the system does not tell."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= max(_cores(), threads) + 1:
        return ""
    return f"other programs keep the CPU busy (load {load:.1f} on {_cores()} cores): alone, steps take less time"


def _free_memory(device: torch.device) -> float:
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - peak_memory(device)[0]
    return (free + max(unused, 0)) / total
