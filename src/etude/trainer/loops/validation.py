"""Validation by epochs, for users who write the outer loop themselves."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from etude.core import Batch, Clock, ConfigError, Task
from etude.core.model import unwrap
from etude.engine.callback import Callback, RunInfo, RunParts
from etude.engine.callback_list import CallbackList
from etude.engine.meter import count_tokens
from etude.trainer.arguments import LossLike, MetricsLike, as_callbacks, check_model, measure, plain_task
from etude.trainer.config import TrainerConfig
from etude.trainer.loaders import Loaders, num_batches
from etude.trainer.loops.epoch import EpochLoop, EpochProgress, check_keys, wants_progress
from etude.trainer.loops.results import EpochResult, cross_entropy_of, epoch_result
from etude.trainer.machine import Machine


class ValidationLoop(EpochLoop):
    """Evaluation by epochs: eval mode, no gradients.

    Callbacks receive the metrics in `on_validation_end` and `on_epoch_end` (`val_loss` …), so `EarlyStopping` and
    `ModelCheckpoint` work here; those that need training steps are refused. `should_stop` tells whether one of them
    asked to stop. `on_train_end` is called by `finish()`, or at the end of a `with` block.
    """

    def __init__(
        self,
        loss_strategy: LossLike = None,
        *,
        task: Task | None = None,
        metrics: MetricsLike = (),
        callbacks: Iterable[Callback] = (),
        use_amp: bool = False,
        device: str = "cpu",
        progress: bool | None = None,
    ) -> None:
        """Set the options of every epoch; `progress` shows a line for it, by default only on a terminal.

        `metrics` are those of a `Trainer`; the result has them in `parts`.
        """
        super().__init__()
        self.task = plain_task(loss_strategy, task, "loss_strategy")
        measure(self.task, metrics, None, validates=True)
        self.machine = Machine(device, "bf16" if use_amp else "fp32")
        self.callbacks = tuple(as_callbacks(callbacks))
        for callback in self.callbacks:
            if callback.acts_in_steps():
                name = type(callback).__name__
                raise ConfigError(f"{name} needs training steps, and validation has none; pass it to TrainingLoop")
        self.clock = Clock()
        self._line = EpochProgress(progress) if wants_progress(progress, self.callbacks) else None
        self._measures: nn.Module | None = None
        self._logs: dict[str, float] = {}

    def validate_epoch(self, model: nn.Module, dataloader: Any, epoch: int = 0) -> EpochResult:
        """Return the metrics of one pass over the loader."""
        machine = self.machine
        check_model(model).to(machine.device)
        loader = Loaders(config=TrainerConfig(), machine=machine, model=model).make(dataloader, training=False)
        counting = _Counting(loader, self._line, f"validation {epoch + 1}")
        callbacks = self._listed()
        callbacks.bind(RunParts(model, self.task, val_loader=loader))
        self.control.begin()
        self.clock.epoch = epoch
        start = time.perf_counter()
        try:
            self._begin(callbacks, model)
            callbacks.on_validation_begin(epoch)
            logs = machine.evaluate(model, self.task, counting)
            self._logs = {f"val_{name}": value for name, value in logs.items()}
            callbacks.on_validation_end(epoch, self._logs)
            callbacks.on_epoch_end(epoch, self._logs)
        except BaseException as error:
            self._measures = None
            callbacks.on_exception(error)
            raise
        duration_s = time.perf_counter() - start
        nll = cross_entropy_of(self.task, logs)
        return epoch_result(epoch, logs, duration_s, counting.samples, float(counting.tokens), nll=nll)

    def state_dict(self) -> dict[str, Any]:
        """Return the clock and the state of the callbacks."""
        return {"clock": self.clock.state_dict(), "callbacks": self._listed().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        check_keys(state, ("clock", "callbacks"), "ValidationLoop")
        self.clock.load_state_dict(state["clock"])
        self._listed().load_state_dict(state["callbacks"])

    def finish(self) -> None:
        """End the run: callbacks close their files and warn."""
        if self._measures is not None:
            self._measures = None
            self._listed().on_train_end(self._logs)

    def _listed(self) -> CallbackList:
        return CallbackList(self.callbacks, self.control)

    def _begin(self, callbacks: CallbackList, model: nn.Module) -> None:
        """Call `on_train_begin` if the model is new. The clock's step counts validations."""
        if self._measures is not unwrap(model):
            self._measures = unwrap(model)
            info = RunInfo("validate", model, None, self.clock, self.machine.device, None, None, None, None)
            info.resumed = self.clock.step > 0
            callbacks.on_train_begin(info)
        self.clock.step += 1


class _Counting:
    """A loader that counts the samples and tokens of its last epoch, and shows progress."""

    def __init__(self, loader: Any, line: EpochProgress | None, label: str) -> None:
        self.loader = loader
        self.batches: Any = None
        self.tokens: Tensor | int = 0
        self._line = line
        self._label = label

    def __len__(self) -> int:
        return len(self.loader)

    def iterate(self, epoch: int, position: int = 0) -> Any:
        self.batches = self.loader.iterate(epoch, position)
        self.tokens = 0
        return self._counted()

    def _counted(self) -> Iterator[Batch]:
        line = self._line
        if line is not None:
            line.begin(self._label, num_batches(self.loader))
        try:
            for batch in self.batches:
                self.tokens = self.tokens + count_tokens(batch)
                yield batch
                if line is not None:
                    line.advance()
        finally:
            self.batches.close()
            if line is not None:
                line.draw("\n")

    @property
    def samples(self) -> int:
        return int(self.batches.position)
