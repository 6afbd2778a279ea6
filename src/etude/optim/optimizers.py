"""Torch's own optimizers with the fastest kernel for their parameters.

Torch uses its fused kernels only on request. These classes request them for every group where that is safe.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Unpack

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from etude.config.registry import register
from etude.core.errors import ConfigError
from etude.optim.direct import DirectStep, count_step
from etude.optim.kernels import (
    ALIASES,
    Common,
    Decay,
    Fraction,
    Kernel,
    KernelOptimizer,
    ParamsT,
    Rate,
    arguments,
    as_pair,
    choose_kernel,
)

Betas = tuple[Fraction, Fraction]
FUSED_ADAGRAD_ON_CUDA = TorchVersion(torch.__version__) >= "2.13"


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters: matrices decay, vectors and scalars (biases, norms) do not.

    >>> groups = decay_groups(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), weight_decay=0.1)
    >>> [(group["weight_decay"], len(group["params"])) for group in groups]
    [(0.1, 1), (0.0, 3)]
    """
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": weight_decay},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _check_nesterov(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if torch's SGD would ignore `nesterov`, or compute something else."""
    momentum, dampening = settings["momentum"], settings["dampening"]
    if settings["nesterov"] and (momentum == 0 or dampening != 0):
        raise ConfigError(
            f"SGD: nesterov needs momentum above 0 and dampening 0, found momentum {momentum} and dampening "
            f"{dampening}; set momentum (0.9 is usual) or nesterov: false"
        )


@register("optimizer", "sgd", aliases=ALIASES)
class SGD(DirectStep, torch.optim.SGD):
    """Stochastic gradient descent with momentum; sparse gradients need `kernel="loop"`.

    >>> weight = nn.Parameter(torch.ones(2)); weight.grad = torch.ones(2)
    >>> SGD([weight], lr=0.5).step(); weight.tolist()
    [0.5, 0.5]
    """

    _scales = False
    """Whether kernels must divide and skip."""

    @arguments
    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 0.01,
        momentum: Fraction = 0.0,
        dampening: Annotated[float, Ge(0), Le(1)] = 0.0,
        weight_decay: Decay = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **common: Unpack[Common],
    ) -> None:
        _check_nesterov({"momentum": momentum, "dampening": dampening, "nesterov": nesterov})
        given = self._grouped(params, lr, **common)
        super().__init__(given, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; raise ConfigError if its settings contradict each other."""
        super().add_param_group(param_group)
        _check_nesterov(self.param_groups[-1])

    def _auto_kernel(self, group: dict[str, Any]) -> Kernel:
        # With dampening the first momentum is special, and the fused kernel has only one first step for all
        # parameters.
        fusable = group["momentum"] == 0 or group["dampening"] == 0
        # Without momentum foreach is faster on CUDA, but it neither divides nor skips.
        is_plain = not group["momentum"] and not self._scales and all(param.is_cuda for param in group["params"])
        return choose_kernel(group["params"], has_fused=fusable and self._can_fuse(group) and not is_plain)

    def let_kernels_scale(self) -> None:
        """Use the fused kernel without momentum too."""
        self._scales = True
        for group in self.param_groups:
            if self._kernel == "auto" and group["foreach"] and not group["momentum"]:
                self._set_kernel(group)

    def _can_fuse(self, group: dict[str, Any]) -> bool:
        # Torch's CPU kernel (2.13) leaves most 16-bit weights unchanged and their momentum undefined.
        return not any(param.is_cpu and param.itemsize == 2 for param in group["params"])

    def direct_states(self, group: dict[str, Any]) -> Sequence[str] | None:
        """Return the momentum, if there is one; with dampening the kernel is not used."""
        return ["momentum_buffer"] if group["momentum"] else []

    def call_kernel(
        self,
        group: dict[str, Any],
        lists: Sequence[list[Tensor]],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Call the kernel of SGD."""
        params, grads, *buffers = lists
        torch._fused_sgd_(
            params,
            grads,
            *(buffers or [[]]),
            lr=group["lr"],
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )

    def _init_group(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], buffers: list[Tensor | None]
    ) -> bool:
        """Collect the tensors of a step; for the fused kernel, momentum starts with a value instead of unset.

        The update is the same. But torch's fused kernel fails if a parameter gets its first gradient later than the
        others, and leaves momentum uninitialised if the first step is skipped.
        """
        if not group["fused"]:
            return torch.optim.SGD._init_group(self, group, params, grads, buffers)  # type: ignore[no-any-return]
        has_sparse_grad: bool = super()._init_group(group, params, grads, buffers)
        if not (group["dampening"] and all(buffer is None for buffer in buffers)):
            for place, buffer in enumerate(buffers):
                if buffer is None:
                    buffers[place] = self._before_first(group, params[place], grads[place])
        return has_sparse_grad

    def _before_first(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> Tensor:
        """Return the momentum from which the kernel computes that of a first step: the gradient, without dampening."""
        if group["dampening"] == 0:
            return torch.zeros_like(param, memory_format=torch.preserve_format)
        scale, skipped = vars(self).get("grad_scale"), vars(self).get("found_inf")
        first = grad.neg() if group["maximize"] else grad.clone()
        first = (first if scale is None else first.div_(scale)).add_(param, alpha=group["weight_decay"])
        first.mul_(group["dampening"] / group["momentum"])
        return first if skipped is None else first.masked_fill_(skipped != 0, 0.0)


class _Adam(DirectStep):
    def direct_states(self, group: dict[str, Any]) -> Sequence[str] | None:
        """Return both moments and the counts of steps."""
        beta1, beta2 = group["betas"]
        is_usual = isinstance(beta1, float) and isinstance(beta2, float) and not group["amsgrad"]
        return ["exp_avg", "exp_avg_sq", "step"] if is_usual else None

    def call_kernel(
        self,
        group: dict[str, Any],
        lists: Sequence[list[Tensor]],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Count the step, and call the kernel of Adam or AdamW."""
        *others, counts = lists
        count_step(counts, found_inf)
        kernel: Any = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        kernel(
            *others,
            [],
            counts,
            amsgrad=False,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=grad_scale,
            found_inf=found_inf,
        )


@register("optimizer", "adam", aliases=ALIASES)
class Adam(_Adam, torch.optim.Adam):
    """Adam (Kingma and Ba, 2015); its weight decay is an L2 penalty. See AdamW for decoupled weight decay."""

    @arguments
    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: Decay = 1e-8,
        weight_decay: Decay = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **common: Unpack[Common],
    ) -> None:
        given = self._grouped(params, lr, **common)
        super().__init__(given, lr, as_pair(betas), eps, weight_decay, amsgrad, maximize=maximize)


@register("optimizer", "adamw", aliases=ALIASES)
class AdamW(_Adam, torch.optim.AdamW):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    @arguments
    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 3e-4,
        betas: Betas = (0.9, 0.999),
        eps: Decay = 1e-8,
        weight_decay: Decay = 0.01,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **common: Unpack[Common],
    ) -> None:
        given = self._grouped(params, lr, **common)
        super().__init__(given, lr, as_pair(betas), eps, weight_decay, amsgrad, maximize=maximize)


@register("optimizer", "rmsprop", aliases=ALIASES)
class RMSprop(KernelOptimizer, torch.optim.RMSprop):
    """RMSprop (Hinton, 2012). Torch has no fused kernel for it: foreach, or a loop for large tensors on the CPU."""

    _has_fused = False

    @arguments
    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 0.01,
        alpha: Fraction = 0.99,
        eps: Decay = 1e-8,
        weight_decay: Decay = 0.0,
        momentum: Fraction = 0.0,
        centered: bool = False,
        *,
        maximize: bool = False,
        **common: Unpack[Common],
    ) -> None:
        given = self._grouped(params, lr, **common)
        super().__init__(given, lr, alpha, eps, weight_decay, momentum, centered, maximize=maximize)

    def _init_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], *states: Any) -> Any:
        """Collect the tensors of a step; momentum that a schedule raises from 0 has no buffer yet."""
        if group["momentum"]:
            for param in group["params"]:
                if (state := self.state.get(param)) and "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return super()._init_group(group, params, grads, *states)


@register("optimizer", "adagrad", aliases=ALIASES)
class Adagrad(DirectStep, torch.optim.Adagrad):
    """Adagrad (Duchi et al., 2011): the rate of a weight falls with the sum of its squared gradients."""

    @arguments
    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 0.01,
        lr_decay: Decay = 0.0,
        weight_decay: Decay = 0.0,
        initial_accumulator_value: Decay = 0.0,
        eps: Decay = 1e-10,
        *,
        maximize: bool = False,
        **common: Unpack[Common],
    ) -> None:
        given = self._grouped(params, lr, **common)
        super().__init__(given, lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize=maximize)

    def direct_states(self, group: dict[str, Any]) -> Sequence[str] | None:  # noqa: ARG002
        """Return the sums of squares and the counts of steps."""
        return ["sum", "step"]

    def call_kernel(
        self,
        group: dict[str, Any],
        lists: Sequence[list[Tensor]],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Count the step, and call the kernel of Adagrad."""
        count_step(lists[-1], found_inf)
        torch._fused_adagrad_(
            *lists,
            lr=group["lr"],
            lr_decay=group["lr_decay"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=grad_scale,
            found_inf=found_inf,
        )

    def _can_fuse(self, group: dict[str, Any]) -> bool:
        # Without the fused kernel torch counts the steps on the host: they wait for the device, and are not captured.
        return FUSED_ADAGRAD_ON_CUDA or not any(param.is_cuda for param in group["params"])


@register("optimizer", "nadam", aliases=ALIASES)
class NAdam(KernelOptimizer, torch.optim.NAdam):
    """Adam with Nesterov momentum (Dozat, 2016); torch has foreach kernels for it."""

    _has_fused = False

    @arguments
    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 2e-3,
        betas: Betas = (0.9, 0.999),
        eps: Decay = 1e-8,
        weight_decay: Decay = 0.0,
        momentum_decay: Decay = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        **common: Unpack[Common],
    ) -> None:
        given, pair = self._grouped(params, lr, **common), as_pair(betas)
        super().__init__(
            given, lr, pair, eps, weight_decay, momentum_decay, decoupled_weight_decay, maximize=maximize
        )


@register("optimizer", "radam", aliases=ALIASES)
class RAdam(KernelOptimizer, torch.optim.RAdam):
    """Adam whose first steps are rectified, so that they need no warm-up (Liu et al., 2020); foreach kernels."""

    _has_fused = False

    @arguments
    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: Decay = 1e-8,
        weight_decay: Decay = 0.0,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        **common: Unpack[Common],
    ) -> None:
        given = self._grouped(params, lr, **common)
        super().__init__(given, lr, as_pair(betas), eps, weight_decay, decoupled_weight_decay, maximize=maximize)
