"""Errors of torch in words: tensors that do not fit, memory that runs out, batches of one sample, workers that die.

Nothing here costs anything until a step fails.

What counts as a misfit: torch itself refuses the input of one of its layers or losses, or says of any other code in a
forward pass or a loss that sizes, types or devices of tensors differ. Everything else, such as a KeyError in a model's
own code, stays as it is, with its traceback.
"""

import contextlib
import functools
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from etude.core import DataError, EtudeError, TrainingError
from etude.core.batch import targets_of, tensors_in
from etude.core.spelling import shorten
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
"""What torch says of tensors that do not fit each other."""
_TYPES = re.compile(r"dtype|scalar type|Tensor\b|must be Tensor")
_OTHERS = re.compile(r"out of memory|allocate memory|CUDA error|more than 1 value per channel")
"""Errors that are explained elsewhere, or that name the wrong place."""
_MAX_TENSORS = 4


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function that runs a model raise DataError for tensors that do not fit; other errors stay as they are."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise_misfit(error)
            raise

    return run


def raise_misfit(error: Exception) -> None:
    """Raise DataError if this error is about tensors that do not fit."""
    if isinstance(error, _KINDS) and not isinstance(error, EtudeError) and (text := explain_misfit(error)):
        raise DataError(text) from error


def explain_misfit(error: BaseException) -> str | None:
    """Return in one line which layer or loss was given what, or None if the error is of another kind."""
    frames = list(_frames(error.__traceback__))
    if isinstance(error, torch.OutOfMemoryError) or _OTHERS.search(str(error)) or not frames:
        return None
    if isinstance(error, TypeError) and "forward()" in str(error):
        return _wrong_inputs(error, frames)
    by_layer = _is_in_torch_nn(frames[-1])
    if not by_layer and not (isinstance(error, (RuntimeError, IndexError)) and _SIZES.search(str(error))):
        return None
    who = _loss(frames) or _layer(frames)
    if who is None:
        return None
    said = first_line(error).rstrip(".") + ("" if by_layer else _place(error.__traceback__))
    remedy = "convert the data" if _TYPES.search(said) else "change the sizes of the model, or the data"
    whole = _of_object(frames) if "must be Tensor" in said else None
    return f"{who}: {said}; {whole or remedy}"


def _wrong_inputs(error: TypeError, frames: list[FrameType]) -> str | None:
    """Return what to say of a batch with more or fewer inputs than the model takes."""
    if frames[-1].f_code not in _CALLS or sum(frame.f_code is nn.Module._call_impl.__code__ for frame in frames) > 1:
        return None  # a call by the model's own code
    said = first_line(error)
    if (loss := _loss(frames)) is not None:
        return f"{loss}: {said}; wrap it in a function of (predictions, labels)"
    remedy = _of_object(frames) or "of a batch (a, b, …, labels) the model is given all but the last"
    return f"{_layer(frames)}: {said}; {remedy}"


def _of_object(frames: list[FrameType]) -> str | None:
    """Return what to say of a batch that is an object, such as a dataclass or a graph: the model is given all of it."""
    calls = (frame.f_locals.get("args", ()) for frame in frames if frame.f_code in _CALLS)
    inputs: tuple[Any, ...] = next(calls, ())
    if len(inputs) != 1 or isinstance(inputs[0], (Tensor, Mapping, tuple, list)):
        return None
    return f"the model is called with the whole batch, a {type(inputs[0]).__name__}: let its `forward` take that"


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _is_in_torch_nn(frame: FrameType) -> bool:
    """Return whether this is code of one of torch's layers or losses; the call of a module is its user's."""
    code = frame.f_code
    return code.co_filename.startswith(_TORCH_NN) and not code.co_filename.endswith("/module.py")


def _layer(frames: list[FrameType]) -> str | None:
    """Describe the innermost module that was running and its input."""
    calls = [frame.f_locals for frame in frames if frame.f_code in _CALLS]
    if not calls:
        return None
    root, inner = calls[0]["self"], calls[-1]["self"]
    name = next((name for name, module in root.named_modules() if module is inner), "").removeprefix("module.")
    inputs = _shapes([*calls[-1].get("args", ()), *calls[-1].get("kwargs", {}).values()])
    layer = f"layer '{name}', {_summary(inner)}," if name else f"the model, {_summary(inner)},"
    return f"{layer} does not take its input {inputs}"


def _loss(frames: list[FrameType]) -> str | None:
    """Describe the loss that was running, its predictions and labels."""
    for frame in frames:
        found = frame.f_locals
        if frame.f_code.co_name == "terms" and isinstance(strategy := found.get("self"), LossStrategy):
            labels = targets_of(found["batch"])[0] if "batch" in found else None
            name = getattr(strategy, "name", type(strategy).__name__)
            return _given(name, found.get("output"), labels)
        if frame.f_code.co_name == "__call__" and {"predictions", "labels"} <= found.keys():  # of plain functions
            function = getattr(found.get("self"), "compute_loss", None)
            return _given(
                getattr(function, "__name__", type(function).__name__), found["predictions"], found["labels"]
            )
    return None


def _given(name: Any, predictions: Any, labels: Any) -> str:
    return f"loss {name} does not take predictions {_shapes([predictions])} with labels {_shapes([labels])}"


def _summary(module: nn.Module) -> str:
    """Return the class with its sizes: as it shows them itself, else the shapes of its own parameters."""
    shown = " ".join(module.extra_repr().split())
    if not shown:
        parameters = [f"{name} {tuple(one.shape)}" for name, one in module.named_parameters(recurse=False)]
        shown = ", ".join(parameters[:_MAX_TENSORS])
    return f"{type(module).__name__}({shown})" if len(shown) < 200 else type(module).__name__


def _shapes(values: list[Any]) -> str:
    shown = [_shape(one) for value in values for one in tensors_in(value)]
    more = ["…"] if len(shown) > _MAX_TENSORS else []
    return " and ".join(shown[:_MAX_TENSORS] + more) or ", ".join(type(value).__name__ for value in values) or "none"


def _shape(tensor: Tensor) -> str:
    text = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.is_cpu or not tensor.numel():
        return text  # after an error a device may not answer
    return f"{text} from {int(tensor.min())} to {int(tensor.max())}"


def _place(trace: TracebackType | None) -> str:
    """Name the line of the model's or the loss's own code."""
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"


def first_of(error: BaseException) -> BaseException:
    """Return the error that came first, of those that led to one."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def place_of(error: BaseException) -> str:
    """Name the innermost line outside of torch and of this library; nothing if there is none."""
    here, places = str(Path(__file__).parents[1]), []
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith((here, str(Path(torch.__file__).parent))):
            places.append(f"{Path(frame.filename).name}:{frame.lineno}")
    return places[-1] if places else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's words, cut off if it is long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return shorten(lines[0] if lines else type(error).__name__, 300)


def explain_out_of_memory(
    *,
    batch_size: int | None,
    grad_accum_steps: int,
    precision: str,
    device: torch.device,
    can_recompute: Callable[[], bool] = lambda: False,
) -> AbstractContextManager[None]:
    """Return a context that turns an out-of-memory error in training into one message with the remedies that apply."""

    def remedies() -> list[str]:
        found = []
        if batch_size is None:
            found.append("use smaller batches")
        elif batch_size > 1:
            half = batch_size // 2
            found.append(
                f"training.batch_size={half} with training.grad_accum_steps={grad_accum_steps * 2} (the same result "
                f"in half the memory)"
            )
        found += _lower_precision(precision, device)
        if can_recompute():
            found.append("training.activation_checkpointing=true (the same result, a third more time)")
        return [*found, "a smaller model or shorter inputs"]

    return _explained(device, "", remedies)


def explain_out_of_memory_in_validation(
    *, batch_size: int | None, precision: str, device: torch.device
) -> AbstractContextManager[None]:
    """Return the same context for validation and evaluation, which have batches of their own.

    `batch_size` is that of loaders that etude makes; None if there are only loaders made elsewhere.
    """
    made_here = "" if batch_size is None or batch_size < 2 else f"training.batch_size={batch_size // 2}, or "
    smaller = f"smaller validation batches ({made_here}fewer samples per batch in the loader)"
    remedies = [smaller, *_lower_precision(precision, device), "shorter inputs"]
    return _explained(device, " in validation", lambda: remedies)


def explain_out_of_memory_of_model(device: torch.device) -> AbstractContextManager[None]:
    """Return the same context for making a model and its optimizer, and for moving them to the device."""
    remedies = ["a smaller model", "a device with more memory"]
    return _explained(device, " while the model was made or moved", lambda: remedies)


@contextlib.contextmanager
def explain_single_sample() -> Iterator[None]:
    """Turn torch's error about batch statistics of a single sample into one message with the remedies."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise TrainingError(
            "a batch norm layer was given a single sample, and needs two: the last batch of an epoch is smaller than "
            "the others, and each is divided among the processes of the run; set training.drop_last=true or choose "
            "another training.batch_size"
        ) from error


@contextlib.contextmanager
def _explained(device: torch.device, place: str, remedies: Callable[[], list[str]]) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, EtudeError) or not _is_out_of_memory(error):
            raise
        found = remedies()
        if device.type == "cuda":
            found = [*found, "see that no other process holds the device (nvidia-smi)"]
        raise TrainingError(f"out of memory on {device}{place}; remedies: {'; '.join(found)}") from error


_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "_status_alloc_failed")
"""How the allocators of torch and its libraries say it: CPU on Linux and Windows, CUDA, cuBLAS and cuDNN."""


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(sign in text for sign in _SIGNS)


def _lower_precision(precision: str, device: torch.device) -> list[str]:
    return ["training.precision=bf16"] if precision == "fp32" and device.type == "cuda" else []


@contextlib.contextmanager
def explain_worker_failure() -> Iterator[None]:
    """Turn the death of a worker, and an error in one, into a DataError of one line."""
    try:
        yield
    except Exception as error:
        if not (words := _of_death(str(error)) or _of_error(str(error))):
            raise
        raise DataError(words) from error


def _of_death(text: str) -> str:
    """Return what to say of torch's error about a worker that is gone; nothing if this is none."""
    found = re.search(
        r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: ([\w ]+)|exited unexp)", text
    )
    if found is None:
        return ""
    pid, how = found[1], found[2]
    if how == "Bus error":
        cause = "there is too little shared memory; enlarge /dev/shm"
    elif how in (None, "Killed"):
        cause = "most likely by the system's out-of-memory killer"
    else:
        cause = "by a fault in the dataset or a library that it uses, or by somebody else"
    return (
        f"a data worker (process {pid}) was killed ({how or 'it is gone'}): {cause}. Use fewer workers (num_workers) "
        f"or let them read less ahead (prefetch_factor), and resume the run from its last checkpoint"
    )


def _of_error(text: str) -> str:
    """Return what to say of an error that torch brought over from a worker, with the place where it was raised."""
    found = re.match(r"Caught \w+ in DataLoader worker process (\d+)\.\n", text)
    if found is None:
        return ""
    lines = [line for line in text.strip().splitlines() if line]
    places = re.findall(r'File "(.+)", line (\d+), in (\S+)', text)
    where = "{}:{} in {}".format(*places[-1]) if places else "its process"
    last = next((n for n in range(len(lines) - 1, 0, -1) if re.match(r"[\w.]+(: |$)", lines[n])), len(lines) - 1)
    return f"data worker {found[1]} failed: {' '.join(lines[last:])} ({where})"
