"""Find where non-finite values come from: which samples, which layer, the loss, or the backward pass."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

import safetensors.torch
import torch
from annotated_types import Ge

from etude.callbacks.nan_search import FINITE, FINITE_AT_FIRST, Finding, Random, Search, torch_random
from etude.checkpoint import pack
from etude.config.registry import register
from etude.core import Batch, CheckpointError, StepReport
from etude.core.arguments import checked
from etude.core.batch import tensors_in, to_device
from etude.core.files import write_bytes
from etude.core.forms import parts_of
from etude.data import DataLoader
from etude.engine.callback import Callback, Logs, RunInfo, RunParts
from etude.engine.explain import is_out_of_memory
from etude.engine.step import Step

MOST_SHOWN = 10
"""Samples that a message lists."""
Place = tuple[int, int, int, int]
"""A step, its epoch, and the range of its samples in the order of that epoch."""


@register("callback", "nan_debugger")
class NaNDebugger(Callback):
    """Runs skipped steps again and reports where the first non-finite value appeared.

    It names the samples of the batch that contain one, or else the first layer whose output is non-finite for finite
    inputs, or else the loss, or else the layer, the operator and the first parameter of the backward pass. The run
    folder gets a file with the batch, `nonfinite-step-N.safetensors`.

    Until an update is skipped it costs next to nothing: on the CPU a microsecond per step; on CUDA nothing is read
    before the log point, when the first skipped batch is run with the weights of that moment. From then on every step
    is read, so that the next one is run again exactly: same weights, batch and random numbers.
    """

    runs_alone = True

    needs_model = True

    @checked
    def __init__(self, reports: Annotated[int, Ge(1)] = 3) -> None:
        """Set how many skipped updates are explained."""
        super().__init__()
        self.reports = reports
        self._left = reports
        self._parts: RunParts | None = None
        self._run: RunInfo | None = None
        self._reads = False
        """Whether every step is read, because that does not wait or a step was skipped."""
        self._random: Random | None = None
        self._start = 0
        self._unread: list[tuple[Place, StepReport]] = []

    def acts_in_steps(self) -> bool:
        """True: it explains skipped updates."""
        return True

    def bind(self, parts: RunParts) -> None:
        """Keep the step and its loader."""
        self._parts = parts

    def on_train_begin(self, run: RunInfo) -> None:
        """Start with all reports left."""
        self._run, self._left, self._unread = run, self.reports, []
        self._reads, self._random = run.device.type == "cpu", None

    def on_step_begin(self, step: int) -> None:
        """Keep what the step draws from."""
        if self._run is not None and self._left:
            self._start = self._run.clock.position
            self._random = torch_random(self._run.device) if self._reads else None

    def on_step_end(self, report: StepReport) -> None:
        """Explain a skipped update, at once if its report can be read."""
        step = None if self._parts is None else self._parts.step
        if self._run is None or step is None or not self._left:
            return
        clock = self._run.clock
        place = clock.step, clock.epoch, self._start, clock.position
        if not self._reads:
            self._unread.append((place, report))
        elif report.skipped.item():  # waits for the device, where a step was skipped before
            finding = _search(step, step.batches, self._random)
            self._report(step, place, finding, step.batches)

    def on_log(self, record: Logs) -> None:
        """Look for the first skipped update since the last log point; the device has been read already."""
        self._look_back(record.get("skipped", 0))

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Look for it at the end of an epoch, too."""
        self._look_back(logs.get("skipped", 0))

    def on_exception(self, error: BaseException) -> None:
        """Look for it before the run ends: too many skipped updates may be the reason."""
        self._look_back(isinstance(error, Exception), together=False)

    # --- skipped steps of the past

    def _look_back(self, skipped: float, *, together: bool = True) -> None:
        unread, self._unread = self._unread, []
        step = None if self._parts is None else self._parts.step
        bad = [place for place, report in unread if report.skipped.item()] if skipped and step is not None else []
        if step is None or not bad or not self._left:
            return
        self._reads = True
        if batches := self._read_again(bad[0], step):
            self._report(step, bad[0], _search(step, batches), batches, together=together)

    def _read_again(self, place: Place, step: Step) -> list[Batch]:
        """Return the batches of a step, if their order is known and reading them does not disturb the training."""
        assert self._parts is not None
        loader = self._parts.train_loader
        if not isinstance(loader, DataLoader) or self._parts.settings.get("persistent_workers"):
            return []
        _, epoch, start, end = place
        found, batches = [], loader.iterate(epoch, start)
        try:
            while batches.position < end:
                found.append(to_device(next(batches), step.updater.device))
        finally:
            batches.close()
        return found

    # --- reporting

    def _report(self, step: Step, place: Place, finding: Finding, batches: Any, *, together: bool = True) -> None:
        """Report the finding of the first rank that has one; `together`: all ranks are here with theirs."""
        assert self._run is not None
        self._left -= 1
        own: list[Any] = [finding.text, finding.rows, self._samples(step, place, finding)]
        found = [own]
        if together:
            found = [json.loads(one) for one in step.world.gather_text(json.dumps(own))]
        rank = next((rank for rank, one in enumerate(found) if one[0]), 0)
        if not self._run.is_main:
            return
        number, epoch, start, end = place
        text, rows, which = found[rank]
        if step.world.size > 1:
            which += f", on rank {rank}" if text or not together else ", on all ranks"
        if self._run.clock.step != number:
            text = f"with the weights of step {self._run.clock.step}, {text or 'it is finite'}"
        text = text or (FINITE_AT_FIRST if step.updater.needs_second_gradient else FINITE)
        scaled = " (with a loss scale a few skipped steps are normal)" * (step.precision.scaler is not None)
        file = self._write(place, text, batches) if rank == step.world.rank else ""
        facts = {"epoch": epoch, "start": start, "end": end, "rows": rows, "file": file}
        self.notify(
            f"step {number} (samples {start} to {end - 1} of epoch {epoch + 1}) was skipped: {text}{which}{scaled}"
            f"{f'; its batch is in {file}' if file else ''}",
            finding="non-finite",
            **facts,
        )

    def _samples(self, step: Step, place: Place, finding: Finding) -> str:
        """Return which samples are affected: their place in the batch, and their index in the data."""
        if not finding.rows:
            return ""
        micro = f" of micro-batch {finding.micro_batch + 1}" if len(finding.sizes) > 1 else ""
        loader = None if self._parts is None else self._parts.train_loader
        start = place[2] + sum(finding.sizes[: finding.micro_batch])
        known = loader.indices(place[1], start) if isinstance(loader, DataLoader) and step.world.size == 1 else None
        shown = finding.rows[:MOST_SHOWN]
        more = f" and {len(finding.rows) - MOST_SHOWN} more" if len(finding.rows) > MOST_SHOWN else ""
        data = f", index {', '.join(str(known[row]) for row in shown)} of the data" if known is not None else ""
        return f"; sample{'s' * (len(finding.rows) > 1)} {', '.join(map(str, shown))}{more}{micro}{data}"

    def _write(self, place: Place, text: str, batches: Any) -> str:
        """Write the batch, and the random numbers it was run with, to the run folder; return the file's path."""
        assert self._run is not None
        if self._run.run_dir is None:
            return ""
        path = self._run.run_dir / f"nonfinite-step-{place[0]:08d}.safetensors"
        try:
            tensors, structure = pack([_plain(batch) for batch in batches], "batch")
        except CheckpointError:  # a batch of an unusual class: its tensors alone
            tensors, structure = {str(key): one for key, one in enumerate(tensors_in(list(batches)))}, None
        for name, state in (self._random or {}).items():
            tensors[f"random.{name}"] = state
        known = {"finding": text, "structure": json.dumps(structure)}
        known |= dict(zip(("step", "epoch", "start", "end"), map(str, place), strict=True))
        copies = {name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()}
        try:
            write_bytes(path, safetensors.torch.save(copies, metadata=known))
        except (OSError, torch.OutOfMemoryError) as error:
            self.notify(f"nan_debugger: cannot write {path}: {error}")
            return ""
        return str(path)


def _search(step: Step, batches: Sequence[Batch], random: Random | None = None) -> Finding:
    """Run a step again; that its memory runs out, since all outputs are kept, must not end the run."""
    try:
        return Search(step).run(batches, random)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return Finding("run again, it needs more memory than there is; set a smaller training.micro_batch_size")


def _plain(batch: Batch) -> Any:
    """Return a batch as lists and dicts; other objects as they are."""
    parts = None if isinstance(batch, torch.Tensor) else parts_of(batch)
    if parts is None:
        return batch
    values = [_plain(value) for value in parts.values()]
    return values if isinstance(batch, (tuple, list)) else dict(zip(map(str, parts), values, strict=True))
