"""Find where non-finite values come from: the batch, a layer, or the loss."""

from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor, nn

from etude.config.registry import register
from etude.core import ConfigError, StepReport
from etude.core.batch import tensors_in
from etude.core.model import unwrap
from etude.engine.callback import Callback, Logs, RunInfo


@register("callback", "find_nonfinite")
class FindNonfinite(Callback):
    """Reports, for the first skipped updates, where the first non-finite value appeared.

    It names the samples of the batch that contain one, or else the first layer whose output is non-finite for finite
    inputs, or else the loss or the backward pass. Every layer's input and output is checked in every step, and the
    host waits for each, so use it only for debugging.
    """

    needs_model = True

    def __init__(self, reports: Annotated[int, Ge(1)] = 3) -> None:
        """Set how many skipped updates are explained."""
        super().__init__()
        if reports < 1:
            raise ConfigError(f"FindNonfinite: reports must be at least 1, found {reports}")
        self.reports = reports
        self._left = reports
        self._run: RunInfo | None = None
        self._names: dict[nn.Module, str] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._found = ""
        self._batches = 0

    def acts_in_steps(self) -> bool:
        """True: it explains skipped updates."""
        return True

    def on_train_begin(self, run: RunInfo) -> None:
        """Register hooks on every layer of the model."""
        self._remove()
        model = unwrap(run.model)
        if model._compiled_call_impl is not None:
            raise ConfigError(
                "find_nonfinite needs the layers, which a compiled model does not expose; set compile: off"
            )
        self._run, self._left = run, self.reports
        self._names = {module: name for name, module in model.named_modules()}
        self._hooks = [model.register_forward_pre_hook(self._see_batch, with_kwargs=True)]
        for module in self._names:
            if module is not model:
                self._hooks.append(module.register_forward_pre_hook(self._see_input, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._see_output, with_kwargs=True))

    def on_step_begin(self, step: int) -> None:
        """Reset for a new step."""
        self._found, self._batches = "", 0

    def on_step_end(self, report: StepReport) -> None:
        """Report a skipped update."""
        if self._left == 0 or not report.skipped.item():
            return
        self._left -= 1
        found = self._found or _beyond_the_layers(report)
        assert self._run is not None
        if self._run.is_main:
            self.notify(f"step {self._run.clock.step} was skipped: {found}", finding="non-finite")
        if self._left == 0:
            self._remove()

    def on_train_end(self, result: Logs) -> None:
        """Remove the hooks."""
        self._remove()

    def on_exception(self, error: BaseException) -> None:
        """Remove the hooks."""
        self._remove()

    def _remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _see_batch(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._batches += 1
        inputs = {**{str(index): arg for index, arg in enumerate(args)}, **kwargs}
        for name, tensor in ((name, one) for name, value in inputs.items() for one in tensors_in(value)):
            if not self._found and not _is_finite(tensor):
                rows = tensor.detach().reshape(tensor.shape[0] if tensor.dim() else 1, -1)
                bad = (~rows.isfinite()).any(dim=1).nonzero().flatten().tolist()
                samples = ", ".join(map(str, bad[:10])) + (f" and {len(bad) - 10} more" if len(bad) > 10 else "")
                which = f"micro-batch {self._batches}" if self._batches > 1 else "the batch"
                self._found = f"{which} contains non-finite values (input {name}, samples {samples})"

    def _see_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._found and not all(map(_is_finite, tensors_in((args, kwargs)))):
            self._found = (
                f"the input of {self._name(module)} is not finite, although the output of every earlier layer is; "
                "check the code before it"
            )

    def _see_output(self, module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any) -> None:
        if self._found or all(map(_is_finite, tensors_in(output))):
            return
        own = [name for name, param in module.named_parameters() if not _is_finite(param)]
        why = f"its parameter {own[0]} is not finite" if own else "its inputs are finite"
        self._found = f"{self._name(module)} is the first layer whose output is not finite; {why}"

    def _name(self, module: nn.Module) -> str:
        return f"{self._names[module] or 'the model'} ({type(module).__name__})"


def _beyond_the_layers(report: StepReport) -> str:
    bad = [name for name, value in report.sums.items() if not _is_finite(value)]
    if bad:
        return f"the output of the model is finite, but {', '.join(bad)} is not; check the loss and the labels"
    return "the loss is finite, but its gradients are not: the backward pass overflows or divides by zero"


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())  # a host synchronisation, accepted by users of this callback
