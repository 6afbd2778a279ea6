"""Training from plain functions (forward, loss, update) without a base class, using the same step."""

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from etude.core import (
    Batch,
    ConfigError,
    DataBatch,
    DataError,
    LossTerm,
    StepReport,
    Task,
    Terms,
    TrainingError,
    num_samples,
)
from etude.engine.callback import Callback, Logs
from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses.functional import IGNORE_INDEX, accuracy_term, count_labels
from etude.metrics import TrainingMetrics
from etude.optim.clipping import clip_to_norm, global_norm
from etude.trainer.optimization import check_optimizer

logger = logging.getLogger("etude")

Forward = Callable[[Tensor], Tensor]
ComputeLoss = Callable[[Tensor, Tensor], Tensor]
Action = Callable[[], Any]


def training_step(
    model_forward: Forward,
    compute_loss: ComputeLoss,
    optimizer_step: Action,
    zero_gradients: Action,
    data: Tensor,
    labels: Tensor,
) -> float:
    """Run one step from plain functions and return the loss.

    >>> layer = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> x, y = torch.ones(4, 2), torch.zeros(4, 1)
    >>> steps = [training_step(layer, nn.functional.mse_loss, optimizer.step, optimizer.zero_grad, x, y)
    ...          for _ in range(20)]
    >>> steps[-1] < steps[0]
    True
    """
    step = function_step(model_forward, compute_loss, optimizer_step, zero_gradients)
    report = step([DataBatch(data, labels)])
    return float(report.sums["loss"])


def function_step(
    model_forward: Forward,
    compute_loss: ComputeLoss,
    optimizer_step: Action,
    zero_gradients: Action,
    *,
    clip_norm: float | None = None,
    precision: MixedPrecision | None = None,
    device: torch.device | None = None,
    accumulates: bool = False,
    metrics: bool = False,
) -> Step:
    """Return the engine's step built from plain functions; a module among them is moved to `device`, if given.

    If `optimizer_step` is the `step` method of a torch optimizer, clipping and skipping of non-finite updates work as
    in any other run. Any other function is called unchanged; clipping then requires that `model_forward` is a module
    or a method of one, so that the parameters are known.
    """
    model = _module_of(model_forward)
    if model is not None and device is not None:
        model.to(device)
    updater: Updater | FunctionUpdater
    owner = _owner_of(optimizer_step)
    if isinstance(owner, torch.optim.Optimizer):
        trained = [] if model is None else [*model.parameters()]
        check_optimizer(owner, trained or [param for group in owner.param_groups for param in group["params"]])
        updater = MethodUpdater(owner, zero_gradients, clip_norm)
    else:
        params = None if model is None else list(model.parameters())
        if params is None and (clip_norm is not None or accumulates):
            what, setting = (
                ("clipped", "clip_gradients=False") if clip_norm is not None else ("accumulated", "1 step")
            )
            raise ConfigError(
                f"gradients cannot be {what} without knowing the parameters: pass a module's forward, or an "
                f"optimizer's step method, or set {setting}"
            )
        updater = FunctionUpdater(optimizer_step, zero_gradients, params, clip_norm)
    name = "fp32" if precision is None else precision.name
    return Step(
        nn.Identity() if model is None else model,
        FunctionTask(model_forward, compute_loss, by_samples=accumulates),
        updater,  # type: ignore[arg-type]
        MixedPrecision(name, updater.device if device is None else device),
        metrics=metrics,
    )


class FunctionTask(Task):
    """A task from a forward function and a loss function of (predictions, labels).

    By default each batch counts equally. With `by_samples` the loss is a mean over the samples of its batch, and
    larger batches count more.
    """

    def __init__(self, model_forward: Forward, compute_loss: ComputeLoss, *, by_samples: bool = False) -> None:
        self.model_forward = model_forward
        self.compute_loss = compute_loss
        self.by_samples = by_samples
        self.batches = 0
        """Number of samples seen."""

    def __call__(self, model: nn.Module, batch: Batch, *, metrics: bool | None) -> Terms:  # noqa: ARG002 - task protocol
        """Return the loss, and accuracy if the labels are class indices."""
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise DataError(f"plain functions need batches of (data, labels), found {_form(batch)}")
        data, labels = batch
        predictions = self.model_forward(data)
        loss, count = self.compute_loss(predictions, labels), float(num_samples(batch))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"values of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise TrainingError(f"compute_loss returned {found}; it must return a tensor of one number, the loss")
        terms = {"loss": LossTerm(loss * count, count) if self.by_samples else LossTerm(loss, 1.0)}
        if self.measures.wants(training=torch.is_grad_enabled()):
            self.judged = predictions.detach(), labels
        if metrics and (class_dim := _class_dim(predictions, labels)) is not None:
            labelled = count_labels(labels, IGNORE_INDEX)
            terms["accuracy"] = accuracy_term(predictions, labels, labelled, class_dim=class_dim)
        return terms

    def observe(self, batch: Batch) -> None:
        """Count a batch."""
        self.batches += 1
        super().observe(batch)


class FollowMetrics(Callback):
    """Stores the metrics of the current epoch in a `TrainingMetrics`, and logs them."""

    def __init__(self, metrics: TrainingMetrics, task: FunctionTask) -> None:
        super().__init__()
        self._metrics = metrics
        self._task = task

    def on_epoch_begin(self, epoch: int) -> None:
        """Begin an epoch."""
        self._metrics.current_epoch = epoch
        self._metrics.reset_epoch()
        self._task.batches = 0

    def on_step_end(self, report: StepReport) -> None:  # noqa: ARG002 - hook signature
        """Count a batch."""
        self._metrics.current_batch = self._task.batches

    def on_log(self, record: Logs) -> None:
        """Write a line to the log."""
        epoch, batch = self._metrics.current_epoch, self._metrics.current_batch
        logger.info("epoch %d batch %d loss %.4f", epoch, batch, record["loss"])


class MethodUpdater(Updater):
    """The engine's update, with the caller's function for zeroing gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer, zero_gradients: Action, clip_norm: float | None) -> None:
        super().__init__(optimizer, clip_norm=clip_norm)
        self.zero_grad = zero_gradients  # type: ignore[method-assign]


class FunctionUpdater:
    """An update by an opaque function."""

    lr = float("nan")
    needs_second_gradient = False

    def __init__(
        self,
        optimizer_step: Action,
        zero_gradients: Action,
        params: list[nn.Parameter] | None,
        clip_norm: float | None,
    ) -> None:
        self.optimizer_step = optimizer_step
        self.zero_grad = zero_gradients
        self.params = params or []
        self.clip_norm = clip_norm

    @property
    def device(self) -> torch.device:
        """Device of the first parameter, the CPU if none is known."""
        return self.params[0].device if self.params else torch.device("cpu")

    def rates(self) -> dict[str, float]:
        """Return that the rate is unknown."""
        return {"lr": self.lr}

    def announcement(self) -> str | None:
        """Return None: nothing is known about the optimizer."""
        return None

    def send_rates(self) -> None:
        """Unknown: only the function has the learning rate."""

    def apply(self, divisor: Tensor | float) -> tuple[Tensor, Tensor]:
        """Divide, clip if configured, and call the function unless a known gradient is not finite."""
        grads = [param.grad for param in self.params if param.grad is not None]
        norm = global_norm(grads)
        if divisor != 1.0:  # several micro-batches
            torch._foreach_div_(grads, divisor)
        if self.clip_norm is not None:
            clip_to_norm(grads, norm / divisor, self.clip_norm)
        skipped = norm.mul(0.0).ne_(0.0)
        if not skipped.item():  # the function is host code, so the host decides
            self.optimizer_step()
        return norm, skipped


def _owner_of(method: Any) -> Any:
    """Return the object of a bound method, also of a `step` that a scheduler of torch has wrapped."""
    if not getattr(method, "_wrapped_by_lr_sched", False):
        return getattr(method, "__self__", None)
    found = inspect.getclosurevars(method).nonlocals.get("opt_ref")
    return None if found is None else found()


def _class_dim(predictions: Any, labels: Any) -> int | None:
    """Return the class dimension; None if these are not class scores and class indices."""
    if not (isinstance(predictions, Tensor) and isinstance(labels, Tensor)) or labels.is_floating_point():
        return None
    shape = predictions.shape
    if len(shape) < 2:
        return None
    return 1 if labels.shape == shape[:1] + shape[2:] else -1 if labels.shape == shape[:-1] else None


def _form(batch: Any) -> str:
    size = f" of {len(batch)}" if isinstance(batch, (tuple, list, Mapping)) else ""
    return f"a {type(batch).__name__}{size}"


def _module_of(function: Callable[..., Any]) -> nn.Module | None:
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
