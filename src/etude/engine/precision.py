"""Mixed precision: autocast, and the loss scale for float16, kept on the device."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor

from etude.checkpoint.trust import check_tensor
from etude.core.errors import CheckpointError, ConfigError
from etude.core.spans import NOTHING

PrecisionName = Literal["auto", "fp32", "bf16", "fp16"]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LossScaler:
    """Scales the objective so that float16 gradients neither underflow nor overflow; never read by the host.

    After `growth_interval` finite updates in a row the scale doubles; after one that is not finite it halves.
    """

    def __init__(self, device: torch.device, initial_scale: float = 65536.0, growth_interval: int = 2000) -> None:
        self.scale = torch.full((), initial_scale, dtype=torch.float32, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        self.growth_interval = growth_interval

    def update(self, skipped: Tensor) -> None:
        """Grow or shrink the scale after an update."""
        torch._amp_update_scale_(self.scale, self._growth, skipped.float(), 2.0, 0.5, self.growth_interval)

    def tensors(self) -> list[Tensor]:
        """Return the scale and the growth counter themselves, which updates change in place."""
        return [self.scale, self._growth]

    def state_dict(self) -> dict[str, Any]:
        """Return scale and growth counter."""
        return {"scale": self.scale.clone(), "growth": self._growth.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore scale and growth counter in place."""
        self.scale.copy_(state["scale"])
        self._growth.copy_(state["growth"])


class MixedPrecision:
    """Precision of a step: `fp32`, `bf16` or `fp16`; `auto` is bf16 on CUDA devices that support it, else fp32.

    >>> MixedPrecision("auto", torch.device("cpu")).name
    'fp32'
    """

    def __init__(
        self,
        name: PrecisionName = "auto",
        device: torch.device | None = None,
        *,
        loss_scale: float = 65536.0,
        summands: int = 1,
    ) -> None:
        """Set up the precision for `device`.

        `loss_scale` applies to the averaged loss; the step works with sums of about `summands` elements.
        """
        device = device if device is not None else torch.device("cpu")
        if name == "auto":
            name = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
        if name not in ("fp32", *_DTYPES):
            raise ConfigError(f"precision must be one of auto, fp32, bf16, fp16, got {name!r}")
        self.name = name
        self.summands = float(max(summands, 1))
        self._initial = float(loss_scale)
        self.scaler = LossScaler(device, loss_scale) if name == "fp16" else None
        self.autocast: Callable[[], AbstractContextManager[Any]] = lambda: NOTHING
        """Returns the context in which the forward pass and the loss run."""
        if name in _DTYPES:
            dtype = _DTYPES[name]
            self.autocast = lambda: torch.autocast(device.type, dtype=dtype)

    def scale(self, objective: Tensor) -> Tensor:
        """Return the value to call backward on."""
        return objective if self.scaler is None else objective * (self.scaler.scale / self.summands)

    def unscale(self, divisor: Tensor | float) -> Tensor | float:
        """Return the divisor for gradients of a scaled objective."""
        return divisor if self.scaler is None else divisor * self.scaler.scale / self.summands

    def update(self, skipped: Tensor) -> None:
        """Adapt the loss scale after an update."""
        if self.scaler is not None:
            self.scaler.update(skipped)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and what it began with, if there is one."""
        return {} if self.scaler is None else {**self.scaler.state_dict(), "initial": self._initial}

    def check(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError unless `load_state_dict` accepts this state."""
        if self.scaler is None or not state:
            return
        for name, own in self.scaler.state_dict().items():
            check_tensor(state.get(name), own, f"precision.{name}")
        if not 0 < float(state["scale"]) < float("inf") or int(state["growth"]) < 0:
            raise CheckpointError(f"precision: the checkpoint has the invalid loss scale {float(state['scale'])}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the loss scale, if both the run and the checkpoint have one that began with the same value."""
        if self.scaler is not None and state and state.get("initial", self._initial) == self._initial:
            self.scaler.load_state_dict(state)
