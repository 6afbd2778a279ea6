"""Optimizers whose step runs on the device alone, so that it can be captured: their base class, Lion and Adafactor."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any, ClassVar, Unpack

import torch
from annotated_types import Ge, Lt
from torch import Tensor
from torch.optim import Optimizer
from torch.optim._adafactor import adafactor

from etude.config.registry import register
from etude.core.errors import ConfigError
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
)

PIECE_BYTES = 2**27
"""Bytes of parameters that one call of `update` gets, unless one parameter alone has more.

A call makes temporaries, and copies if it may have to be undone, of a few times this size.
"""
_AS_IT_IS = nullcontext()


class DeviceOptimizer(KernelOptimizer):
    """Base class: derive from it and write `update`.

    The learning rate of a group is a float or a tensor on the device. `update` must not read from the device, and
    keeps its state, counters too, in tensors there: then a step is captured as a CUDA graph. As with torch's fused
    optimizers, an attribute `found_inf` that is a tensor with 1.0 makes `step` change nothing, without waiting for the
    device. It copies one piece of the parameters at a time.
    """

    whole_states: ClassVar[frozenset[str]] = frozenset()
    """Names of states that are whole, and the same, on each of the processes that divide a parameter."""
    _has_fused = False

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        Optimizer.__init__(self, params, {"foreach": None, **defaults})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; raise ConfigError for complex numbers."""
        super().add_param_group(param_group)
        self._step_supports_amp_scaling = False  # whatever kernels `update` uses, it does not divide or skip
        if any(param.is_complex() for param in self.param_groups[-1]["params"]):
            raise ConfigError(f"{type(self).__name__} has no update for complex parameters; use adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        skipped: Tensor | None = vars(self).get("found_inf")
        for place, group in enumerate(self.param_groups):
            params = [param for param in group["params"] if param.grad is not None]
            if any(param.grad.is_sparse for param in params):
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
            if not params:
                continue
            shared: dict[Any, dict[str, Any]] = self.state
            with _AS_IT_IS if skipped is None else undone_if(skipped, shared.get(f"group_{place}", {}).values()):
                numbers = self.numbers(place, group, params[0].device)
            for some in self.together(group, params):
                grads = [param.grad for param in some if param.grad is not None]
                grads = list(torch._foreach_neg(grads)) if group.get("maximize") else grads
                with _AS_IT_IS if skipped is None else undone_if(skipped, self._changed(some)):
                    self.update(group, some, grads, numbers)
        return loss

    def _changed(self, params: list[Tensor]) -> list[Any]:
        """Return what an update of some parameters changes."""
        return [*params, *(value for param in params for value in self.state[param].values())]

    def numbers(self, place: int, group: dict[str, Any], device: torch.device) -> Any:  # noqa: ARG002
        """Return what the updates of a group share, such as a bias correction; state: `state["group_<place>"]`."""
        return None

    def together(self, group: dict[str, Any], params: list[Tensor]) -> Iterable[list[Tensor]]:
        """Return the lists of parameters that one call updates: of one device and one dtype, and of bounded size."""
        if not (group["foreach"] or group.get("fused")):
            return [[param] for param in params]
        found: dict[Any, list[Tensor]] = {}
        for param in params:
            found.setdefault((param.device, param.dtype), []).append(param)
        return [piece for same in found.values() for piece in in_pieces(same)]

    @abstractmethod
    def update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], numbers: Any) -> None:
        """Update these parameters in place."""

    def states(self, key: str, params: list[Tensor], make: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return one state tensor of every parameter; `make` makes the first one."""
        found = []
        for param in params:
            state = self.state[param]
            if key not in state:
                state[key] = make(param)
            found.append(state[key])
        return found


def in_pieces(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Divide a list of parameters into lists of at most `PIECE_BYTES`; a larger parameter is alone."""
    piece: list[Tensor] = []
    size = 0
    for param in params:
        if piece and size + param.nbytes > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(param)
        size += param.nbytes
    if piece:
        yield piece


@contextmanager
def undone_if(skipped: Tensor, values: Iterable[Any]) -> Iterator[None]:
    """Undo what the context does to the tensors among some values if `skipped` is not 0, decided on the device.

    >>> weight = torch.ones(2)
    >>> with undone_if(torch.tensor(1.0), [weight]): _ = weight.fill_(float("nan"))
    >>> weight.tolist()
    [1.0, 1.0]
    """
    tensors = [value.detach() for value in values if isinstance(value, Tensor)]
    before = [tensor.clone() for tensor in tensors]
    yield
    is_skipped = skipped.bool()
    for tensor, old in zip(tensors, before, strict=True):
        torch.where(is_skipped, old, tensor, out=tensor)


def add_scaled(tensors: list[Tensor], values: list[Tensor], factor: Tensor | float) -> None:
    """Add `factor · values` in place; a factor on the device is multiplied into the values first."""
    if isinstance(factor, Tensor):
        torch._foreach_mul_(values, factor.to(values[0].dtype))
        torch._foreach_add_(tensors, values)
    else:
        torch._foreach_add_(tensors, values, alpha=factor)


def decay_weights(params: list[Tensor], rate: Tensor | float, weight_decay: float) -> None:
    """Shrink weights by their decoupled weight decay."""
    if weight_decay:
        factor = 1 - rate * weight_decay
        torch._foreach_mul_(params, factor.to(params[0].dtype) if isinstance(factor, Tensor) else factor)


@register("optimizer", "lion", aliases=ALIASES)
class Lion(DeviceOptimizer):
    """Steps by the sign of a momentum (Chen et al., 2023): one state tensor per weight, in the weight's dtype.

    Its rate is three to ten times smaller than AdamW's, and its weight decay as much larger.

    >>> weight = torch.nn.Parameter(torch.ones(2)); weight.grad = torch.tensor([3.0, -0.1])
    >>> Lion([weight], lr=0.25, weight_decay=0.0).step(); weight.tolist()
    [0.75, 1.25]
    """

    @arguments
    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 1e-4,
        betas: tuple[Fraction, Fraction] = (0.9, 0.99),
        weight_decay: Decay = 0.0,
        *,
        maximize: bool = False,
        **common: Unpack[Common],
    ) -> None:
        defaults = {"lr": lr, "betas": as_pair(betas), "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(self._grouped(params, lr, **common), defaults)

    def update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], numbers: Any) -> None:  # noqa: ARG002
        """Move by the rate in the direction of the sign."""
        (first, second), rate = group["betas"], group["lr"]
        momenta = self.states("exp_avg", params, torch.zeros_like)
        steps = torch._foreach_mul(momenta, first)
        torch._foreach_add_(steps, grads, alpha=1 - first)
        torch._foreach_sign_(steps)
        decay_weights(params, rate, group["weight_decay"])
        add_scaled(params, list(steps), -rate)
        torch._foreach_lerp_(momenta, grads, 1 - second)


@register("optimizer", "adafactor", aliases=ALIASES)
class Adafactor(DeviceOptimizer):
    """Adafactor (Shazeer and Stern, 2018): of the second moments of a matrix it keeps those of rows and columns.

    The numbers are those of `torch.optim.Adafactor`, which waits for the device several times per parameter; this one
    does not. The step is relative to the size of a weight: `lr` limits it, and falls as 1/√step.
    """

    @arguments
    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 0.01,
        beta2_decay: Annotated[float, Lt(0)] = -0.8,
        eps: tuple[Decay | None, Decay] = (None, 1e-3),
        d: Annotated[float, Ge(1)] = 1.0,
        weight_decay: Decay = 0.0,
        *,
        maximize: bool = False,
        **common: Unpack[Common],
    ) -> None:
        own = {"beta2_decay": beta2_decay, "eps": tuple(eps), "d": d}
        defaults = {"lr": lr, **own, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(self._grouped(params, lr, **common), defaults)

    def _auto_kernel(self, group: dict[str, Any]) -> Kernel:
        is_on_cpu = any(param.is_cpu for param in group["params"])
        return "loop" if is_on_cpu else super()._auto_kernel(group)

    def update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], numbers: Any) -> None:  # noqa: ARG002
        """Update these parameters; what is a number for each of them is computed for all at once."""
        if 0 in [param.numel() for param in params]:  # means divide by it
            grads = [grad for grad in grads if grad.numel()]
            params = [param for param in params if param.numel()]
            if not params:
                return
        if params[0].is_cpu and not group["foreach"]:
            self._torchs_update(group, params, grads)
            return
        first, second = group["eps"]
        first = torch.finfo(params[0].dtype).eps if first is None else first
        steps = self._steps(params)
        torch._foreach_add_(steps, 1)
        counts = torch.stack(steps).to(_exact(params[0].dtype))
        sizes = _rms(params).clamp_(min=second) * counts.rsqrt().clamp_(max=group["lr"])
        decay_weights(params, group["lr"], group["weight_decay"])
        weights = _each(counts.pow(group["beta2_decay"]), params[0].dtype)
        changes = self._moments(params, grads, weights, first)
        torch._foreach_rsqrt_(changes)
        torch._foreach_mul_(changes, grads)
        factors = _each(sizes.div_(_rms(changes, group["d"]).clamp_(min=1.0)), params[0].dtype)
        for param, change, factor in zip(params, changes, factors, strict=True):
            if isinstance(factor, Tensor):
                param.addcmul_(change, factor, value=-1)
            else:
                param.sub_(change, alpha=factor)

    def together(self, group: dict[str, Any], params: list[Tensor]) -> Iterable[list[Tensor]]:
        """Let torch's function for the CPU go through the parameters itself."""
        if not params[0].is_cpu or group["foreach"]:
            return super().together(group, params)
        are_alike = len({(param.device, param.dtype) for param in params}) == 1
        return in_pieces(params) if are_alike else [[param] for param in params]

    def _torchs_update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """Update one parameter after the other by torch's function: reading numbers of the CPU costs nothing."""
        for param in params:
            if "step" not in self.state[param]:
                self._steps([param])
                self._factors([param]) if param.dim() >= 2 else self.states("variance", [param], torch.zeros_like)
        states = [self.state[param] for param in params]
        adafactor(
            params,
            grads,
            [state.get("row_var") for state in states],
            [state.get("col_var") for state in states],
            [state.get("variance") for state in states],
            [state["step"] for state in states],
            foreach=False,
            d=group["d"],
            lr=float(group["lr"]),
            beta2_decay=group["beta2_decay"],
            weight_decay=group["weight_decay"],
            eps1=group["eps"][0],
            eps2=group["eps"][1],
            maximize=False,  # the gradients are negative already
        )

    def _steps(self, params: list[Tensor]) -> list[Tensor]:
        return self.states("step", params, lambda one: torch.zeros((), dtype=torch.float32, device=one.device))

    def _factors(self, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the moments of rows and columns."""
        rows = self.states("row_var", params, lambda one: torch.zeros_like(one[..., :1]))
        return rows, self.states("col_var", params, lambda one: torch.zeros_like(one[..., :1, :]))

    def _moments(self, params: list[Tensor], grads: list[Tensor], weights: Any, eps: float) -> list[Tensor]:
        """Return estimates of the second moment of every element."""
        found: dict[int, Tensor] = {}
        for is_matrix in (True, False):
            places = [place for place, param in enumerate(params) if (param.dim() >= 2) == is_matrix]
            if places:
                some, own, shares = ([one[place] for place in places] for one in (params, grads, weights))
                made = self._factored(some, own, shares, eps) if is_matrix else self._whole(some, own, shares, eps)
                found.update(zip(places, made, strict=True))
        return [found[place] for place in range(len(params))]

    def _whole(self, params: list[Tensor], grads: list[Tensor], weights: list[Any], eps: float) -> list[Tensor]:
        """Return the moments of every element."""
        variances = self.states("variance", params, torch.zeros_like)
        torch._foreach_lerp_(variances, torch._foreach_mul(grads, grads), weights)
        return list(torch._foreach_clamp_min(variances, eps * eps))

    def _factored(self, params: list[Tensor], grads: list[Tensor], weights: list[Any], eps: float) -> list[Tensor]:
        """Return the products of the moments of rows and columns."""
        rows, columns = self._factors(params)
        for means, axis in ((rows, -1), (columns, -2)):
            squares = [torch.linalg.vector_norm(grad, dim=axis, keepdim=True) for grad in grads]
            torch._foreach_mul_(squares, squares)
            torch._foreach_div_(squares, [grad.size(axis) for grad in grads])
            torch._foreach_lerp_(means, squares, weights)
        found = [row @ column for row, column in zip(rows, columns, strict=True)]
        means_of_rows = [row.mean(-2, keepdim=True) for row in rows]
        torch._foreach_clamp_min_(means_of_rows, eps)
        torch._foreach_div_(found, means_of_rows)
        torch._foreach_clamp_min_(found, eps * eps)
        return found


def _each(values: Tensor, dtype: torch.dtype) -> Any:
    """Return the values of a vector one by one; on the CPU as numbers, which is faster."""
    return values.tolist() if values.is_cpu else list(values.to(dtype).unbind())


def _rms(tensors: list[Tensor], divisor: float = 1.0) -> Tensor:
    """Return the root of the mean square of every tensor, divided by a number, as one vector."""
    norms = list(torch._foreach_norm(tensors))
    torch._foreach_div_(norms, [divisor * tensor.numel() ** 0.5 for tensor in tensors])
    return torch.stack(norms).to(_exact(tensors[0].dtype))


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers about tensors of a dtype are computed: a cast is one more kernel."""
    return dtype if dtype.itemsize >= 4 else torch.float32
