"""One optimizer update: divide the summed gradients, clip them, skip the update if it is not finite.

All of it stays on the device. A fused kernel can divide and skip itself, so division by the count, division by the
loss scale and clipping become one factor passed to it: no extra pass over the gradients.
"""

import math
import operator
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from etude.core import ConfigError, TrainingError
from etude.engine.precision import MixedPrecision
from etude.engine.rates import DeviceRate, rate_names
from etude.optim.clipping import global_norm
from etude.optim.device import DeviceOptimizer, undone_if
from etude.optim.eager import take_step
from etude.optim.kernels import KernelOptimizer
from etude.optim.pieces import InPieces
from etude.optim.several import Optimizers, optimizers_in, perturbed_in

if TYPE_CHECKING:
    from etude.distributed.sharding import Shards

_IS_SPARSE = operator.attrgetter("is_sparse")


class Updater:
    """Applies gradients of a summed loss to the parameters of an optimizer."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        precision: MixedPrecision | None = None,
        shards: "Shards | None" = None,
    ) -> None:
        """`shards` are those of a model that several processes divide: the optimizer has their local parts."""
        self.optimizer = optimizer
        self.shards = shards
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self.precision = precision if precision is not None else MixedPrecision("fp32")
        self.params: list[nn.Parameter] = []
        self._rates: list[DeviceRate] = []
        self._sent: list[DeviceRate] = []
        """Those that have a tensor on the device."""
        self._names: dict[int, str] = {}
        self._is_sparse = False
        """Whether there have been sparse gradients."""
        self._find_groups()
        self._has_stepped = False
        self._met: set[int] = set()
        """Parameters that have been updated at least once."""
        self._perturbed = perturbed_in(optimizer)
        if self._perturbed is not None:
            self._perturbed.shards = shards
        self._first_norm: Tensor | None = None
        """Norm of the first gradients of a step that needs second ones."""
        self._constants: dict[float, Tensor] = {}
        self._answers = torch.zeros(()), torch.ones(())

    def _find_groups(self) -> None:
        """Find parameters, rates and kernels of all groups of the optimizer."""
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        self.params[:] = [param for group in groups for param in group["params"]]  # others hold the list too
        # Fused kernels divide by a float32 number, too coarse for a norm of float64 gradients.
        if self.clip_value is not None and any(param.is_complex() for param in self.params):
            raise ConfigError(
                "gradient_clip_value cannot clip the gradients of complex parameters; use gradient_clip_norm"
            )
        is_double = any(param.dtype is torch.float64 for param in self.params)
        divides = _supports_fused_scaling(optimizer) and self.clip_value is None and not is_double
        self._kernel_divides = divides and not self._is_sparse
        self._kernels_skip = all(map(_skips_itself, optimizers_in(optimizer))) and not self._is_sparse
        if not self._kernel_divides and self.params[0].is_cuda:
            _keep_counters_on_device(optimizer)
        self._rates = [DeviceRate(optimizer, place) for place in range(len(groups))]
        self._sent = [rate for rate in self._rates if rate.tensor is not None]
        self._names = rate_names(optimizer)

    @property
    def device(self) -> torch.device:
        """Device of the first parameter."""
        return self.params[0].device

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def rates(self) -> dict[str, float]:
        """Return the rate of the first group as `lr`, and those of other groups with a name or a rate of their own.

        They are called `lr/<name>`, or by the index of the group.
        """
        groups = self.optimizer.param_groups
        return {"lr": self.lr} | {f"lr/{name}": float(groups[place]["lr"]) for place, name in self._names.items()}

    def announcement(self) -> str | None:
        """Return what the optimizer has to say about itself, or None."""
        return self.optimizer.announcement() if isinstance(self.optimizer, Optimizers) else None

    def send_rates(self) -> None:
        """Copy the learning rates to the device, before the step that uses them."""
        if len(self._rates) != len(self.optimizer.param_groups):  # groups may be added during training
            self._find_groups()
        for rate in self._sent:
            rate.send()

    @property
    def has_stepped(self) -> bool:
        """Whether there has been a finite update: until then the host checks every one."""
        return self._has_stepped or bool(self.optimizer.state)

    def forget(self) -> None:
        """Forget earlier updates, which have been undone."""
        self._has_stepped, self._met = False, set()

    def constants(self) -> Hashable:
        """Return the host-side values of an update: settings, and rates that are not on the device."""
        return self.clip_norm, self.clip_value, *[rate.constants() for rate in self._rates]

    def zero_grad(self) -> None:
        """Set the gradients to None."""
        for param in self.params:
            param.grad = None
        if self.shards is not None:
            self.shards.clear()

    @property
    def needs_second_gradient(self) -> bool:
        """Whether `perturb`, another gradient and `restore` must come before `apply`."""
        return self._perturbed is not None

    def perturb(self) -> None:
        """Move the weights to where the optimizer wants its gradient, and drop the gradients."""
        assert self._perturbed is not None
        if self.shards is not None:
            self.shards.collect()
        self._first_norm = self._perturbed.perturb()
        Updater.zero_grad(self)

    def restore(self) -> None:
        """Restore the weights that `perturb` has moved."""
        assert self._perturbed is not None
        self._perturbed.restore()

    def apply(self, divisor: Tensor | float) -> tuple[Tensor, Tensor]:
        """Update the parameters with gradients divided by `divisor` (it includes the loss scale) and clipped.

        Returns the gradient norm before division, and 1.0 if the update was skipped because it was not finite.
        """
        grads = self._collected()
        if not grads:  # no trained term in this step
            return torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        norm = self._norm(grads)
        skipped = self._is_skipped(norm)
        if self.clip_norm is not None:
            # |g|/divisor > clip  ⇔  |g|/clip > divisor, and then dividing by |g|/clip leaves a norm of clip
            scaled_norm = norm if self.clip_norm == 1.0 else norm / self.clip_norm
            divisor = scaled_norm.clamp_min(divisor)
        if norm.is_cpu or not self.has_stepped:
            # On the CPU reading a value does not wait. Elsewhere it is read once: kernels that create their state in
            # the first update would leave it incomplete if skipped.
            if not skipped.item():
                self._known_step(grads, divisor, norm)
        elif self._kernel_divides:
            self._fused_step(divisor, skipped, norm)
        elif not _can_undo(self.optimizer):
            if not skipped.item():
                self._divide_and_step(grads, divisor)
        else:
            self._guarded_step(grads, divisor, skipped)
        self.precision.update(skipped)
        return norm, skipped

    def _is_skipped(self, norm: Tensor) -> Tensor:
        """Return 1.0 if a gradient of this step is not finite, else 0.0."""
        norms = [norm] if self._first_norm is None else [norm, self._first_norm]
        if norm.is_cpu:  # numbers are faster than tensors
            return self._answers[not all(map(math.isfinite, map(Tensor.item, norms)))]
        zeros = [one * 0.0 for one in norms]  # inf·0 and nan·0 are nan, which differs from 0
        return (zeros[0] if len(zeros) == 1 else zeros[0] + zeros[1]).ne_(0.0)

    def _collected(self) -> list[Tensor]:
        """Return the gradients of this process."""
        if self.shards is not None:
            self.shards.collect()
        grads = [param.grad for param in self.params if param.grad is not None]
        return self._values() if any(map(_IS_SPARSE, grads)) else grads

    def _norm(self, grads: list[Tensor]) -> Tensor:
        """Return the norm of all gradients, over all processes."""
        if self.shards is None:
            return global_norm(grads)
        return self.shards.norm((param for param in self.params if param.grad is not None), grads, global_norm)

    def _values(self) -> list[Tensor]:
        """Return the gradients; for sparse ones their values, as views, after coalescing."""
        self._kernel_divides = self._kernels_skip = False  # fused kernels do not support sparse gradients
        self._is_sparse = True
        for param in self.params:
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.coalesce()
        found = (param.grad for param in self.params if param.grad is not None)
        return [grad._values() if grad.is_sparse else grad for grad in found]

    def _known_step(self, grads: list[Tensor], divisor: Tensor | float, norm: Tensor) -> None:
        """Run an update that is known to be finite, with the arithmetic of all others."""
        if self._kernel_divides:
            self._fused_step(divisor, None, norm)
        else:
            self._divide_and_step(grads, divisor)
        if not self._has_stepped:
            self._has_stepped = True
            self._meet()

    def _fused_step(self, divisor: Tensor | float, skipped: Tensor | None, norm: Tensor) -> None:
        own = vars(self.optimizer)
        # The kernels expect these two in float32, whatever the dtype of the parameters.
        own["grad_scale"] = divisor.float() if isinstance(divisor, Tensor) else self._constant(divisor, norm)
        if skipped is not None:
            own["found_inf"] = skipped.float()
        try:
            self._step()
        finally:
            del own["grad_scale"]
            own.pop("found_inf", None)

    def _divide_and_step(self, grads: list[Tensor], divisor: Tensor | float) -> None:
        torch._foreach_div_(grads, divisor)
        if self.clip_value is not None:
            torch._foreach_clamp_min_(grads, -self.clip_value)
            torch._foreach_clamp_max_(grads, self.clip_value)
        try:
            self._step()
        except RuntimeError as error:
            if "sparse" not in str(error).lower():
                raise
            if not self._is_sparse:  # SparseAdam refuses others
                raise TrainingError(str(error)) from error
            raise TrainingError(
                f"{type(self.optimizer).__name__} does not support sparse gradients ({error}); create the embedding "
                "with sparse=False, or use sgd or adagrad with kernel: loop (torch's with fused=False) or "
                "torch.optim.SparseAdam, without weight decay"
            ) from error
        if self._is_sparse:
            _make_momenta_dense(self.optimizer)

    def _step(self) -> None:
        """Let the optimizer step with the rates on the device."""
        for rate in self._sent:
            rate.lend()
        try:
            if is_recorded(self.params[0]):
                with InPieces():  # type: ignore[no-untyped-call]
                    take_step(self.optimizer)
            else:
                take_step(self.optimizer)
        finally:
            for rate in self._sent:
                rate.take_back()

    def _guarded_step(self, grads: list[Tensor], divisor: Tensor | float, skipped: Tensor) -> None:
        """Divide and step without waiting for the device, which decides whether the step changes anything."""
        if self._has_newcomer():
            if not skipped.item():  # state created by this update could not be undone
                self._divide_and_step(grads, divisor)
                self._meet()
        elif self._kernels_skip:
            vars(self.optimizer)["found_inf"] = skipped.float()
            try:
                self._divide_and_step(grads, divisor)
            finally:
                del vars(self.optimizer)["found_inf"]
        else:
            self._undoable_step(grads, divisor, skipped)

    def _undoable_step(self, grads: list[Tensor], divisor: Tensor | float, skipped: Tensor) -> None:
        """Step an optimizer that cannot skip, with a copy of all that it may change."""
        groups = self.optimizer.param_groups
        numbers = [_host_values(group) for group in groups]
        with undone_if(skipped, [*self.params, *state_tensors(self.optimizer)]):
            self._divide_and_step(grads, divisor)
        if [_host_values(group) for group in groups] != numbers and skipped.item():  # it counts on the host
            for group, values in zip(groups, numbers, strict=True):
                group.update(values)

    def _meet(self) -> None:
        """Remember the parameters that have had a gradient."""
        self._met.update(id(param) for param in self.params if param.grad is not None)

    def _has_newcomer(self) -> bool:
        """Whether a parameter has its first gradient, because it was used for the first time."""
        if len(self._met) == len(self.params):
            return False
        self._met.update(id(param) for param in self.optimizer.state)
        return any(param.grad is not None and id(param) not in self._met for param in self.params)

    def _constant(self, value: float, like: Tensor) -> Tensor:
        if is_recorded(like):  # a graph must not read memory that may be freed
            return torch.full((), value, dtype=torch.float32, device=like.device)
        if value not in self._constants:
            self._constants = {value: torch.full((), value, dtype=torch.float32, device=like.device)}
        return self._constants[value]


def is_recorded(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured on the tensor's device."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _supports_fused_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all kernels divide and skip, after choosing such kernels where they are not the fastest alone."""
    leaves = optimizers_in(optimizer)
    for one in leaves:
        if isinstance(one, KernelOptimizer):
            one.let_kernels_scale()
    supports = all(getattr(one, "_step_supports_amp_scaling", False) for one in leaves)
    return supports and all(group.get("fused") for group in optimizer.param_groups)


def _skips_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the kernels of an optimizer change nothing if its `found_inf` says so."""
    return isinstance(optimizer, DeviceOptimizer) or _supports_fused_scaling(optimizer)


def _host_values(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params" and not isinstance(value, Tensor)}


def _keep_counters_on_device(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer count its steps on the device, where a skipped one is undone without waiting."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
            for param in group["params"]:
                state = optimizer.state.get(param, {})
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].to(param.device)


def _make_momenta_dense(optimizer: torch.optim.Optimizer) -> None:
    """Replace the momentum that torch's SGD makes of a sparse gradient: files hold dense tensors, with equal values.

    With `nesterov` torch adds it to the gradient, which takes a sparse one only.
    """
    for group in optimizer.param_groups:
        for state in (optimizer.state.get(param, {}) for param in group["params"] if not group.get("nesterov")):
            buffer = state.get("momentum_buffer")
            if buffer is not None and buffer.is_sparse:
                state["momentum_buffer"] = buffer.to_dense()


def _can_undo(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all state is in tensors on the device; any other requires the host to know of skipped steps."""
    found = (value for state in optimizer.state.values() for value in state.values())
    return all(value.is_cuda if isinstance(value, Tensor) else value is None for value in found)


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """Return all tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
