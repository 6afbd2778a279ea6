"""When a device or a layer refuses: what happened and what to do, in words that fit this run."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from etude.core import EtudeError, TrainingError


def explain_out_of_memory(
    *,
    batch_size: int | None,
    grad_accum_steps: int,
    precision: str,
    device: torch.device,
    can_recompute: bool = False,
) -> AbstractContextManager[None]:
    """Return a context that turns an out-of-memory error in training into one message with the remedies that apply."""
    remedies = []
    if batch_size is None:
        remedies.append("use smaller batches")
    elif batch_size > 1:
        half = batch_size // 2
        remedies.append(
            f"training.batch_size={half} with training.grad_accum_steps={grad_accum_steps * 2} (the same result in "
            f"half the memory)"
        )
    remedies += _lower_precision(precision, device)
    if can_recompute:
        remedies.append("training.activation_checkpointing=true (the same result, a third more time)")
    return _explained(device, "", [*remedies, "a smaller model or shorter inputs"])


def explain_out_of_memory_in_validation(
    *, batch_size: int | None, precision: str, device: torch.device
) -> AbstractContextManager[None]:
    """Return the same context for validation and evaluation, which have batches of their own.

    `batch_size` is that of loaders that etude makes; None if there are only loaders made elsewhere.
    """
    made_here = "" if batch_size is None or batch_size < 2 else f"training.batch_size={batch_size // 2}, or "
    remedies = [f"smaller validation batches ({made_here}fewer samples per batch in the loader)"]
    return _explained(device, " in validation", [*remedies, *_lower_precision(precision, device), "shorter inputs"])


def explain_out_of_memory_of_model(device: torch.device) -> AbstractContextManager[None]:
    """Return the same context for making a model and its optimizer, and for moving them to the device."""
    return _explained(device, " while the model was made or moved", ["a smaller model", "a device with more memory"])


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
def _explained(device: torch.device, place: str, remedies: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, EtudeError) or not _is_out_of_memory(error):
            raise
        if device.type == "cuda":
            remedies = [*remedies, "see that no other process holds the device (nvidia-smi)"]
        raise TrainingError(f"out of memory on {device}{place}; remedies: {'; '.join(remedies)}") from error


_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "_status_alloc_failed")
"""How the allocators of torch and its libraries say it: CPU on Linux and Windows, CUDA, cuBLAS and cuDNN."""


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(sign in text for sign in _SIGNS)


def _lower_precision(precision: str, device: torch.device) -> list[str]:
    return ["training.precision=bf16"] if precision == "fp32" and device.type == "cuda" else []
