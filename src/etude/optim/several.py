"""Several optimizers as one: each updates its own parameters, and all step, save and resume together."""

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from etude.config.registry import Section, register
from etude.core.errors import ConfigError, TrainingError
from etude.core.spelling import listed, names_matching
from etude.optim.clipping import global_norm
from etude.optim.eager import take_step
from etude.optim.groups import NamedParams
from etude.optim.kernels import get_lr, set_lr

if TYPE_CHECKING:
    from etude.distributed.sharding import Shards

_OF_KERNELS = ("grad_scale", "found_inf")
"""Attributes through which fused kernels are given the loss scale and whether to skip."""


class Optimizers(Optimizer):
    """An optimizer made of several that share no parameter; the groups are those of all, in order.

    >>> one, two = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    >>> both = Optimizers([torch.optim.SGD([one], lr=0.5), torch.optim.Adam([two], lr=0.1)])
    >>> one.grad, two.grad = torch.ones(1), torch.ones(1)
    >>> both.step(); [round(param.item(), 3) for param in (one, two)]
    [0.5, 0.9]
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        if not self.optimizers:
            raise ConfigError("a list of optimizers must not be empty")
        params = [param for one in self.optimizers for group in one.param_groups for param in group["params"]]
        if len(set(params)) < len(params):
            raise ConfigError("a parameter is in two optimizers; give each its own")
        if len(self.optimizers) > 1 and (inner := perturbed_in(self)) is not None:
            name = type(inner).__name__
            raise ConfigError(
                f"{name} moves the weights of the whole model; put the several optimizers inside {name}"
            )
        self._is_made = False
        super().__init__([{"params": []}], {})
        self._is_made = True
        first, *others = [one.defaults for one in self.optimizers]
        # Schedulers of torch look here for a momentum.
        self.defaults = {key: value for key, value in first.items() if all(key in one for one in others)}
        supports = [getattr(one, "_step_supports_amp_scaling", False) for one in self.optimizers]
        self._step_supports_amp_scaling = all(supports)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        if len(self.optimizers) == 1:
            groups: list[dict[str, Any]] = self.optimizers[0].param_groups
            return groups
        return [group for one in self.optimizers for group in one.param_groups]

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        """Ignore what torch's constructor sets."""

    @property  # type: ignore[override]
    def state(self) -> "_States":
        """The state of every parameter."""
        return _States(*[one.state for one in self.optimizers])

    @state.setter
    def state(self, value: Any) -> None:
        """Ignore what torch's constructor sets."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles hold: torch's would lack the optimizers. As in torch's, hooks are left out."""
        return {name: value for name, value in vars(self).items() if name != "step" and not name.endswith("_hooks")}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the last optimizer."""
        if self._is_made:
            self.optimizers[-1].add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let every optimizer step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_each()
        return loss

    def _step_each(self) -> None:
        own = vars(self)
        given = {name: own[name] for name in _OF_KERNELS if name in own}
        for one in self.optimizers:
            its = vars(one)
            its.update(given)
            try:
                take_step(one)
            finally:
                for name in given:
                    del its[name]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def get_lr(self) -> float:
        """Return the learning rate of the first parameter group."""
        return get_lr(self)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group of all optimizers."""
        set_lr(self, lr)

    def announcement(self) -> str | None:
        """Return a line for the user about the optimizers it has chosen, or None."""
        found = [one.announcement() for one in self.optimizers if isinstance(one, Optimizers)]
        return "; ".join(filter(None, found)) or None

    def state_dict(self) -> dict[str, Any]:
        """Return the states as that of one optimizer; what else an optimizer saves is under `optimizers`."""
        groups: list[dict[str, Any]] = []
        state: dict[Any, Any] = {}
        others: list[dict[str, Any]] = []
        start = 0
        for place, one in enumerate(self.optimizers):
            saved = one.state_dict()
            own = [
                {**group, "params": [start + index for index in group["params"]]} for group in saved["param_groups"]
            ]
            groups += own
            state |= {
                start + key if isinstance(key, int) else f"{place}.{key}": value
                for key, value in saved["state"].items()
            }
            others.append({key: value for key, value in saved.items() if key not in ("state", "param_groups")})
            start += sum(len(group["params"]) for group in own)
        return {"state": state, "param_groups": groups, **({"optimizers": others} if any(others) else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, each optimizer its own part."""
        groups, state = state_dict["param_groups"], state_dict["state"]
        others = state_dict.get("optimizers", [{}] * len(self.optimizers))
        if len(groups) != len(self.param_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        start = 0
        for place, one in enumerate(self.optimizers):
            own = groups[start : start + len(one.param_groups)]
            start += len(own)
            wanted = {index for group in own for index in group["params"]}
            mine = {key: value for key, value in state.items() if key in wanted}
            prefix = f"{place}."
            named = {key: value for key, value in state.items() if isinstance(key, str) and key.startswith(prefix)}
            mine |= {key.removeprefix(prefix): value for key, value in named.items()}
            one.load_state_dict({**others[place], "state": mine, "param_groups": own})


class Perturbed(Optimizers):
    """An optimizer whose gradient is that of other weights than those it updates. Derive from it, and define `move`.

    A training step computes the gradients of its micro-batches, calls `perturb`, computes them again with the same
    random numbers, calls `restore`, and updates the weights with the second gradients.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._perturbed: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._is_restored = False
        self.shards: Shards | None = None
        """Those of a model that processes divide, whose parts the parameters are."""
        super().__init__([optimizer])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "shards": None}

    def norm(self, params: list[Tensor], grads: list[Tensor]) -> Tensor:
        """Return the norm of the gradients of these parameters, over all processes."""
        return global_norm(grads) if self.shards is None else self.shards.norm(params, grads, global_norm)

    def move(self, params: list[Tensor], grads: list[Tensor]) -> Tensor:
        """Change the parameters in place, given their gradients; return a number that is finite if the gradients are.

        On a device nothing may wait for it: parameters must stay finite even if a gradient is not.
        """
        raise NotImplementedError

    @torch.no_grad()
    def perturb(self) -> Tensor:
        """Move the parameters that have a gradient; return a number that is finite if the gradients are."""
        self._perturbed = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        grads = [param.grad for param in self._perturbed if param.grad is not None]
        if any(grad.is_sparse for grad in grads):
            raise TrainingError(
                f"{type(self).__name__} does not support sparse gradients; create the embedding with sparse=False"
            )
        if not grads:
            return torch.zeros(())
        weights = [torch.empty_like(param) for param in self._perturbed]
        torch._foreach_copy_(weights, self._perturbed)
        self._weights = weights
        return self.move(self._perturbed, grads)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the weights from a copy: subtracting what was added would round."""
        if self._weights:
            torch._foreach_copy_(self._perturbed, self._weights)
        self._perturbed, self._weights = [], []
        self._is_restored = True

    def _step_each(self) -> None:
        if not self._is_restored:
            raise TrainingError(
                f"{type(self).__name__} needs a second gradient, which a function that only calls step() does not "
                "compute; train with a Trainer or a TrainingLoop, or pass the step method itself"
            )
        self._is_restored = False
        super()._step_each()


class _States(ChainMap[Any, Any]):
    """The states of several optimizers: no key is in two of them."""

    def __getitem__(self, key: Any) -> Any:
        return next((one for one in self.maps if key in one), {})[key]  # reading a defaultdict would add the key

    def __len__(self) -> int:
        return sum(map(len, self.maps))

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.maps)

    def values(self) -> ValuesView[Any]:
        return chain.from_iterable(one.values() for one in self.maps)  # type: ignore[return-value]


def everything_in(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield an optimizer and all that it is made of, at every level."""
    yield optimizer
    if isinstance(optimizer, Optimizers):
        for one in optimizer.optimizers:
            yield from everything_in(one)


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that update parameters: those that one is made of, or itself."""
    return [one for one in everything_in(optimizer) if not isinstance(one, Optimizers)]


def perturbed_in(optimizer: Optimizer) -> Perturbed | None:
    """Return the part of an optimizer that needs a second gradient, if there is one."""
    return next((one for one in everything_in(optimizer) if isinstance(one, Perturbed)), None)


def owner_of(optimizer: Optimizer, place: int) -> Optimizer:
    """Return the optimizer whose kernel updates the group at `place`."""
    owners = [one for one in optimizers_in(optimizer) for _ in one.param_groups]
    return owners[place]


def check_shares(optimizers: Sequence[Optimizer], names: Mapping[int, str], needed: Iterable[Any]) -> None:
    """Raise ConfigError, with names, unless every needed parameter is in exactly one of several optimizers."""
    seen: dict[int, int] = {}
    for one in optimizers:
        for group in one.param_groups:
            for param in group["params"]:
                seen[id(param)] = seen.get(id(param), 0) + 1
    twice = [names.get(key, "?") for key, count in seen.items() if count > 1]
    missing = [names.get(id(param), "?") for param in needed if id(param) not in seen]
    if twice:
        raise ConfigError(f"these parameters are in two optimizers: {listed(twice, shorten=True)}; give each its own")
    if missing:
        raise ConfigError(
            f"these parameters are in no optimizer: {listed(missing, shorten=True)}; add them to one, or freeze them "
            "with requires_grad_(False)"
        )


def _share(said: Mapping[str, Any], supplied: Mapping[str, Any], place: int) -> Mapping[str, Any]:
    """Return the parameters of the optimizer at `place`: those whose first matching pattern is its own."""
    params, patterns = supplied["params"], said["patterns"]
    if len(patterns) != len(said["optimizers"]):
        raise ConfigError(f"{len(said['optimizers'])} optimizers need as many patterns, found {len(patterns)}")
    if not isinstance(params, NamedParams) or any(isinstance(one, dict) for one in params):
        raise ConfigError("several optimizers need the names of parameters, and a model without groups of its own")
    taken: set[str] = set()
    mine: set[str] = set()
    for number, one in enumerate(patterns[: place + 1]):
        found = names_matching(one, params.names.values(), f"patterns.{number}")
        mine = {name for name in found if name not in taken}
        taken |= mine
    chosen = [param for param in params if params.names[id(param)] in mine]
    if not chosen:
        why = "frozen" if mine else "in earlier ones"
        raise ConfigError(f"patterns.{place}: all parameters that match are {why}; remove it and its optimizer")
    elsewhere = frozenset(params.names[id(param)] for param in params) - mine
    return {**supplied, "params": params.with_items(chosen, elsewhere)}


@register("optimizer", "several", inside=_share)
def several(
    params: Any,
    patterns: list[str | list[str]],  # noqa: ARG001 - read by `_share`
    optimizers: list[Annotated[Any, Section("optimizer", frozenset({"params"}))]],
) -> Optimizers:
    """One optimizer for the parameters of each pattern; a parameter belongs to the first pattern that matches."""
    names = params.names if isinstance(params, NamedParams) else {}
    check_shares(optimizers, names, params)
    return Optimizers(optimizers)
