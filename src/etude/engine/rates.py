"""Learning rates on the device, which a captured step reads, and their names in logs."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from etude.optim.device import DeviceOptimizer
from etude.optim.groups import group_names
from etude.optim.several import owner_of

_CAPTURABLE = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.RMSprop)
"""Optimizers whose non-fused kernels accept a learning rate on the device, if their groups are capturable."""


class DeviceRate:
    """The learning rate of a parameter group as a device tensor, which a captured step reads.

    Between steps the group holds the Python float that users expect. All steps on CUDA, recorded or eager, use the
    device tensor: it is rounded to float32, and they must not differ.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, place: int) -> None:
        self.optimizer, self.place = optimizer, place
        self.tensor: Tensor | None = None
        """None if the kernels of this optimizer accept no tensor, or if the group already holds one."""
        self._value: float | None = None
        self._lent: dict[str, Any] = {}
        self._settings: list[str] = []
        self._num_settings = 0
        group = self.group
        first = next(iter(group["params"]), None)  # a group may be empty
        owner = owner_of(optimizer, place)
        if first is not None and first.is_cuda and _takes_tensor(owner, group):
            self.tensor = torch.zeros((), dtype=torch.float32, device=first.device)
            # torch warns about capturable groups outside a capture; here both cases do the same arithmetic
            owner._warned_capturable_if_run_uncaptured = True

    @property
    def group(self) -> dict[str, Any]:
        """The current group: loading a state dict replaces it."""
        group: dict[str, Any] = self.optimizer.param_groups[self.place]
        return group

    def send(self) -> None:
        """Update the device tensor if the rate has changed, without waiting."""
        if self.tensor is not None and (rate := self.group["lr"]) != self._value:
            self._value = float(rate)
            self.tensor.fill_(self._value)

    def lend(self) -> None:
        """Let the group hold the device tensor."""
        if self.tensor is not None:
            group = self.group
            self._lent = {key: group[key] for key in ("lr", "capturable") if key in group}
            group.update({"lr": self.tensor, "capturable": True} if "capturable" in group else {"lr": self.tensor})

    def take_back(self) -> None:
        """Let the group hold the Python float again."""
        if self._lent:
            self.group.update(self._lent)
            self._lent = {}

    def constants(self) -> Hashable:
        """Return the settings of the group that are constants of a captured step."""
        group = self.group
        if len(group) != self._num_settings:
            left_out = {"params", "initial_lr"} if self.tensor is None else {"params", "initial_lr", "lr"}
            self._settings, self._num_settings = [key for key in group if key not in left_out], len(group)
        # A tensor on the host can be changed in place, so compare its value.
        values = map(group.get, self._settings)
        return tuple([one.item() if isinstance(one, Tensor) and one.is_cpu else one for one in values])


def _takes_tensor(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether the kernels for a group read the learning rate from the device, and it is a Python float now."""
    if isinstance(group["lr"], Tensor) or not type(optimizer).step.__module__.startswith(
        ("torch.optim", "etude.optim")
    ):
        return False  # a user-defined step may compute with the Python float
    if isinstance(optimizer, DeviceOptimizer):
        return True
    if group.get("fused"):
        return isinstance(optimizer, (torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad))
    return "capturable" in group and isinstance(optimizer, _CAPTURABLE)


def rate_names(optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Return the index and name of every group whose rate is reported beside that of the first group."""
    groups = optimizer.param_groups
    found: dict[int, str] = {}
    first_rates: dict[Any, Any] = {None: groups[0]["lr"]}
    for place, (name, group) in enumerate(zip(group_names(groups), groups, strict=True)):
        rate, known = group["lr"], first_rates.get(group.get("name"))
        if place and not (known is rate or (known is not None and bool(known == rate))):
            found[place] = name
        first_rates.setdefault(group.get("name"), rate)
    return found
