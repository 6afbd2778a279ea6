"""What the optimizers of etude share: the choice of a kernel, parameter groups by name, arguments with other names."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, ParamSpec, TypedDict

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import ParamsT as TorchParams

from etude.core.arguments import checked
from etude.core.errors import ConfigError
from etude.core.spelling import suggest
from etude.optim.eager import without_compiler
from etude.optim.groups import Groups, LayerDecay, check_settings, group_parameters

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
_CHOSEN = ("_kernel", "_scales", "_step_supports_amp_scaling")
"""Attributes of an optimizer that copies of it need, beside torch's."""
ALIASES = {"learning_rate": "lr", "epsilon": "eps"}
"""Aliases of arguments, in configs and in Python; in Python `beta1` and `beta2` also set `betas`."""


class Common(TypedDict, total=False):
    """Arguments of every optimizer of etude, beside its own; those of all its parameter groups together."""

    kernel: Kernel
    groups: Groups
    layer_decay: float | None
    decay_only_matrices: bool


def get_lr(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate of the first parameter group (synchronises if it is a tensor on a device)."""
    return float(optimizer.param_groups[0]["lr"])


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group; a schedule then uses it as the base rate.

    A tensor is filled in place, because captured graphs and fused kernels keep reading the same memory.
    """
    if not 0 <= float(lr) < math.inf:
        raise ConfigError(f"lr is {lr}; it must be finite and at least 0")
    for group in optimizer.param_groups:
        group["initial_lr"] = float(lr)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = float(lr)


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
    return param.device.type in FUSED_DEVICES and param.dtype in FUSED_DTYPES and _is_dense(param)


def _is_dense(param: Tensor) -> bool:
    """Whether elements lie side by side: fused CPU kernels update a slice of a larger tensor at the wrong places."""
    return not _is_plain(param) or torch.ops.aten.is_non_overlapping_and_dense.default(param)


def _is_plain(param: Tensor) -> bool:
    """Whether kernels see the tensor itself: also for subclasses without behaviour, such as the shards of a model."""
    return are_plain([type(param)]) and not is_lazy(param)


def are_plain(kinds: Iterable[type]) -> bool:
    """Whether kernels see tensors of these classes as they are."""
    return all(
        kind in (Tensor, nn.Parameter)
        or (
            issubclass(kind, nn.Parameter)
            and kind.__torch_dispatch__ is nn.Parameter.__torch_dispatch__
            and kind.__torch_function__ is nn.Parameter.__torch_function__
        )
        for kind in kinds
    )


def _uniform(params: Iterable[Tensor]) -> bool:
    """Return whether one kernel call accepts them all: plain tensors, or DTensors of one mesh."""
    unusual = [param for param in params if not _is_plain(param)]
    if not unusual:
        return True
    from torch.distributed.tensor import DTensor

    meshes = {param.device_mesh if isinstance(param, DTensor) else None for param in params}
    return len(meshes) == 1 and None not in meshes


def have_one_layout(param: Tensor, grad: Tensor) -> bool:
    """Whether the elements of two tensors lie in memory in the same order."""
    return (param.is_contiguous() and grad.is_contiguous()) or param.stride() == grad.stride()


def _are_alike(param: Tensor, other: Tensor) -> bool:
    """Whether a tensor has an element for every one of a parameter, in the same dtype."""
    return _is_plain(param) and other.shape == param.shape and other.dtype is param.dtype


def arrange_grads(params: Sequence[Tensor], grads: list[Tensor]) -> None:
    """Put gradients, in the list too, into the memory layout of their parameters, as fused kernels need them."""
    for place, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if not grad.is_sparse and not have_one_layout(param, grad) and _are_alike(param, grad):
            param.grad = grads[place] = torch.empty_like(param).copy_(grad)


class KernelOptimizer(torch.optim.Optimizer):
    """Mixin: chooses a kernel for every parameter group, and reads and sets the learning rate."""

    _has_fused = True
    _kernel: Kernel = "auto"

    def __getstate__(self) -> dict[str, Any]:
        own = vars(self)
        return {**super().__getstate__(), **{name: own[name] for name in _CHOSEN if name in own}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group (torch's constructor does it too) and choose its kernel."""
        with without_compiler():
            super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group.get("fused") is None and group.get("foreach") is None:
            self._set_kernel(group)

    def let_kernels_scale(self) -> None:
        """Prefer kernels that divide by a scale and skip, as the update of a training step needs, to faster ones."""

    def _set_kernel(self, group: dict[str, Any]) -> None:
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
        self,
        params: Any,
        lr: float,
        *,
        kernel: Kernel = "auto",
        groups: Groups = (),
        layer_decay: LayerDecay | None = None,
        decay_only_matrices: bool = False,
    ) -> Any:
        """Return what torch's constructor takes: the parameters in groups, if any were asked for.

        Its keyword arguments are those of every optimizer; `arguments` adds them to the signatures.
        """
        self._kernel = kernel
        if groups or layer_decay is not None or decay_only_matrices:
            names = inspect.signature(type(self)).parameters
            return group_parameters(
                params,
                groups,
                layer_decay=layer_decay,
                decay_only_matrices=decay_only_matrices,
                lr=lr,
                settings=[name for name in names if name != "params" and name not in _SHARED],
                aliases=ALIASES,
                check=functools.partial(check_settings, type(self)),
            )
        return [one for one in params.parameters() if one.requires_grad] if isinstance(params, nn.Module) else params

    def _auto_kernel(self, group: dict[str, Any]) -> Kernel:
        return choose_kernel(group["params"], has_fused=self._can_fuse(group))

    def _can_fuse(self, group: dict[str, Any]) -> bool:  # noqa: ARG002
        return self._has_fused

    def _init_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], *states: Any) -> Any:
        """Collect the tensors of a step. Fused kernels need gradients in the memory layout of their parameters.

        Autograd gives them so. Of another layout, which may be set by hand, they take the elements in a wrong order.
        """
        found = super()._init_group(group, params, grads, *states)  # type: ignore[misc]
        if group.get("fused"):
            arrange_grads(params, grads)
        return found

    def arrange_states(self, params: Iterable[Tensor]) -> None:
        """Put the states of parameters into their memory layout, in which fused kernels take the elements."""
        for param in params:
            state = self.state.get(param, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and not have_one_layout(param, value) and _are_alike(param, value):
                    state[name] = torch.empty_like(param).copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state and the hyperparameters; the kernel stays the one chosen for the current parameters."""
        saved = state_dict["param_groups"]
        kernels = [{key: group[key] for key in ("fused", "foreach") if key in group} for group in self.param_groups]
        if len(saved) == len(kernels):  # otherwise torch raises its own error
            saved = [{**group, **kernel} for group, kernel in zip(saved, kernels, strict=True)]
        super().load_state_dict({**state_dict, "param_groups": saved})
        self.arrange_states(param for group in self.param_groups for param in group["params"])

    def get_lr(self) -> float:
        """Return the learning rate of the first parameter group."""
        return get_lr(self)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        set_lr(self, lr)


_KEYWORDS = inspect.signature(KernelOptimizer._grouped).parameters.values()
_SHARED = {one.name: one for one in _KEYWORDS if one.kind is one.KEYWORD_ONLY}


def arguments(init: Callable[P, None]) -> Callable[P, None]:
    """Complete the constructor of an optimizer: its signature, other names of arguments, and the check of ranges.

    The signature has the arguments of every optimizer in place of `**common`, so that it is the schema of the section.
    """
    function: Any = init
    own = inspect.signature(init).parameters
    kept = [one for one in own.values() if one.kind is not one.VAR_KEYWORD]
    function.__signature__ = inspect.Signature([*kept, *_SHARED.values()], return_annotation=None)
    hints = {name: one.annotation for name, one in function.__signature__.parameters.items() if name != "self"}
    function.__annotations__ = {**hints, "return": None}
    return _other_names(checked(init))


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
        if unknown := [name for name in given if name not in parameters]:
            words = suggest(unknown[0], list(parameters)[1:])
            raise TypeError(f"{type(args[0]).__name__} has no argument '{unknown[0]}'{words}")
        init(*args, **given)

    return renamed


def as_pair(betas: Sequence[float]) -> tuple[float, float]:
    """Return two numbers as torch wants them."""
    first, second = betas
    return float(first), float(second)
