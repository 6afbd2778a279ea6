"""Weights that differ in training and in evaluation: a base class that swaps them, and optimizers that have both."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from etude.checkpoint import check_kind, record_of
from etude.checkpoint.saved_tensor import fill, whole
from etude.checkpoint.trust import check_tensor
from etude.core import CheckpointError, Clock, ConfigError
from etude.core.model import clean_name, sums_of_bits, unwrap
from etude.distributed.shards import local_of, model_param
from etude.engine.callback import Callback, Logs, RunInfo, RunParts
from etude.optim.schedule_free import HasModes, with_modes

_STATE = record_of("OptimizerWeights", {"weights": dict[str, Any]})


class SwappedWeights(Callback):
    """Base class: the model holds other weights while it is validated and saved, and after training.

    `hold` is called with `raw=True` for the weights that are trained, else with `raw=False`.
    """

    is_swapped = False
    """Whether the model holds the weights to evaluate."""
    _was_swapped = False
    _left: list[int] | None = None
    """What the weights that the last training left in the model have summed to."""

    @abstractmethod
    def hold(self, *, raw: bool) -> None:
        """Let the model hold the weights that are trained, or those to evaluate; nothing if it already does."""

    @abstractmethod
    def trained(self) -> Sequence[Tensor]:
        """Return the tensors of the model that it changes."""

    @abstractmethod
    def begin_again(self) -> None:
        """Train the weights that the model holds; nothing is left of others."""

    def swaps(self) -> bool:
        """Return whether the model is given other weights at all."""
        return True

    def label(self) -> str:
        """Return the name by which the user knows it."""
        return type(self).__name__

    def bind(self, parts: RunParts) -> None:
        """Raise ConfigError if another callback swaps the weights too."""
        both = [one.label() for one in self._siblings or () if isinstance(one, SwappedWeights) and one.swaps()]
        if self.swaps() and len(both) > 1:
            raise ConfigError(
                f"{' and '.join(both)}: a run validates and saves one average of the weights; remove the others (an "
                "EMA may set validate to false)"
            )

    @contextmanager
    def trying(self, clock: Clock) -> Iterator[None]:
        """Try steps with the weights that are trained."""
        was_swapped = self.is_swapped
        self.hold(raw=True)
        try:
            yield
        finally:
            self.hold(raw=not was_swapped)

    def on_train_begin(self, run: RunInfo) -> None:
        """Put the trained weights back, if an earlier training left others in the model, and nobody changed them."""
        if run.clock.step == 0:
            self.begin_again()
        elif self._left is not None and sums_of_bits(self.trained()) != self._left:
            self.begin_again()
            if run.is_main:
                self.notify(
                    f"{self.label()}: the weights have been changed since the last training, so training continues "
                    "from them, and not from those that it had trained"
                )
        self._left = None
        self.hold(raw=True)

    def on_validation_begin(self, epoch: int) -> None:
        """Validate the weights to evaluate."""
        self.hold(raw=False)

    def on_validation_end(self, epoch: int, metrics: Logs) -> None:
        """Put the trained weights back."""
        self.hold(raw=True)

    def on_validation_cut_off(self, epoch: int) -> None:
        """Put the trained weights back."""
        self.hold(raw=True)

    def on_save_begin(self) -> None:
        """Save the weights to evaluate as the model."""
        self._was_swapped = self.is_swapped
        self.hold(raw=False)

    def on_save_end(self) -> None:
        """Put the trained weights back, if the model held them."""
        self.hold(raw=not self._was_swapped)

    def on_train_end(self, result: Logs) -> None:
        """Leave the weights to evaluate in the model."""
        self.hold(raw=False)
        self._left = sums_of_bits(self.trained()) if self.is_swapped else None


class OptimizerWeights(SwappedWeights):
    """Calls `eval()` and `train()` of an optimizer that has them, such as schedule-free AdamW; a `Trainer` adds it.

    The model is validated, saved and left with the weights of `eval()`. Those of `train()` are copied meanwhile, so
    that training continues with the same bytes: the optimizer would compute them again, with rounding. A checkpoint
    holds both.
    """

    loads_shards = True

    def __init__(self) -> None:
        super().__init__()
        self._optimizers: list[HasModes] = []
        self._params: dict[str, Tensor] = {}
        self._raw: dict[str, Tensor] = {}
        """The weights of training, while the model holds the others."""

    def bind(self, parts: RunParts) -> None:
        """Find the optimizer and its parameters."""
        optimizer = None if parts.learning_rate is None else parts.learning_rate.optimizer
        self._optimizers = [] if optimizer is None else with_modes(optimizer)
        if optimizer is not None and parts.model is not None and self._optimizers:
            trained = {id(model_param(one)) for group in optimizer.param_groups for one in group["params"]}
            named = unwrap(parts.model).named_parameters()
            self._params = {clean_name(name): one.detach() for name, one in named if id(one) in trained}
            self._check(self._raw)
        super().bind(parts)

    def swaps(self) -> bool:
        """Return whether the optimizer has modes."""
        return bool(self._optimizers)

    def label(self) -> str:
        """Return the class of the optimizer."""
        return " and ".join(type(one).__name__ for one in self._optimizers)

    def on_train_begin(self, run: RunInfo) -> None:
        """Let the optimizer train; some begin in evaluation mode."""
        self.is_swapped = True
        super().on_train_begin(run)
        norms = [one for one in run.model.modules() if isinstance(one, _BatchNorm) and one.track_running_stats]
        if self._optimizers and norms and run.is_main:
            self.notify(
                f"{self.label()}: batch norm keeps statistics of the weights of training, not of the averaged weights "
                "that are validated and saved; recompute them afterwards (torch.optim.swa_utils.update_bn), or use "
                "another norm"
            )

    def trained(self) -> Sequence[Tensor]:
        """Return the parameters."""
        return [*map(local_of, self._params.values())]

    def begin_again(self) -> None:
        """Let the optimizer compute the weights of training from those that the model holds."""
        self._raw = {}

    @torch.no_grad()
    def hold(self, *, raw: bool) -> None:
        """Switch the mode of the optimizer, and keep or restore the weights of training."""
        if self.is_swapped != raw or not self._optimizers:
            return
        self.is_swapped = not raw
        if not raw:
            self._raw = {name: one.clone() for name, one in self._params.items()}
        for optimizer in self._optimizers:
            if raw:
                optimizer.train()
            else:
                optimizer.eval()
        if raw and self._raw:
            for name, one in self._raw.items():
                self._params[name].copy_(one)
            self._raw = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of training; a checkpoint is written while the model holds the others."""
        return {"weights": self._raw} if self._optimizers else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; model and optimizer are restored by themselves."""
        check_kind(_STATE, state, "state")
        self._left = None
        if self._params:  # a loop may be restored before it knows its model
            self._check(state["weights"])
        self._raw = {name: self._copy(name, one) for name, one in state["weights"].items()}
        self.is_swapped = True

    def _copy(self, name: str, saved: Tensor) -> Tensor:
        """Return a copy of a saved tensor, or of this process's part of it if its parameter is divided."""
        if name not in self._params:
            return whole(saved).clone()
        copy = self._params[name].clone()
        fill(copy, saved)
        return copy

    def _check(self, saved: dict[str, Any]) -> None:
        if saved and (different := saved.keys() ^ self._params.keys()):
            raise CheckpointError(
                f"weights.{next(iter(different))}: only the checkpoint or only the optimizer has it"
            )
        for name, one in saved.items():
            check_tensor(one, self._params[name], f"weights.{name}")
