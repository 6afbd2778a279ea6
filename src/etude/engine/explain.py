"""Explanations of torch errors: mismatched tensors, out of memory, batches of one sample, dead workers.

Nothing here costs anything until a step fails.

A mismatch is explained if a torch layer or loss rejects its input, or if torch reports in any other code of a forward
pass or loss that sizes, dtypes or devices differ. Every other error, such as a KeyError in the model's own code,
keeps its traceback.
"""

import contextlib
import functools
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from etude.core import DataError, EtudeError, TrainingError
from etude.core.batch import targets_of, tensors_in
from etude.core.spelling import shorten
from etude.distributed.shards import is_sharded
from etude.distributed.world import is_lost_connection
from etude.losses import LossStrategy

P = ParamSpec("P")
R = TypeVar("R")
_TORCH_NN = str(Path(nn.__file__).parent)
_CALLS = {nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__}
_KINDS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
_SIZES = re.compile(
    r"shapes cannot be multiplied|must match|is invalid for input of size|expected scalar type|same dtype|same device"
    r"|[Ee]xpected .* (dim|size|type|shape|to be|to have|to match|but got)|size mismatch|inconsistent|equal size"
    r"|Input type .* and weight type|out of (range|bounds)|must have the same|reduction dim|must be the same"
    r"|dimension.*(mismatch|exceeds|out of range|specified)|too many indices|not broadcastable|cannot be broadcast"
)
"""How torch describes mismatched tensors."""
_TYPES = re.compile(r"dtype|scalar type|Tensor\b|must be Tensor")
_OTHERS = re.compile(r"out of memory|allocate memory|CUDA error|more than 1 value per channel")
"""Errors that are explained elsewhere, or whose message would be misleading."""
_MAX_TENSORS = 4


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function that runs a model raise DataError for mismatched tensors; other errors pass through."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise_misfit(error)
            raise

    return run


def raise_misfit(error: Exception) -> None:
    """Raise DataError if this error is about mismatched tensors."""
    if isinstance(error, _KINDS) and not isinstance(error, EtudeError) and (text := explain_misfit(error)):
        raise DataError(text) from error


def explain_misfit(error: BaseException) -> str | None:
    """Describe in one line which layer or loss received what, or return None for another kind of error."""
    steps = list(traceback.walk_tb(error.__traceback__))
    if not steps or isinstance(error, torch.OutOfMemoryError) or _OTHERS.search(str(error)):
        return None
    if is_lost_connection(error):  # DistributedDataParallel, a torch module, communicates when it is called
        return None
    frames = [frame for frame, _ in steps]
    by_layer = _is_in_torch_nn(frames[-1])
    by_sizes = isinstance(error, (RuntimeError, IndexError)) and _SIZES.search(str(error))
    by_call = _is_call_of_model(error, frames)
    if not (by_layer or by_sizes or by_call):
        return None
    who = _loss(frames) or _layer(frames)
    if who is None:
        return None
    said = first_line(error).rstrip(".")
    if by_sizes and not by_layer:  # in the code of the model or loss itself
        said += f" ({Path(frames[-1].f_code.co_filename).name}:{steps[-1][1]})"
    remedy = "convert the data" if _TYPES.search(said) else "change the sizes of the model, or the data"
    if _is_divided(frames):
        remedy = "parallel.tensor_plan divides it; a colwise layer passes its part to a rowwise one"
    if by_call:
        remedy = "the model receives all but the last element of a batch (a, b, …, labels), or the whole object"
    return f"{who}: {said}; {remedy}"


def _is_call_of_model(error: BaseException, frames: list[FrameType]) -> bool:
    """Return whether a model, not a layer inside it, was called with the wrong number of inputs."""
    calls = sum(frame.f_code is nn.Module._call_impl.__code__ for frame in frames)
    return isinstance(error, TypeError) and "forward()" in str(error) and calls == 1 and frames[-1].f_code in _CALLS


def _is_in_torch_nn(frame: FrameType) -> bool:
    """Return whether this is code of a torch layer or loss; `Module.__call__` counts as the caller's code."""
    code = frame.f_code
    return code.co_filename.startswith(_TORCH_NN) and not code.co_filename.endswith("/module.py")


def _is_divided(frames: list[FrameType]) -> bool:
    """Return whether processes divide the innermost running module by a tensor plan."""
    modules = [frame.f_locals["self"] for frame in frames if frame.f_code in _CALLS]
    return bool(modules) and any(map(is_sharded, modules[-1].parameters(recurse=False)))


def _layer(frames: list[FrameType]) -> str | None:
    """Describe the innermost running module and its input."""
    calls = [frame.f_locals for frame in frames if frame.f_code in _CALLS]
    if not calls:
        return None
    root, inner = calls[0]["self"], calls[-1]["self"]
    name = next((name for name, module in root.named_modules() if module is inner), "").removeprefix("module.")
    inputs = _shapes([*calls[-1].get("args", ()), *calls[-1].get("kwargs", {}).values()])
    layer = f"layer '{name}', {_summary(inner)}," if name else f"the model, {_summary(inner)},"
    return f"{layer} does not accept its input {inputs}"


def _loss(frames: list[FrameType]) -> str | None:
    """Describe the running loss, its predictions and labels."""
    for frame in frames:
        found = frame.f_locals
        if frame.f_code.co_name == "terms" and isinstance(strategy := found.get("self"), LossStrategy):
            labels = targets_of(found["batch"])[0] if "batch" in found else None
            name = getattr(strategy, "name", type(strategy).__name__)
            return _given(name, found.get("output"), labels)
        # a plain function of torch.nn.functional
        if frame.f_code.co_name == "__call__" and {"predictions", "labels"} <= found.keys():
            function = getattr(found.get("self"), "compute_loss", None)
            return _given(
                getattr(function, "__name__", type(function).__name__), found["predictions"], found["labels"]
            )
    return None


def _given(name: Any, predictions: Any, labels: Any) -> str:
    return f"loss {name} does not accept predictions {_shapes([predictions])} with labels {_shapes([labels])}"


def _summary(module: nn.Module) -> str:
    """Return the class with its sizes: its own repr, else the shapes of its parameters."""
    shown = " ".join(module.extra_repr().split())
    if not shown:
        parameters = [f"{name} {tuple(one.shape)}" for name, one in module.named_parameters(recurse=False)]
        shown = ", ".join(parameters[:_MAX_TENSORS])
    return f"{type(module).__name__}({shown})" if len(shown) < 200 else type(module).__name__


def _shapes(values: list[Any]) -> str:
    kinds = ", ".join(type(value).__name__ for value in values)
    shown = [_shape(one) for value in values for one in tensors_in(value)]
    if not shown:
        return kinds or "none"
    plain = all(isinstance(one, (Tensor, Mapping, tuple, list)) for one in values)
    more = ["…"] if len(shown) > _MAX_TENSORS else []
    return ("" if plain else f"{kinds} of ") + " and ".join(shown[:_MAX_TENSORS] + more)


def _shape(tensor: Tensor) -> str:
    text = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.is_cpu or not tensor.numel():
        return text  # the device may be unusable after an error
    return f"{text} from {int(tensor.min())} to {int(tensor.max())}"


def first_of(error: BaseException) -> BaseException:
    """Return the first error in the chain of causes."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def place_of(error: BaseException) -> str:
    """Return the innermost line outside torch and this library; empty if there is none."""
    here, places = str(Path(__file__).parents[1]), []
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith((here, str(Path(torch.__file__).parent))):
            places.append(f"{Path(frame.filename).name}:{frame.lineno}")
    return places[-1] if places else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, shortened if it is long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return shorten(lines[0] if lines else type(error).__name__, 300)


_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "_status_alloc_failed")
"""How allocators report it: CPU on Linux and Windows, CUDA, cuBLAS and cuDNN."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, of the host or of a device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    is_known = isinstance(error, RuntimeError) and not isinstance(error, EtudeError)
    return is_known and any(sign in str(error).lower() for sign in _OUT_OF_MEMORY)


@contextlib.contextmanager
def explain_out_of_memory(device: torch.device, place: str, remedies: Callable[[], list[str]]) -> Iterator[None]:
    """Turn an out-of-memory error into one message with the location, such as " in validation", and the remedies."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        others = ["check that no other process uses the device (nvidia-smi)"] if device.type == "cuda" else []
        raise TrainingError(
            f"out of memory on {device}{place}; remedies: {'; '.join(remedies() + others)}"
        ) from error


def is_of_compiler(error: Exception) -> bool:
    """Return whether torch's compiler failed, rather than the compiled code."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch.fx"))


def compiler_problem(error: Exception) -> str:
    """Return in one line why torch's compiler failed."""
    from torch._dynamo.exc import BackendCompilerFailed

    return first_line(error.inner_exception if isinstance(error, BackendCompilerFailed) else error)


@contextlib.contextmanager
def explain_compiler() -> Iterator[None]:
    """Turn an error of torch's compiler into one message with the remedies."""
    try:
        yield
    except Exception as error:
        if not is_of_compiler(error):
            raise
        if said := re.search(r"No space left on device|File too large|Disk quota exceeded", str(error)):
            raise TrainingError(
                f"the compiler cannot write its files: {said.group()}; set TORCHINDUCTOR_CACHE_DIR to a folder with "
                "space, or training.compile=off"
            ) from error
        raise TrainingError(
            f"torch cannot compile this model: {compiler_problem(error)}; set training.compile=off"
        ) from error


@contextlib.contextmanager
def explain_single_sample() -> Iterator[None]:
    """Turn torch's error about batch statistics of a single sample into one message with the remedies."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise TrainingError(
            "a batch norm layer received a single sample and needs at least two: the last batch of an epoch may be "
            "small, and every batch is divided among the processes; set training.drop_last=true or choose another "
            "training.batch_size"
        ) from error


_KILLER = "most likely by the system's out-of-memory killer"
_ERROR = re.compile(r"[\w.]+(: |\.?$)")
_KILLED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: ([\w ]+)|exited unexp)")
_FAILED = re.compile(r"Caught \w+ in DataLoader worker process (\d+)\.\n")


@contextlib.contextmanager
def explain_worker_failure() -> Iterator[None]:
    """Turn the death of a data worker, or an error in one, into a DataError of one line."""
    try:
        yield
    except Exception as error:
        text = str(error)
        if lost := _lost_worker(error):
            process, signal = lost
            causes = {
                "Bus error": "there is too little shared memory; enlarge /dev/shm",
                "Killed": _KILLER,
                None: _KILLER,
            }
            cause = causes.get(signal, "by a crash in the dataset or a library it uses, or by another process")
            raise DataError(
                f"a data worker (process {process}) was killed ({signal or 'it exited'}): {cause}. Use fewer "
                f"workers (num_workers) or prefetch less (prefetch_factor), and resume the run from its "
                f"last checkpoint"
            ) from error
        if failed := _FAILED.match(text):  # torch passes on the worker's traceback as text
            lines = [line for line in text.strip().splitlines() if line]
            last = max(place for place, line in enumerate(lines) if not line.startswith(" ") and _ERROR.match(line))
            places = re.findall(r'File "(.+)", line (\d+), in (\S+)', text)
            where = "{}:{} in {}".format(*places[-1]) if places else "its process"
            raise DataError(f"data worker {failed[1]} failed: {' '.join(lines[last:])} ({where})") from error
        raise


def _lost_worker(error: Exception) -> tuple[str, str | None] | None:
    """Return process and signal of a killed worker; unknown if it was killed while sending a batch."""
    if killed := _KILLED.search(str(error)):
        return killed[1], killed[2]
    handing_over = torch.multiprocessing.reductions.__file__
    is_cut_off = isinstance(error, (ConnectionError, EOFError, FileNotFoundError))
    if is_cut_off and any(frame.filename == handing_over for frame in traceback.extract_tb(error.__traceback__)):
        return "unknown", None
    return None
