"""Log how busy the device and the process are: GPU use, memory, temperature and power; CPU and resident memory."""

import time
from collections.abc import Callable

import torch

from etude.callbacks.recorder import memory_in_use, peak_memory
from etude.config.registry import register
from etude.engine.callback import Callback, Logs, RunInfo

NVML: dict[str, tuple[Callable[[torch.device], float], float]] = {
    "gpu/utilization": (torch.cuda.utilization, 0.01),
    "gpu/temperature_c": (torch.cuda.temperature, 1.0),
    "gpu/power_w": (torch.cuda.power_draw, 1e-3),
}
"""What the driver reports, and the factor to its unit: a share, degrees Celsius, watts."""
_CPU = torch.device("cpu")


@register("callback", "device_stats")
class DeviceStats(Callback):
    """Adds what the device and the process use to every log record. Nothing is read in a step.

    | name | value |
    |---|---|
    | `cpu/cores` | CPU cores in use since the last log point, on average |
    | `cpu/memory_gb` | resident memory of the process |
    | `gpu/memory_allocated_gb`, `gpu/memory_reserved_gb` | the most since the start, by tensors and by torch |
    | `gpu/utilization` | share of the last moments in which a kernel ran |
    | `gpu/temperature_c`, `gpu/power_w` | of the GPU |

    The last three come from the driver, by the package nvidia-ml-py. Every process logs its own device; the record is
    that of the main process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._device = _CPU
        self._known: list[str] = []
        self._since = 0.0, 0.0

    def acts_in_steps(self) -> bool:
        """True: a validation alone has no log points."""
        return True

    def on_train_begin(self, run: RunInfo) -> None:
        """Find out what the driver reports."""
        self._device, self._since, self._known = run.device, _clocks(), []
        if run.device.type != "cuda":
            return
        missing = ""
        for name, (read, _) in NVML.items():
            try:
                read(run.device)
                self._known.append(name)
            except ModuleNotFoundError:
                missing = "the package nvidia-ml-py is missing (pip install 'etude[gpu]')"
            except Exception as error:  # the driver of some devices lacks a sensor, and each has its own error
                missing = str(error) or type(error).__name__
        if missing and run.is_main:
            left_out = ", ".join(name for name in NVML if name not in self._known)
            self.notify(f"device_stats: no {left_out}: {missing}")

    def numbers(self) -> Logs:
        """Return the values of this moment."""
        (clock, cpu), (now, used) = self._since, _clocks()
        self._since = now, used
        found = {"cpu/cores": (used - cpu) / max(now - clock, 1e-9)}
        if resident := memory_in_use(_CPU).get("memory_bytes"):
            found["cpu/memory_gb"] = resident / 1e9
        if self._device.type == "cuda":
            allocated, reserved = peak_memory(self._device)
            found |= {"gpu/memory_allocated_gb": allocated / 1e9, "gpu/memory_reserved_gb": reserved / 1e9}
        for name in [*self._known]:
            read, factor = NVML[name]
            try:
                found[name] = read(self._device) * factor
            except Exception as error:  # a driver may lose a sensor during a run, which is not worth the run
                self._known.remove(name)
                self.notify(f"device_stats: no {name} from now on: {str(error) or type(error).__name__}")
        return found


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
