"""Lookahead and SAM: they wrap any optimizer, also several, and each other."""

import math
import operator
from collections.abc import Callable
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor
from torch.optim import Optimizer

from etude.config.registry import Section, register
from etude.core.arguments import as_whole, checked
from etude.core.errors import CheckpointError, ConfigError
from etude.optim.eager import without_grad
from etude.optim.schedule_free import with_modes
from etude.optim.several import Optimizers, Perturbed, everything_in, optimizers_in

Inner = Annotated[Optimizer, Section("optimizer", frozenset({"params"}))]

SLOW, COUNTER = "slow", "lookahead"
"""Keys in the state of the wrapped optimizer: the slow weights of a parameter, and the state of the wrapper."""
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
SMALLEST_NORM = 1e-12
"""Added to a norm before dividing by it, as in published implementations."""


def _check_inner(kind: type[Optimizers], optimizer: Any) -> Optimizer:
    """Return the optimizer to wrap; raise ConfigError if it is none, or is wrapped this way already."""
    name = kind.__name__
    if not isinstance(optimizer, Optimizer):
        found = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        raise ConfigError(f"{name} wraps an optimizer, found {found}; write {name}(AdamW(model.parameters()))")
    if any(isinstance(one, kind) for one in everything_in(optimizer)):
        raise ConfigError(f"{name} is inside {name}; remove one of them")
    return optimizer


@register("optimizer", "lookahead")
class Lookahead(Optimizers):
    """Every `k` updates, moves slow weights towards the trained ones by `alpha`, and continues from there.

    Zhang et al., 2019. Only updates that were applied are counted, not skipped ones. Between two of these moves,
    validation and checkpoints use the trained (fast) weights. The wrapped optimizer keeps its momentum.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = Lookahead(torch.optim.SGD([weight], lr=0.1), k=2, alpha=0.5)
    >>> for _ in range(2):
    ...     weight.grad = torch.ones(1)
    ...     optimizer.step()
    ...     print(round(weight.item(), 3))
    0.9
    0.9
    """

    @checked
    def __init__(
        self, optimizer: Inner, k: Annotated[int, Ge(1)] = 5, alpha: Annotated[float, Gt(0), Le(1)] = 0.5
    ) -> None:
        self.optimizer = _check_inner(Lookahead, optimizer)
        if modes := with_modes(optimizer):
            raise ConfigError(
                f"Lookahead sets the weights, which {type(modes[0]).__name__} computes from averages of its own; use "
                "one of them"
            )
        self.k, self.alpha = as_whole("Lookahead: k", k, least=1), alpha
        super().__init__([optimizer])
        self._leaves = optimizers_in(self)
        self._counted: tuple[int, Any] = 0, None
        """The address of the count on the CPU, and its memory: adding to a tensor takes ten times as long."""
        self._states: list[Any] = []
        """The states in which the weights were found: loading makes others."""
        self._slow: list[Tensor] = []
        self._fast: list[Tensor] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_counted": (0, None)}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let the wrapped optimizer step; after every `k` updates move the slow weights."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        is_complete = self._is_complete()
        # Optimizers create the state of a parameter if it is empty, so slow weights are added afterwards.
        new = [] if is_complete else self._first_weights()
        self._step_each()
        for one, param, slow in new:
            one.state[param][SLOW] = slow
        if not is_complete:
            self._find_weights()
        state: dict[Any, Any] = self._leaves[0].state
        if COUNTER not in state:
            if not new:  # no parameter has had a gradient yet
                return loss
            state[COUNTER] = {"step": torch.zeros((), dtype=torch.int64, device=self._device)}
        self._count(state[COUNTER]["step"])
        return loss

    def _count(self, count: Tensor) -> None:
        """Count an update that was applied, and move the weights if it is the k-th."""
        skipped = vars(self).get("found_inf")  # set if the kernel decides on the device whether to skip
        # After a skipped update the count may be a multiple again: slow and trained weights are then equal already.
        # On the CPU reading does not wait.
        if not count.is_cpu:
            count.add_(1 if skipped is None else skipped == 0)
            with without_grad():
                _move_if(count.remainder(self.k) == 0, *self._trained(), self.alpha)
        elif (skipped is None or not skipped.item()) and self._next(count) % self.k == 0:
            slow, fast = self._trained()
            if not slow:  # all are frozen
                return
            with without_grad():
                torch._foreach_lerp_(slow, fast, self.alpha)
                torch._foreach_copy_(fast, slow)

    def _next(self, count: Tensor) -> int:
        """Add 1 to a count on the CPU and return it."""
        if self._counted[0] != (address := count.data_ptr()):  # a tensor may get other memory
            self._counted = address, count.numpy().reshape(1).data
        memory = self._counted[1]
        memory[0] += 1
        number: int = memory[0]
        return number

    def _is_complete(self) -> bool:
        """Whether the slow weights of all parameters are known, and still those of the optimizers."""
        if not self._states or COUNTER not in self._states[0]:  # somebody may clear the state
            return False
        number = len(self._slow)
        for one, state in zip(self._leaves, self._states, strict=True):
            if one.state is not state:
                return False
            for group in one.param_groups:
                number -= len(group["params"])
        return number == 0

    def _first_weights(self) -> list[tuple[Optimizer, Tensor, Tensor]]:
        """Return copies of the parameters that have their first gradient, with their optimizers."""
        return [
            (one, param, param.detach().clone())
            for one in self._leaves
            for group in one.param_groups
            for param in group["params"]
            if param.grad is not None and SLOW not in one.state.get(param, {})
        ]

    def _find_weights(self) -> None:
        """Find the slow weights, and the trained ones."""
        self._states = [one.state for one in self._leaves]
        found = [(state[SLOW], param) for one in self._states for param, state in one.items() if SLOW in state]
        self._slow, self._fast = [slow for slow, _ in found], [fast for _, fast in found]

    def _trained(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the slow weights, and the others, of parameters that have not been frozen since their first update."""
        if all(map(_REQUIRES_GRAD, self._fast)):
            return self._slow, self._fast
        kept = [pair for pair in zip(self._slow, self._fast, strict=True) if pair[1].requires_grad]
        return [slow for slow, _ in kept], [fast for _, fast in kept]

    @property
    def _device(self) -> torch.device:
        first: Tensor = next(param for group in self.param_groups for param in group["params"])
        return first.device

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; raise CheckpointError for a counter or slow weights of another shape."""
        super().load_state_dict(state_dict)
        state: dict[Any, Any] = self._leaves[0].state
        self._find_weights()
        pairs = [*zip(self._slow, self._fast, strict=True)]
        self._states = []  # whoever loads may still change the states
        if COUNTER in state:  # torch moves only the state of parameters to their device
            count = state[COUNTER]["step"] = state[COUNTER]["step"].to(self._device, torch.int64)
            pairs.append((count, torch.zeros(())))
        for found, wanted in pairs:
            if found.shape != wanted.shape:
                raise CheckpointError(
                    f"the state of Lookahead has the shape {tuple(found.shape)}, expected {tuple(wanted.shape)}"
                )


def _move_if(is_due: Tensor, slow: list[Tensor], fast: list[Tensor], alpha: float) -> None:
    """Do what is done on the CPU if it is due, decided on the device."""
    moves = torch._foreach_lerp(slow, fast, alpha) if slow else []
    for old, new, moved in zip(slow, fast, moves, strict=True):
        torch.where(is_due, moved, old, out=old)
        torch.where(is_due, moved, new, out=new)


@register("optimizer", "sam")
class SAM(Perturbed):
    """Sharpness-aware minimisation: updates with the gradient at the worst weights within a distance of `rho`.

    Foret et al., 2021: these are w + rho·g/|g|, with the gradient g of the whole step over all micro-batches and
    processes. With `adaptive` (ASAM; Kwon et al., 2021) they are w + rho·w²·g/|w·g|, which does not depend on the
    scale of layers; rho is then usually ten times larger or more. A step runs every micro-batch twice, with the same
    dropout masks. The loss that is reported, metrics and running statistics are those of the first pass.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = SAM(torch.optim.SGD([weight], lr=0.1), rho=0.5)
    >>> def backward(): optimizer.zero_grad(); weight.square().sum().backward()
    >>> backward(); _ = optimizer.perturb(); weight.item()
    1.5
    >>> backward(); optimizer.restore(); optimizer.step(); round(weight.item(), 3)
    0.7
    """

    @checked
    def __init__(self, optimizer: Inner, rho: Annotated[float, Gt(0)] = 0.05, adaptive: bool = False) -> None:
        self.optimizer = _check_inner(SAM, optimizer)
        self.rho, self.adaptive = rho, adaptive
        super().__init__(optimizer)

    def move(self, params: list[Tensor], grads: list[Tensor]) -> Tensor:
        """Add rho·g/|g| to the parameters unless a gradient is not finite; return the norm. The gradients change."""
        if self.adaptive:
            torch._foreach_mul_(grads, params)
        norm = self.norm(params, grads)
        if self.adaptive:  # w·conj(w) is w² of complex weights
            torch._foreach_mul_(grads, [param.conj() for param in params])
        if norm.is_cpu:  # reading a value does not wait
            length = norm.item()
            if not math.isfinite(length):
                return norm
            factor: Any = self.rho / (length + SMALLEST_NORM)
        else:
            factor = self.rho / (norm + SMALLEST_NORM)
            _zero_unless(norm.isfinite(), [factor, *grads])
        torch._foreach_mul_(grads, factor)
        torch._foreach_add_(params, grads)
        return norm


def _zero_unless(is_finite: Tensor, tensors: list[Tensor]) -> None:
    """Set all tensors to zero unless the gradients are finite, decided on the device: 0·inf would be nan."""
    for one in tensors:
        one.masked_fill_(~is_finite, 0.0)
