"""`Machine`: processes, device, precision, threads and kernels of a run."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from etude.core import ConfigError, Loader, Task
from etude.core.arguments import as_device
from etude.core.blocks import repeated_blocks
from etude.core.deferred import recording_of
from etude.distributed import World, join_world
from etude.distributed.mesh import Layout, make_layout
from etude.distributed.settings import ParallelConfig, memory_of
from etude.distributed.sharing import separate_buffers, share_weights
from etude.engine.capture import CaptureMode
from etude.engine.captured_evaluation import CapturedEvaluation
from etude.engine.compiled import CompileMode, Way, compile_blocks, compile_in_place, undo_compiling
from etude.engine.evaluation import evaluate
from etude.engine.explain import (
    explain_compiler,
    explain_out_of_memory,
    explain_single_sample,
    explain_worker_failure,
)
from etude.engine.precision import MixedPrecision, PrecisionName
from etude.engine.prediction import predict
from etude.engine.recompute import keep_activations, recompute_activations
from etude.engine.stopping import Interrupts
from etude.trainer.config import TrainerConfig

_recomputed: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()
"""The blocks of models whose activations are recomputed because a config says so."""


_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""Without it products of matrices are not deterministic on CUDA."""


def _precision_of_products() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # its user has set that of some backends alone
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


_PROCESS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic": (
        torch.get_deterministic_debug_mode,  # 0: off, 1: warns, 2: raises
        lambda mode: torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1),
    ),
    "products": (_precision_of_products, torch.set_float32_matmul_precision),
    "benchmark": (lambda: torch.backends.cudnn.benchmark, lambda on: setattr(torch.backends.cudnn, "benchmark", on)),
}
"""Settings of the whole process: how to read and to set them."""
_set: dict[str, tuple[Any, Any]] = {}
"""Those that the last machine has set, with their values before and since."""


class Machine:
    """The processes of a run, the device of this process, and its precision.

    Its contexts make the device the current one and explain errors of the device, a layer or a worker.

    >>> machine = Machine("cpu")
    >>> machine.device, machine.precision.name, machine.world.size
    (device(type='cpu'), 'fp32', 1)
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        precision: PrecisionName = "fp32",
        *,
        world: World | None = None,
        loss_scale: float = 65536.0,
        batch_size: int | None = None,
    ) -> None:
        """Choose a device; `world` is a single process by default.

        `batch_size` is used in remedies; None if the user's own loader makes all batches. Raises ConfigError if the
        device does not exist.
        """
        self.world = world if world is not None else World()
        self.device = resolve_device(device, self.world.local_rank)
        self.precision = MixedPrecision(precision, self.device, loss_scale=loss_scale, summands=batch_size or 1)
        self.batch_size = batch_size
        self.layout = Layout(self.world, self.world)
        """How the processes divide data and model."""
        self.evaluation: CapturedEvaluation | None = None
        """Runs the batches of evaluations, captured as CUDA graphs."""
        self._loss_scale = loss_scale
        self._process: dict[str, Any] | None = None
        """Settings of the whole process that its config asks for; None for a machine without one."""

    @classmethod
    def from_config(cls, config: TrainerConfig, world: World | None = None) -> Self:
        """Return the machine of a config; set threads and kernels, and join the processes started by torchrun."""
        machine = cls(
            config.device,
            config.resolved_precision,
            world=world if world is not None else join_world(resolve_device(config.device).type),
            loss_scale=config.loss_scale,
            batch_size=config.first_batch_size,
        )
        asked: dict[str, Any] = {} if config.num_threads is None else {"threads": config.num_threads}
        if config.deterministic:
            os.environ.setdefault(*_CUBLAS)
            asked |= {"deterministic": 2, "benchmark": False}
        elif machine.device.type == "cuda" and config.resolved_precision != "fp32":
            _enable_attention()
            asked |= {"products": "high", "benchmark": True}
        machine._process = asked
        machine.set_process()
        return machine

    def set_process(self) -> None:
        """Set what its config says for the whole process, and undo what another config has said.

        What other code has set since stays.
        """
        if self._process is None:
            return
        for name in [*self._process, *(_set.keys() - self._process.keys())]:
            read, write = _PROCESS[name]
            now = read()
            before, ours = _set.pop(name, (now, now))
            before = before if now == ours else now
            if (value := self._process.get(name, before)) != now:
                write(value)
            if name in self._process:
                _set[name] = before, read()

    def arrange(self, settings: ParallelConfig, model: nn.Module) -> None:
        """Decide how the processes divide data and model; all of them must call this together."""
        parameters = sum(param.numel() for param in model.parameters() if not is_lazy(param))
        memory = memory_of(self.device) if settings.shard == "auto" else None
        sizes = settings.sizes(self.world.size, parameters, memory)
        if settings.cpu_offload and self.device.type != "cuda":
            raise ConfigError(f"parallel.cpu_offload is for CUDA, but the device is {self.device.type}; remove it")
        self.layout = make_layout(self.world, settings, sizes, self.device)

    @property
    def data_world(self) -> World:
        """The processes with different samples."""
        return self.layout.data_world

    def resize(self, batch_size: int | None) -> None:
        """Set the size of batches once it is known: for remedies, and for the loss scale of fp16."""
        self.batch_size, self.precision.summands = batch_size, float(batch_size or 1)

    def at(self, device: torch.device) -> "Machine":
        """Return this machine with another device, for functions whose tensors are already there."""
        if device == self.device:
            return self
        return Machine(
            device,
            self.precision.name,
            world=self.world,
            loss_scale=self._loss_scale,
            batch_size=self.batch_size,
        )

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which a CUDA device is the current one: its random generator is the run's.

        The settings of the process are those of this machine from now on.
        """
        self.set_process()
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def place(self, model: nn.Module, config: TrainerConfig) -> None:
        """Move a model to the device; recompute its activations and compile it if the config says so."""
        divides = self.layout.sizes.divides_model
        if recording_of(model) is None:
            model.to(self.device)
        elif divides:
            model._apply(lambda one: one if one.is_meta else one.to(self.device))
        else:
            raise ConfigError(
                "a model with deferred weights must be divided: set parallel to fsdp, or make it plainly"
            )
        if self.world.size > 1:
            separate_buffers(model)
        if divides:
            share_weights(model, self.world)
        undo_compiling(model)  # what an earlier trainer of this model did
        if (blocks := _recomputed.pop(model, None)) is not None:
            keep_activations(model, blocks)
        if config.recomputed_blocks is not None:
            _recomputed[model] = recompute_activations(model, **config.recomputed_blocks)
        if self.compiled(config.compile) == "model":
            # Blocks of a divided model, between which FSDP2 gathers weights: they share one graph, and torch cannot
            # compile an embedding that is divided by rows.
            if divides and (blocks := repeated_blocks(model)):
                compile_blocks(model, blocks)
            else:
                compile_in_place(model)

    def compiled(self, mode: CompileMode) -> Way | None:
        """Return what is compiled here; None if the step is, or may be if worthwhile."""
        is_alone = self.world.size == 1
        if mode == "model" or (mode == "step" and not is_alone):
            return "model"
        may_be = mode == "step" or (mode == "auto" and self.device.type == "cuda")
        return None if may_be and is_alone else "usual"

    def captures(self, mode: CaptureMode) -> bool:
        """Return whether steps may become CUDA graphs; raise ConfigError if they must but cannot."""
        why = "the device is " + self.device.type if self.device.type != "cuda" else ""
        if self.world.size > 1:
            why = f"there are {self.world.size} processes"
        if why and mode == "on":
            raise ConfigError(
                f"training.capture is on, but {why}: CUDA graphs need a single process on CUDA; use auto"
            )
        return mode != "off" and not why

    @contextmanager
    def training(
        self, grad_accum_steps: int = 1, recomputable: nn.Module | None = None, *, splits: bool = False
    ) -> Iterator[None]:
        """Train with this device as the current one; errors of workers, layers or memory get a remedy.

        `recomputable` is a model whose activations might be recomputed to save memory. `splits` says that steps are
        divided if memory runs out.
        """

        def remedies() -> list[str]:
            found = ["use smaller batches"] if self.batch_size is None else []
            if self.batch_size is not None and self.batch_size > 1:
                halved = f"training.batch_size={self.batch_size // 2} with training.grad_accum_steps"
                found.append(f"{halved}={grad_accum_steps * 2} (the same result in half the memory)")
            if not splits and not self.layout.sizes.divides_model:
                found.append("training.on_out_of_memory=split (divides batches as needed)")
            found += self._lower_precision()
            if recomputable is not None and repeated_blocks(recomputable):
                found.append("training.activation_checkpointing=true (the same result, a third more time)")
            return [*found, "a smaller model or shorter inputs"]

        memory = explain_out_of_memory(self.device, "", remedies)
        with self.current(), explain_worker_failure(), explain_single_sample(), explain_compiler(), memory:
            yield

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Validate or evaluate in the same way, with the remedies for validation."""

        def remedies() -> list[str]:
            size = self.batch_size or 0
            made_here = f"training.batch_size={size // 2}, or " if size > 1 else ""
            smaller = f"smaller validation batches ({made_here}fewer samples per batch in the loader)"
            return [smaller, *self._lower_precision(), "shorter inputs"]

        memory = explain_out_of_memory(self.device, " in validation", remedies)
        with self.current(), explain_worker_failure(), explain_compiler(), memory:
            yield

    def _lower_precision(self) -> list[str]:
        is_full = self.precision.name == "fp32" and self.device.type == "cuda"
        return ["training.precision=bf16"] if is_full else []

    def evaluate(
        self, model: nn.Module, task: Task, loader: Loader, interrupts: Interrupts | None = None
    ) -> dict[str, float]:
        """Return the mean loss and metrics over a loader, on all processes together."""
        with self.validating():
            return evaluate(
                model,
                task,
                loader,
                precision=self.precision,
                world=self.data_world,
                interrupts=interrupts,
                capture=self.evaluation,
            )

    def predict(self, model: nn.Module, task: Task, loader: Loader) -> Any:
        """Return the outputs for all samples of a loader, in order, on all processes together."""
        with self.validating():
            return predict(model, task, loader, precision=self.precision, world=self.data_world)


def making_model(device: torch.device) -> AbstractContextManager[None]:
    """Return the context in which a model and its optimizer are created and moved to the device."""
    remedies = ["a smaller model", "a device with more memory"]
    return explain_out_of_memory(device, " while the model was created or moved", lambda: remedies)


def resolve_device(name: str | torch.device = "auto", local_rank: int = 0) -> torch.device:
    """Return the device that a config names; `auto` is CUDA if available.

    >>> resolve_device("cpu")
    device(type='cpu')

    Raises ConfigError if the device does not exist.
    """
    device = as_device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        if not torch.cuda.is_available() or device.index >= count:
            raise ConfigError(
                f"device '{name}' is not available ({count} CUDA devices found); use device: auto or cpu"
            )
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device 'mps' is not available on this machine or in this torch; use device: auto or cpu")
    elif device.type not in ("cpu", "mps"):
        raise ConfigError(f"device '{name}' cannot train; use cpu, cuda or cuda:N")
    return device


def configure_cuda_performance() -> None:
    """Allow TF32 in matrix products and cuDNN, and flash and memory-efficient attention; no effect without CUDA."""
    # Do not set torch.backends.cuda.matmul.fp32_precision: torch.get_float32_matmul_precision, which other code
    # calls, would then raise. cuDNN convolutions use TF32 by default.
    torch.set_float32_matmul_precision("high")
    _enable_attention()
    torch.backends.cudnn.benchmark = True


def _enable_attention() -> None:
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)


def make_deterministic() -> None:
    """Use only deterministic kernels; an operation without one raises."""
    os.environ.setdefault(*_CUBLAS)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
