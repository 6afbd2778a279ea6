"""When a device or a layer refuses: what happened and what to do, in words that fit this run."""

import contextlib
from collections.abc import Iterator

import torch

from etude.core import TrainingError


@contextlib.contextmanager
def explain_out_of_memory(
    *,
    batch_size: int | None,
    grad_accum_steps: int,
    precision: str,
    device: torch.device,
    can_recompute: bool = False,
) -> Iterator[None]:
    """Turn an out-of-memory error inside this block into one message with the remedies that apply."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        remedies = _remedies(batch_size, grad_accum_steps, precision, device, can_recompute)
        raise TrainingError(f"out of memory on {device}; remedies: {remedies}") from error


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


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return "DefaultCPUAllocator: can't allocate memory" in text or "out of memory" in text.lower()


def _remedies(
    batch_size: int | None, grad_accum_steps: int, precision: str, device: torch.device, can_recompute: bool
) -> str:
    remedies = []
    if batch_size is None:
        remedies.append("use smaller batches")
    elif batch_size > 1:
        half = batch_size // 2
        remedies.append(
            f"training.batch_size={half} with training.grad_accum_steps={grad_accum_steps * 2} (the same result in "
            f"half the memory)"
        )
    if precision == "fp32" and device.type == "cuda":
        remedies.append("training.precision=bf16")
    if can_recompute:
        remedies.append("training.activation_checkpointing=true (the same result, a third more time)")
    remedies.append("a smaller model or shorter inputs")
    if device.type == "cuda":
        remedies.append("see that no other process holds the device (nvidia-smi)")
    return "; ".join(remedies)
