"""SGD, Adam, AdamW and RMSprop: torch's own, with the fastest kernel for their parameters.

Torch uses its fused kernels only on request. These classes request them for every group where that is safe.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, ParamSpec

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT as TorchParams

from etude.config.registry import register
from etude.core.arguments import check_ranges, checked
from etude.core.errors import ConfigError
from etude.optim.eager import without_compiler
from etude.optim.groups import Groups, LayerDecay, group_parameters

P = ParamSpec("P")
ParamsT = TorchParams | nn.Module
"""What torch's optimizers take, or a model."""
Kernel = Literal["auto", "fused", "foreach", "loop"]
Rate = Annotated[float, Gt(0)]
Decay = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]

FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
FUSED_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
FOREACH_NUMEL = 16_384
"""On the CPU, foreach saves Python time on small tensors; on larger ones its temporaries cost more."""

_NOT_IN_GROUPS = ("kernel", "groups", "layer_decay", "decay_only_matrices")
"""Arguments that are those of all groups together."""
ALIASES = {"learning_rate": "lr", "epsilon": "eps"}
"""Aliases of arguments, in configs and in Python; in Python `beta1` and `beta2` also set `betas`."""


def _other_names(init: Callable[P, None]) -> Callable[P, None]:
    """Let an optimizer also accept `learning_rate`, `epsilon`, `beta1` and `beta2`."""
    parameters = inspect.signature(init).parameters
    others = ALIASES | ({"beta1": "betas", "beta2": "betas"} if "betas" in parameters else {})

    @functools.wraps(init)
    def renamed(*args: P.args, **kwargs: P.kwargs) -> None:
        given: dict[str, Any] = dict(kwargs)
        for name in others.keys() & kwargs.keys():
            if others[name] in kwargs:
                raise ConfigError(f"{name} is another name for {others[name]}; pass only one of them")
            value = given.pop(name)
            if others[name] == "betas":
                first, second = given.get("betas", parameters["betas"].default)
                value = (value, second) if name == "beta1" else (first, value)
            given[others[name]] = value
        init(*args, **given)

    return renamed


def get_lr(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate of the first parameter group (synchronises if it is a tensor on a device)."""
    return float(optimizer.param_groups[0]["lr"])


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group; a schedule then uses it as the base rate.

    A tensor is filled in place, because captured graphs and fused kernels keep reading the same memory.
    """
    for group in optimizer.param_groups:
        if "initial_lr" in group:
            group["initial_lr"] = float(lr)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = float(lr)


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


def choose_kernel(params: Sequence[Tensor], *, has_fused: bool = True) -> Literal["fused", "foreach", "loop"]:
    """Return the fastest kernel that is safe for these parameters.

    >>> choose_kernel([torch.zeros(3)])
    'fused'
    >>> choose_kernel([torch.zeros(3, dtype=torch.complex64)])
    'loop'
    """
    if not _uniform(params):
        return "loop"
    if has_fused and all(_fusable(param) for param in params):
        return "fused"
    if all(param.is_cuda for param in params):
        return "foreach"
    small = sum(param.numel() for param in params) <= FOREACH_NUMEL * len(params)
    return "foreach" if small and all(param.is_cpu and not param.is_complex() for param in params) else "loop"


def _fusable(param: Tensor) -> bool:
    return param.device.type in FUSED_DEVICES and param.dtype in FUSED_DTYPES


def _uniform(params: Iterable[Tensor]) -> bool:
    """Return whether one kernel call accepts them all: plain tensors, or DTensors of one mesh."""
    unusual = [param for param in params if type(param) not in (Tensor, nn.Parameter)]
    if not unusual:
        return True
    from torch.distributed.tensor import DTensor

    meshes = {param.device_mesh if isinstance(param, DTensor) else None for param in params}
    return len(meshes) == 1 and None not in meshes


class KernelOptimizer(torch.optim.Optimizer):
    """Mixin: chooses a kernel for every parameter group, and reads and sets the learning rate."""

    _has_fused = True
    _kernel: Kernel = "auto"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group (torch's constructor does it too) and choose its kernel."""
        with without_compiler():
            super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group.get("fused") is not None or group.get("foreach") is not None:
            return
        kernel = self._auto_kernel(group) if self._kernel == "auto" else self._kernel
        if kernel == "fused" and not (self._can_fuse(group) and all(_fusable(param) for param in group["params"])):
            raise ConfigError(
                f"{type(self).__name__}: kernel 'fused' does not exist for these parameters or this optimizer; "
                f"use 'auto', 'foreach' or 'loop'"
            )
        group["foreach"] = kernel == "foreach"
        if self._has_fused:
            group["fused"] = kernel == "fused"
            # Read by gradient scalers: every group's kernel can unscale and skip on the device.
            self._step_supports_amp_scaling = all(each["fused"] for each in self.param_groups)

    def _grouped(
        self, params: Any, lr: float, groups: Groups, layer_decay: float | None, decay_only_matrices: bool
    ) -> Any:
        """Return what torch's constructor takes: the parameters in groups, if any were asked for."""
        if groups or layer_decay is not None or decay_only_matrices:
            arguments = inspect.signature(type(self)).parameters
            settings = [name for name in arguments if name not in (*_NOT_IN_GROUPS, "params")]
            check = functools.partial(check_ranges, type(self).__init__)
            return group_parameters(
                params,
                groups,
                layer_decay=layer_decay,
                decay_only_matrices=decay_only_matrices,
                lr=lr,
                settings=settings,
                aliases=ALIASES,
                check=check,
            )
        return [one for one in params.parameters() if one.requires_grad] if isinstance(params, nn.Module) else params

    def _auto_kernel(self, group: dict[str, Any]) -> Kernel:
        return choose_kernel(group["params"], has_fused=self._can_fuse(group))

    def _can_fuse(self, group: dict[str, Any]) -> bool:  # noqa: ARG002
        return self._has_fused

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state and the hyperparameters; the kernel stays the one chosen for the current parameters."""
        saved = state_dict["param_groups"]
        kernels = [{key: group[key] for key in ("fused", "foreach") if key in group} for group in self.param_groups]
        if len(saved) == len(kernels):  # otherwise torch raises its own error
            saved = [{**group, **kernel} for group, kernel in zip(saved, kernels, strict=True)]
        super().load_state_dict({**state_dict, "param_groups": saved})

    def get_lr(self) -> float:
        """Return the learning rate of the first parameter group."""
        return get_lr(self)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        set_lr(self, lr)


@register("optimizer", "sgd", aliases=ALIASES)
class SGD(KernelOptimizer, torch.optim.SGD):
    """Stochastic gradient descent with momentum; sparse gradients need `kernel="loop"`.

    >>> weight = nn.Parameter(torch.ones(2)); weight.grad = torch.ones(2)
    >>> SGD([weight], lr=0.5).step(); weight.tolist()
    [0.5, 0.5]
    """

    @_other_names
    @checked
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
        kernel: Kernel = "auto",
        groups: Groups = (),
        layer_decay: LayerDecay | None = None,
        decay_only_matrices: bool = False,
    ) -> None:
        if nesterov and (momentum == 0 or dampening != 0):
            raise ConfigError(
                f"SGD: nesterov needs momentum above 0 and dampening 0, found momentum {momentum} and dampening "
                f"{dampening}; set momentum (0.9 is usual) or nesterov: false"
            )
        self._kernel = kernel
        given = self._grouped(params, lr, groups, layer_decay, decay_only_matrices)
        super().__init__(given, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize)

    def _auto_kernel(self, group: dict[str, Any]) -> Kernel:
        # With dampening the first momentum is special, and the fused kernel has only one first step for all
        # parameters.
        fusable = group["momentum"] == 0 or group["dampening"] == 0
        return choose_kernel(group["params"], has_fused=fusable and self._can_fuse(group))

    def _can_fuse(self, group: dict[str, Any]) -> bool:
        # Torch's CPU kernel (2.13) leaves most 16-bit weights unchanged and their momentum undefined.
        return not any(param.is_cpu and param.itemsize == 2 for param in group["params"])

    def _init_group(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], buffers: list[Tensor | None]
    ) -> bool:
        """Collect the tensors of a step; for the fused kernel, momentum starts at zero instead of unset.

        Without dampening the update is the same. But torch's fused kernel fails if a parameter gets its first
        gradient later than the others, and leaves momentum uninitialised if the first step is skipped.
        """
        has_sparse_grad: bool = super()._init_group(group, params, grads, buffers)  # type: ignore[no-untyped-call]
        if group["fused"] and group["dampening"] == 0:
            for place, buffer in enumerate(buffers):
                if buffer is None:
                    buffers[place] = torch.zeros_like(params[place], memory_format=torch.preserve_format)
        return has_sparse_grad


@register("optimizer", "adam", aliases=ALIASES)
class Adam(KernelOptimizer, torch.optim.Adam):
    """Adam (Kingma and Ba, 2015); its weight decay is an L2 penalty. See AdamW for decoupled weight decay."""

    @_other_names
    @checked
    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 1e-3,
        betas: tuple[Fraction, Fraction] = (0.9, 0.999),
        eps: Decay = 1e-8,
        weight_decay: Decay = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        kernel: Kernel = "auto",
        groups: Groups = (),
        layer_decay: LayerDecay | None = None,
        decay_only_matrices: bool = False,
    ) -> None:
        self._kernel = kernel
        given = self._grouped(params, lr, groups, layer_decay, decay_only_matrices)
        super().__init__(given, lr, _pair(betas), eps, weight_decay, amsgrad, maximize=maximize)


@register("optimizer", "adamw", aliases=ALIASES)
class AdamW(KernelOptimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    @_other_names
    @checked
    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 3e-4,
        betas: tuple[Fraction, Fraction] = (0.9, 0.999),
        eps: Decay = 1e-8,
        weight_decay: Decay = 0.01,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        kernel: Kernel = "auto",
        groups: Groups = (),
        layer_decay: LayerDecay | None = None,
        decay_only_matrices: bool = False,
    ) -> None:
        self._kernel = kernel
        given = self._grouped(params, lr, groups, layer_decay, decay_only_matrices)
        super().__init__(given, lr, _pair(betas), eps, weight_decay, amsgrad, maximize=maximize)


@register("optimizer", "rmsprop", aliases=ALIASES)
class RMSprop(KernelOptimizer, torch.optim.RMSprop):
    """RMSprop (Hinton, 2012). Torch has no fused kernel for it: foreach, or a loop for large tensors on the CPU."""

    _has_fused = False

    @_other_names
    @checked
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
        kernel: Kernel = "auto",
        groups: Groups = (),
        layer_decay: LayerDecay | None = None,
        decay_only_matrices: bool = False,
    ) -> None:
        self._kernel = kernel
        given = self._grouped(params, lr, groups, layer_decay, decay_only_matrices)
        super().__init__(given, lr, alpha, eps, weight_decay, momentum, centered, maximize=maximize)


def _pair(betas: Sequence[float]) -> tuple[float, float]:
    first, second = betas
    return float(first), float(second)
