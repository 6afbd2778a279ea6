"""How much a step was: samples, tokens and FLOPs of its batches, counted beside the step, without asking the device.

The FLOPs of a forward pass are found without running it: one pass over fake tensors, which have shapes and no data,
takes no memory, no random numbers and some tens of milliseconds; the model itself is not touched. A training step
counts as three forward passes: the backward pass computes two products for every one of the forward pass. Activations
that are computed twice to save memory count once: model FLOPs say how fast the training gets on, not how busy the
device is.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from etude.core import HeadOutput, Task
from etude.core.batch import (
    DOCUMENT_STARTS,
    STREAM,
    Batch,
    JointBatch,
    count_samples,
    inputs_of,
    is_next_token,
    map_tensors,
    padding_mask_of,
)
from etude.core.model import ModelCall, unwrap
from etude.core.random import rng_state, set_rng_state

logger = logging.getLogger("etude")

STEP_PER_FORWARD = 3
"""FLOPs of a training step, in forward passes."""
MAX_LENGTHS = 3
"""Lengths that are counted; further ones are computed from these."""
MASK_KEYS = ("attention_mask", "attn_mask")

Run = Callable[[nn.Module, Batch], Any]
"""How a model is run on a batch."""


class ForwardFlops:
    """FLOPs of a model's forward pass over a batch of token ids, by the shape of the ids.

    The rows of a batch cost the same, and a row of length L costs a·L + b·L²: the first part is that of the layers,
    the second that of attention. Two lengths give a and b, so batches of any shape are known after a few. Streams of
    data are counted apart: the tasks that learn from them have heads of their own. `run` says how the model is run,
    if not by the names of its arguments.

    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))
    >>> ForwardFlops(model)({"input_ids": torch.zeros(2, 5, dtype=torch.long)}, rows=2, length=5)
    800.0
    """

    def __init__(self, model: nn.Module, run: Run | None = None) -> None:
        self.model = unwrap(model)
        self.run = run
        self._streams: dict[str | None, dict[int, float]] = {}
        """FLOPs of a row, by stream and length."""
        self._counts = True
        """False once counting has failed."""

    def __call__(self, batch: Batch, *, rows: int, length: int) -> float:
        """Return the FLOPs of a forward pass over `batch`, whose ids have this shape; estimated if need be."""
        stream = batch.get(STREAM) if isinstance(batch, Mapping) else None
        per_row = self._streams.setdefault(stream, {})
        known = per_row.get(length)
        if known is None:
            known = per_row[length] = self._find(batch, length, per_row)
        return known * rows

    def forget(self) -> None:
        """Count again: the model is run in another way from now on, for example with other heads."""
        self._streams.clear()

    def _find(self, batch: Batch, length: int, per_row: dict[int, float]) -> float:
        if length == 0:
            return 0.0
        if self._counts and len(per_row) < MAX_LENGTHS:
            try:
                return float(count_forward(self.model, batch, self.run))
            except Exception as error:
                # Code of any kind runs here, on tensors it was not written for; a missing number must not end a run.
                self._counts = False
                for counted in self._streams.values():
                    counted.clear()
                logger.debug("FLOPs estimated from the number of parameters: %s: %s", type(error).__name__, error)
        if not self._counts:
            return 2.0 * length * matrix_parameters(self.model)
        return _through(per_row, length)


def count_forward(model: nn.Module, batch: Batch, run: Run | None = None) -> int:
    """Return the FLOPs of a forward pass over the first row of `batch`, without data, and without touching the model.

    An output layer that the model leaves to the loss counts too. Raises whatever the model raises: one that looks at
    values, such as those of a mask, cannot run without them.
    """
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    device = next((param.device.type for param in model.parameters()), "cpu")

    def count(inputs: Batch) -> int:
        # With gradients, as in training: without, torch's own transformer layers take another path. Attention as two
        # products: the counter does not know the kernel of the CPU.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), fake, FlopCounterMode(display=False) as counter:
            _apply_heads((run or ModelCall(shadow))(shadow, inputs))
        return int(counter.get_total_flops())

    kept_rng = rng_state()
    try:
        with warnings.catch_warnings(), torch.autocast(device, enabled=False):
            warnings.simplefilter("ignore")
            with FakeCopyMode(fake):
                shadow = copy.deepcopy(model).eval()
            for module in shadow.modules():
                module._forward_hooks.clear()
                module._forward_pre_hooks.clear()
            with fake:
                row = map_tensors(
                    batch, lambda one: torch.zeros((1, *one.shape[1:]), dtype=one.dtype, device=one.device)
                )
            # Without padding masks first: they change no shapes, and many models ask whether they are all ones.
            try:
                return count(_without_masks(row))
            except Exception:
                return count(row)
    finally:
        set_rng_state(kept_rng)


def matrix_parameters(model: nn.Module) -> int:
    """Return the number of parameters that a token is multiplied with: all but embeddings, which are looked up.

    >>> matrix_parameters(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)))
    40
    """
    products = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - products
    return sum(param.numel() for param in model.parameters() if id(param) not in tables)


def _apply_heads(output: Any) -> None:
    """Compute the logits of output layers that were left to the loss."""
    if isinstance(output, HeadOutput):
        _ = output.logits
    elif isinstance(output, Mapping):
        for part in output.values():
            _apply_heads(part)


def _without_masks(batch: Batch) -> Batch:
    if not isinstance(batch, Mapping):
        return batch
    inputs = inputs_of(batch)
    return {
        key: value
        for key, value in batch.items()
        if key != DOCUMENT_STARTS  # the kernel that takes them asks for their values
        and (key not in MASK_KEYS or not isinstance(value, Tensor) or value.shape[-1:] != inputs.shape[-1:])
    }


def _through(known: Mapping[int, float], length: int) -> float:
    """Return a·L + b·L² with a and b of the shortest and the longest length known."""
    low, high = min(known), max(known)
    if low == high:
        return known[low] * length / low
    slope_low, slope_high = known[low] / low, known[high] / high
    slope = slope_low + (slope_high - slope_low) * (length - low) / (high - low)
    return float(round(max(slope, 0.0) * length))


ID_TYPES = frozenset({torch.int64, torch.int32})
"""What an embedding takes. Other integers, of pixels for one, are not token ids."""


def token_ids(batch: Batch) -> Tensor | None:
    """Return the token ids that the model sees, (B, L), or None if the batch holds something else.

    >>> token_ids({"tokens": torch.tensor([[5, 6, 7]])})
    tensor([[5, 6]])
    >>> token_ids((torch.zeros(2, 3), torch.tensor([0, 1]))) is None
    True
    """
    ids = inputs_of(batch)
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in ID_TYPES:
        return None
    return ids[:, :-1] if isinstance(batch, Mapping) and is_next_token(batch) else ids


def count_tokens(batch: Batch, ids: Tensor) -> Tensor | int:
    """Return how many of these ids are no padding: a number, or a tensor on the device if only a mask tells.

    >>> batch = {"input_ids": torch.tensor([[5, 6], [7, 0]]), "attention_mask": torch.tensor([[1, 1], [1, 0]])}
    >>> count_tokens(batch, token_ids(batch))
    tensor(3)
    """
    mask = padding_mask_of(batch)
    if mask is None and isinstance(batch, Mapping) and isinstance(documents := batch.get("document_ids"), Tensor):
        mask = documents >= 0  # packed documents: padding belongs to none
    return ids.numel() if mask is None or mask.shape != ids.shape else mask.count_nonzero()


class Amounts(NamedTuple):
    """Amounts of one step on this rank."""

    samples: int = 0
    tokens: Tensor | int = 0
    """Padding left out; 0 where batches have none."""
    forward_flops: float = 0.0
    """FLOPs of the forward passes, as far as they are counted: for batches of tokens."""
    uncounted: int = 0
    """Batches that do not tell their samples; those of all others are in `samples`."""


NO_AMOUNTS = Amounts()


class Meter:
    """Counts the samples, tokens and FLOPs of steps; nothing waits for the device."""

    def __init__(self, task: Task, flops: ForwardFlops | None = None) -> None:
        """Without `flops` none are counted."""
        self._task = task
        self._flops = flops
        self._version = task.version  # for which FLOPs were counted

    def __call__(self, micro_batches: Sequence[Batch]) -> Amounts:
        """Return the amounts of a step."""
        if self._flops is not None and self._version != self._task.version:
            self._flops.forget()
            self._version = self._task.version
        samples, uncounted, flops = 0, 0, 0.0
        tokens: Tensor | int = 0
        for batch in micro_batches:
            count = count_samples(batch)
            if count is None:
                uncounted += 1
            else:
                samples += count
            for part in batch if isinstance(batch, JointBatch) else (batch,):
                if (ids := token_ids(part)) is not None:
                    tokens = tokens + count_tokens(part, ids)
                    if self._flops is not None:
                        flops += self._flops(part, rows=ids.shape[0], length=ids.shape[1])
        return Amounts(samples, tokens, flops, uncounted)
