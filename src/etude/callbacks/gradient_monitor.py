"""Monitor the gradients of every layer during training, and report problems."""

from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn

from etude.callbacks.gradient_health import JUDGE, GradientHealth, Judge
from etude.checkpoint import is_kind, record_of
from etude.config.registry import register
from etude.core import ConfigError, StepReport, TrainingError
from etude.core.arguments import checked
from etude.core.model import clean_name, unwrap
from etude.engine.callback import Callback, Gradients, Logs, RunInfo
from etude.engine.precision import MixedPrecision
from etude.optim.clipping import tensor_norms

_KEPT = {"steps": int, "looked_at": int, "watching": bool, "layers": dict[str, float]}
_STATE = record_of("GradientMonitor", {**_KEPT, "judge": JUDGE})


class Look(NamedTuple):
    """Gradient norms of one step, still on the device."""

    step: int
    is_scaled: bool
    order: list[str]
    """Names in the order of the model."""
    names: list[str]
    """In the order of the norms."""
    has_gradient: list[bool]
    norms: Tensor


@torch.no_grad()
def measure(gradients: Gradients, divisor: Tensor | float, step: int) -> Look:
    """Measure the gradients as if divided by `divisor`, without synchronising."""
    wanted = {id(param) for param in gradients.params}
    named = [(clean_name(name), param) for name, param in unwrap(gradients.model).named_parameters()]
    named = [(name, one) for name, one in named if one.requires_grad and (not wanted or id(one) in wanted)]
    order = [name for name, _ in named]
    # Foreach kernels need tensors of one device and dtype.
    kinds = dict.fromkeys((param.device, param.dtype) for _, param in named)
    named = [(name, one) for kind in kinds for name, one in named if (one.device, one.dtype) == kind]
    parts = [_norms([one for _, one in named if (one.device, one.dtype) == kind]) for kind in kinds]
    norms = torch.cat([part.to(parts[0]) for part in parts]) if parts else torch.zeros(0)
    divisor = divisor.to(norms) if isinstance(divisor, Tensor) else divisor
    names, has_gradient = [name for name, _ in named], [one.grad is not None for _, one in named]
    return Look(step, gradients.is_scaled, order, names, has_gradient, norms / divisor)


def _norms(params: list[nn.Parameter]) -> Tensor:
    found = [param.grad if param.grad is not None else param.new_zeros(1) for param in params]
    return tensor_norms([grad.coalesce()._values() if grad.is_sparse else grad for grad in found])


@register("callback", "gradient_monitor")
class GradientMonitor(Callback):
    """Reports layers whose gradient vanishes, explodes, is dead or not finite, with a remedy.

    It checks the first step and then every `every`-th; the others can be captured as CUDA graphs. A check launches a
    few kernels; the norms are read at the next log point, where the host synchronises anyway. They are those of the
    averaged loss over all micro-batches and ranks, before clipping; `report` holds the last ones.

    A skipped non-finite update is checked too: on the CPU immediately, on other devices at the log point. If the last
    step was skipped, its gradients are still available, unless it was captured, and every step until the next log
    point is checked.

    In your own loop, `check` does all of it at once after `loss.backward()`:

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    >>> model(torch.full((2, 4), 1e12)).sum().backward()
    >>> health = GradientMonitor().check(model)
    >>> health.findings[0].kind, health.findings[0].layers
    ('exploding', ('0', '1'))
    """

    @checked
    def __init__(
        self,
        every: Annotated[int, Ge(1)] = 100,
        vanishing: Annotated[float, Ge(0.0)] = 1e-7,
        exploding: Annotated[float, Gt(0.0)] = 1e3,
        patience: Annotated[int, Ge(1)] = 3,
        log_layers: bool = False,
    ) -> None:
        """Set when to check and what to report.

        Args:
            every: steps between checks.
            vanishing: a gradient norm below this, or below 1e-4 of the median of the layers, has vanished.
            exploding: a gradient norm above this has exploded.
            patience: consecutive checks with a gradient of zero, or none, after which a layer is dead or unused.
            log_layers: add the norm of every layer, as `grad_norm/LAYER`, to the records of log points.
        """
        super().__init__()
        if vanishing >= exploding:
            raise ConfigError(f"GradientMonitor: vanishing is {vanishing}; it must be below exploding, {exploding}")
        self.every = self.gradients_every = every
        self.log_layers = log_layers
        self.report: GradientHealth | None = None
        """The result of the last check that has been read."""
        self._judge = Judge(vanishing=vanishing, exploding=exploding, patience=patience)
        self._gradients: Gradients | None = None
        self._is_main = True
        self._begin()

    def _begin(self) -> None:
        self._judge.reset()
        self._steps = self._looked_at = 0
        self._watching = False
        """Whether every step is checked, until the next log point."""
        self._layers: dict[str, float] = {}
        self._pending: list[Look] = []

    def check(self, model: nn.Module, *, divisor: Tensor | float = 1.0) -> GradientHealth:
        """Check the gradients of a model now and return the result; synchronises with the device.

        `divisor` is the pending divisor of the gradients: a number of micro-batches, a loss scale. Persistent
        findings reappear in `warnings` only after 10, 100 … occurrences.
        """
        self._steps += 1
        self._look(Gradients(model, (), divisor, MixedPrecision("fp32")), divisor)
        (self.report,) = self._judge_pending()
        return self.report

    # --- hooks

    def on_train_begin(self, run: RunInfo) -> None:
        """Reset the history for a new run; a resumed one keeps it."""
        self._is_main = run.is_main
        if run.clock.step == 0:
            self._begin()

    def on_step_begin(self, step: int) -> None:
        """Count."""
        self._steps = step + 1

    def wants_gradients(self, step: int) -> bool:
        """Return whether a check is due."""
        return self._watching or super().wants_gradients(step)

    def on_gradients(self, gradients: Gradients) -> None:
        """Measure."""
        self._gradients = gradients
        self._look(gradients, gradients.divisor)

    def on_step_end(self, report: StepReport) -> None:
        """Check a skipped step if reading the flag costs no wait; a skipped update keeps its gradients."""
        if report.skipped.is_cpu and report.skipped.item() and self._looked_at != self._steps and self._gradients:
            self._look(self._gradients, report.divisor)

    def numbers(self) -> Logs:
        """Return the norm of every layer, if enabled."""
        self._read()
        return {f"grad_norm/{name}": norm for name, norm in self._layers.items()}

    def on_log(self, record: Logs) -> None:
        """Read the measurements, and check every step until the next log point if updates were skipped."""
        self._read()
        # A loss scale skips single updates while it adapts; this does not require checking every step.
        self._watching = self._gradients is not None and record.get("skipped", 0) > int(self._gradients.is_scaled)
        if self._watching:
            self._look_back()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Read the measurements since the last log point."""
        self._read()

    def on_train_end(self, result: Logs) -> None:
        """Read the measurements since the last log point."""
        self._read()

    def on_exception(self, error: BaseException) -> None:
        """Add the location to an error about non-finite values."""
        if not isinstance(error, TrainingError):
            return
        self._read()
        self._look_back()
        for finding in self.report.findings if self.report is not None and self.report.step == self._steps else ():
            if finding.kind == "non-finite" and finding.message not in getattr(error, "__notes__", ()):
                error.add_note(finding.message)

    def state_dict(self) -> dict[str, Any]:
        """Return how long findings last, what has been reported, and when the next check is."""
        self._read()
        return {"judge": self._judge.state_dict(), **{name: getattr(self, f"_{name}") for name in _KEPT}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; the history of another version is dropped."""
        self._pending.clear()
        if not is_kind(_STATE, state):
            return
        self._judge.load_state_dict(state["judge"])
        for name in _KEPT:
            setattr(self, f"_{name}", state[name])

    # --- checking and reading

    def _look(self, gradients: Gradients, divisor: Tensor | float) -> None:
        self._pending.append(measure(gradients, divisor, self._steps))
        self._looked_at = self._steps

    def _look_back(self) -> None:
        """Check the gradients that the last step left behind; only a non-finite norm shows that it was skipped."""
        if self._looked_at == self._steps or self._gradients is None:
            return
        look = measure(self._gradients, 1.0, self._steps)
        if not bool(look.norms.isfinite().all()):  # synchronises, at a log point or an error
            self._pending.append(look)
            self._looked_at = self._steps
            self._read()

    def _read(self) -> None:
        """Read and evaluate the pending checks, and notify the user of new findings. Synchronises with the device."""
        for health in self._judge_pending():
            self.report = health
            if self.log_layers:
                self._layers = {name: norm for name, norm in health.layers.items() if norm is not None}
            for finding in health.warnings if self._is_main else ():
                self.notify(finding.message, finding=finding.kind, layers=list(finding.layers))

    def _judge_pending(self) -> list[GradientHealth]:
        pending, self._pending = self._pending, []
        if not pending:
            return []
        whole = torch.cat([look.norms.to(pending[0].norms) for look in pending]).cpu()  # the only transfer
        found = []
        for look, part in zip(pending, torch.split(whole, [len(look.names) for look in pending]), strict=True):
            known = zip(look.names, look.has_gradient, part.tolist(), strict=True)
            norms = {name: norm if has_gradient else None for name, has_gradient, norm in known}
            ordered = {name: norms[name] for name in look.order}
            found.append(self._judge.judge(look.step, ordered, is_scaled=look.is_scaled))
        return found
