"""Schedule-free AdamW: an average of the weights replaces the schedule of the learning rate."""

from collections.abc import Iterable
from typing import Annotated, Any, Protocol, Unpack, runtime_checkable

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn

from etude.config.registry import register
from etude.core.errors import TrainingError
from etude.optim.device import DeviceOptimizer, add_scaled
from etude.optim.kernels import (
    ALIASES,
    Common,
    Decay,
    Fraction,
    ParamsT,
    Rate,
    arguments,
    arrange_grads,
    as_pair,
    have_one_layout,
)
from etude.optim.several import optimizers_in

Numbers = tuple[Any, Any, Any]
"""The rate of a step, the weight of z in the average, and the number of the step: tensors on a device."""


@runtime_checkable
class HasModes(Protocol):
    """An optimizer whose model has other weights in training than in evaluation; the trainer calls both methods."""

    def train(self) -> Any:
        """Give the model the weights at which gradients are computed."""

    def eval(self) -> Any:
        """Give the model the weights to evaluate, save and use."""


def with_modes(optimizer: torch.optim.Optimizer) -> list[HasModes]:
    """Return the optimizers with modes that one consists of."""
    return [one for one in optimizers_in(optimizer) if isinstance(one, HasModes)]


@register("optimizer", "schedule_free_adamw", aliases=ALIASES)
class ScheduleFreeAdamW(DeviceOptimizer):
    """Schedule-free AdamW (Defazio et al., 2024): use it without a schedule, at a rate of one to ten times AdamW's.

    Gradients are computed at y = (1 − β₁)·z + β₁·x, where z takes the steps and x is their average. A `Trainer`
    validates, saves and exports x. In a loop of your own call `eval()` before evaluation and `train()` after it.

    The numbers are those of the package `schedulefree`.
    """

    _has_fused = True

    @arguments
    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 2.5e-3,
        betas: tuple[Annotated[float, Gt(0), Lt(1)], Fraction] = (0.9, 0.999),
        eps: Decay = 1e-8,
        weight_decay: Decay = 0.0,
        warmup_steps: Annotated[int, Ge(0)] = 0,
        r: Decay = 0.0,
        weight_lr_power: Decay = 2.0,
        *,
        maximize: bool = False,
        **common: Unpack[Common],
    ) -> None:
        own = {"warmup_steps": warmup_steps, "r": r, "weight_lr_power": weight_lr_power, "train_mode": True}
        defaults = {"lr": lr, "betas": as_pair(betas), "eps": eps, "weight_decay": weight_decay, **own}
        super().__init__(self._grouped(params, lr, **common), {**defaults, "maximize": maximize})

    def numbers(self, place: int, group: dict[str, Any], device: torch.device) -> Numbers:
        """Count a step of the group; return its numbers."""
        if not group["train_mode"]:
            raise TrainingError("ScheduleFreeAdamW holds the averaged weights; call optimizer.train() before a step")
        states: dict[Any, dict[str, Tensor]] = self.state
        state = states[f"group_{place}"]
        # With a rate on the device everything is computed there, so that a step can be captured; otherwise numbers on
        # the host are faster than kernels for each of them.
        is_on_host = device.type == "cpu" or not isinstance(group["lr"], Tensor)
        if is_on_host and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise TrainingError("a captured step of ScheduleFreeAdamW needs a tensor on the device as its rate `lr`")
        device = torch.device("cpu") if is_on_host else device
        for name in ("step", "weight_sum", "lr_max"):
            if name not in state or state[name].device != device:
                state[name] = state.get(name, torch.zeros((), dtype=torch.float64)).to(device)
        rate, warm_up = group["lr"], group["warmup_steps"]
        step: Any
        total: Any
        top: Any
        if is_on_host:
            step, total, top = state["step"].item() + 1, state["weight_sum"].item(), state["lr_max"].item()
            rate = float(rate) * min(step / warm_up, 1.0) if warm_up else float(rate)
            top = max(top, rate)
        else:
            step, total, top = state["step"] + 1, state["weight_sum"], state["lr_max"]
            rate = rate.to(step) if isinstance(rate, Tensor) else torch.full_like(step, rate)
            rate = rate * (step / warm_up).clamp_(max=1) if warm_up else rate
            top = torch.maximum(top, rate)
        weight = top ** group["weight_lr_power"] * (step ** group["r"] if group["r"] else 1.0)
        total = total + weight
        for name, value in (("step", step), ("weight_sum", total), ("lr_max", top)):
            state[name].copy_(value) if isinstance(value, Tensor) else state[name].fill_(value)
        # a warm-up may begin with a rate of 0
        share = (weight / total).nan_to_num_(0.0) if isinstance(total, Tensor) else weight / total if total else 0.0
        return rate, share, step

    def _can_fuse(self, group: dict[str, Any]) -> bool:
        # Torch's CPU kernel of SGD is wrong for 16 bits.
        plain = all(type(param) in (Tensor, nn.Parameter) for param in group["params"])
        return plain and all(param.is_cuda or (param.is_cpu and param.itemsize > 2) for param in group["params"])

    def together(self, group: dict[str, Any], params: list[Tensor]) -> Iterable[list[Tensor]]:
        """Put gradients and states into the memory layout of the parameters first: fused kernels need them so."""
        if group["fused"]:
            arrange_grads(params, [param.grad for param in params if param.grad is not None])
            self.arrange_states(param for param in params if not _is_arranged(param, self.state.get(param, {})))
        return super().together(group, params)

    def update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], numbers: Numbers) -> None:
        """Update y, which the parameters hold, and z."""
        (first, second), (rate, share, step) = group["betas"], numbers
        moments = self.states("exp_avg_sq", params, torch.zeros_like)
        fast = self.states("z", params, lambda one: one.detach().clone(memory_format=torch.preserve_format))
        if group["fused"]:
            _update_fused(group, params, grads, moments, fast, numbers)
            return
        torch._foreach_mul_(moments, second)
        torch._foreach_addcmul_(moments, grads, grads, 1 - second)
        correction = 1 - second**step
        scale = correction.to(params[0].dtype) if isinstance(correction, Tensor) else correction
        sizes: Any = torch._foreach_div(moments, scale)
        torch._foreach_sqrt_(sizes)
        torch._foreach_add_(sizes, group["eps"])
        steps = list(torch._foreach_div(grads, sizes))
        if group["weight_decay"]:
            torch._foreach_add_(steps, params, alpha=group["weight_decay"])
        # y moves with z by its part (1 − β₁) of it, then towards the new z as x does: the same as moving x and z
        add_scaled(fast, steps, -rate)
        torch._foreach_add_(params, steps, alpha=(1 - first) * (1.0 if isinstance(rate, Tensor) else -rate))
        if isinstance(share, Tensor):
            add_scaled(params, list(torch._foreach_sub(fast, params)), share)
        else:
            torch._foreach_lerp_(params, fast, share)

    def eval(self) -> None:
        """Give the parameters the average x."""
        self._move(train=False)

    def train(self) -> None:
        """Give the parameters y, at which gradients are computed."""
        self._move(train=True)

    @torch.no_grad()
    def _move(self, *, train: bool) -> None:
        for group in self.param_groups:
            first = group["betas"][0]
            moved = [] if group["train_mode"] == train else [one for one in group["params"] if "z" in self.state[one]]
            if moved:
                fast = [self.state[param]["z"] for param in moved]
                torch._foreach_lerp_(moved, fast, 1 - first if train else 1 - 1 / first)
            group["train_mode"] = train


def _is_arranged(param: Tensor, state: dict[str, Any]) -> bool:
    return "z" not in state or have_one_layout(param, state["z"])


def _update_fused(
    group: dict[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    moments: list[Tensor],
    fast: list[Tensor],
    numbers: Numbers,
) -> None:
    """Update y and z with torch's fused kernels, in a third of the passes over memory.

    z takes a step of Adam with β₁ = 0, whose momentum is the gradient: the gradient's own memory holds it. Since
    y − (1 − β₁)·z is β₁·x, the new y is (1 − share) of that, and (1 − β₁ + share·β₁)·z of the new z.
    """
    (first, second), (rate, share, step), decay = group["betas"], numbers, group["weight_decay"]
    if isinstance(step, Tensor):  # the kernels read float32
        rate, count, keep = rate.float(), step.float(), (1 - share).to(params[0].dtype)
        part = (share * first + (1 - first)).float()
    else:
        count = torch.full((), step, dtype=torch.float32, device=params[0].device)
        keep, part = 1 - share, share * first + (1 - first)
    torch._foreach_add_(params, fast, alpha=first - 1)
    if decay:
        _add_scaled(fast, params, -rate * decay, own=1 - first)  # of y, which is this and (1 − β₁)·z
    torch._foreach_mul_(params, keep)
    torch._fused_adam_(
        fast,
        grads,
        grads,
        moments,
        [],
        [count] * len(params),
        lr=rate,
        beta1=0.0,
        beta2=second,
        weight_decay=0.0,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
    _add_scaled(params, fast, part)


def _add_scaled(tensors: list[Tensor], values: list[Tensor], factor: Any, own: float = 0.0) -> None:
    """Add `factor · (values + own · tensors)` in one pass, also if only the device knows the factor: a step of SGD."""
    torch._fused_sgd_(
        tensors,
        values,
        [],
        weight_decay=own,
        momentum=0.0,
        lr=-factor,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )
