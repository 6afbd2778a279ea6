"""Prediction: the outputs of a model for every sample of a data set, in order, on the CPU."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from etude.core import Batch, DataError, Loader, Task, TrainingError
from etude.core.batch import num_samples, padding_mask_of
from etude.core.forms import kind_of, parts_of
from etude.core.model import unwrap
from etude.core.random import aside
from etude.distributed import World
from etude.distributed.lockstep import rounds
from etude.distributed.sharing import share_buffers
from etude.distributed.world import note_progress
from etude.engine.evaluation import eval_mode
from etude.engine.explain import explained
from etude.engine.precision import MixedPrecision

Leaves = dict[str, Tensor]
"""The tensors of an output; the key is the JSON list of the keys and indices that lead to it."""
_MASK = "mask"
"""The key of the mask of padding among them."""


@explained
def predict(
    model: nn.Module,
    task: Task,
    loader: Loader,
    *,
    precision: MixedPrecision | None = None,
    world: World | None = None,
) -> Any:
    """Return the outputs for one epoch of `loader`, concatenated over batches and ranks, on the CPU.

    A tensor stays a tensor; a tuple or mapping keeps its tensors. An output with an attribute `logits` becomes these.
    Scalars, such as a loss, and other values are dropped, and half precision becomes float32. Outputs (B, L, …) of
    batches with a mask of padding (B, L) lose their rows of padding, since its length depends on the other samples.
    Where samples have different shapes, the result is a list with one tensor per sample. The model runs in eval mode
    and without gradients; modes and random generators are restored.

    With several ranks each predicts its share of every batch, and all of them return everything. Raises DataError if
    there are no samples, and TrainingError if the output has no tensor with a row for each sample.
    """
    precision = precision if precision is not None else MixedPrecision("fp32")
    world = world if world is not None else World()
    model = unwrap(model)  # nothing inside may synchronise the ranks
    if world.size > 1:
        share_buffers(model, world)
    found: list[Leaves] = []
    with eval_mode(model), torch.no_grad(), aside(0):
        batches = loader.iterate(epoch=0)
        try:
            for batch, has_samples in rounds(batches, world):
                output = None
                if has_samples or world.in_lockstep:
                    with precision.autocast():
                        output = task.predict(model, batch)
                found.append(_leaves(output, batch) if has_samples else {})
                note_progress()
        finally:
            batches.close()
    return _together(_over_ranks(found, world))


def readable(output: Any) -> Any:
    """Return an output as nested dicts, tuples and tensors: what `predict` keeps of it.

    >>> readable({"a": torch.ones(2), "loss": torch.tensor(0.5), "text": "no"})
    {'a': tensor([1., 1.])}
    """
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor) and not isinstance(output, Tensor):
        return logits
    if isinstance(output, Tensor) or (parts := parts_of(output)) is None:
        return output
    kept = {key: readable(value) for key, value in parts.items()}
    kept = {key: value for key, value in kept.items() if _has_rows(value)}
    return tuple(kept.values()) if kind_of(output) == "tuple" else {str(key): value for key, value in kept.items()}


def _has_rows(value: Any) -> bool:
    return value.dim() > 0 if isinstance(value, Tensor) else isinstance(value, (dict, tuple)) and bool(value)


def _leaves(output: Any, batch: Batch) -> Leaves:
    """Return the tensors of an output on the CPU. Raises TrainingError unless each has a row for each sample."""
    rows, found = num_samples(batch), {}
    for path, tensor in tensors_in_output(readable(output)):
        if tensor.dim() == 0 or len(tensor) != rows:
            where = f" at {'.'.join(map(str, path))}" if path else ""
            raise TrainingError(
                f"predict needs a row of output for each sample, but for {rows} samples the model returned a tensor of "
                f"shape {tuple(tensor.shape)}{where}; return only outputs of samples"
            )
        is_half = tensor.is_floating_point() and tensor.element_size() < 4
        found[json.dumps(path)] = tensor.detach().to("cpu", torch.float32 if is_half else tensor.dtype)
    if not found:
        raise TrainingError(
            f"predict found no tensors in the model's output, a {type(output).__name__}; return a tensor, or a tuple "
            "or mapping of tensors"
        )
    if (mask := _mask_of(batch, found)) is not None:
        found[_MASK] = mask.detach().to("cpu") != 0
    return found


def _mask_of(batch: Batch, found: Leaves) -> Tensor | None:
    """Return the mask of padding that fits the outputs: with or without the first token, which is no target."""
    whole = padding_mask_of(dict(batch, labels=None)) if kind_of(batch) == "mapping" else None
    masks = (padding_mask_of(batch), whole)
    return next((one for one in masks if one is not None and any(_fits(part, one) for part in found.values())), None)


def _fits(part: Tensor, mask: Tensor) -> bool:
    return part.dim() > 2 and part.shape[:2] == mask.shape


def tensors_in_output(
    output: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Tensor]]:
    """Yield the tensors of a readable output, each with the keys and indices that lead to it."""
    if isinstance(output, Tensor):
        yield path, output
    elif isinstance(output, (tuple, dict)):
        for key, value in output.items() if isinstance(output, dict) else enumerate(output):
            yield from tensors_in_output(value, (*path, key))


def _over_ranks(batches: list[Leaves], world: World) -> list[Leaves]:
    """Return the outputs of all ranks, in the order of the data: every rank has a slice of each batch."""
    if world.size == 1:
        return batches
    shapes = [{name: [str(one.dtype)[6:], *one.shape] for name, one in leaves.items()} for leaves in batches]
    described = [json.loads(text) for text in world.gather_text(json.dumps(shapes))]
    names = dict.fromkeys(name for rank in described for leaves in rank for name in leaves)
    result: list[Leaves] = [{} for _ in range(world.size * len(batches))]
    for name in names:
        own = [leaves[name].contiguous().view(-1).view(torch.uint8) for leaves in batches if name in leaves]
        gathered = world.gather_bytes(torch.cat(own) if own else torch.empty(0, dtype=torch.uint8))
        for rank, (content, leaves) in enumerate(zip(gathered, described, strict=True)):
            begin = 0
            for number, entry in enumerate(leaves):
                if name in entry:
                    tensor = torch.empty(entry[name][1:], dtype=getattr(torch, entry[name][0]))
                    size = tensor.numel() * tensor.element_size()
                    tensor.view(-1).view(torch.uint8).copy_(content[begin : begin + size])
                    result[number * world.size + rank][name], begin = tensor, begin + size
    return result


def _together(batches: list[Leaves]) -> Any:
    """Return the outputs of all batches in the structure of the model's output."""
    filled = [leaves for leaves in batches if leaves]
    if not filled:
        raise DataError("there are no samples to predict: the data is empty")
    masks = [leaves.pop(_MASK, None) for leaves in filled]
    names = list(filled[0])
    if any(list(leaves) != names for leaves in filled):
        raise TrainingError("the model's outputs for different batches have different keys; return the same keys")
    result: dict[Any, Any] = {}
    for name in names:
        _put(result, [None, *json.loads(name)], _joined([leaves[name] for leaves in filled], masks))
    return _as_tuples(result[None])


def _joined(parts: list[Tensor], masks: list[Tensor | None]) -> Tensor | list[Tensor]:
    """Return the rows of all samples as a tensor, or as a list if they have different shapes."""
    rows = [row for part in parts for row in part]
    real = [mask for part, mask in zip(parts, masks, strict=True) if mask is not None and _fits(part, mask)]
    if len(real) == len(parts):
        kept = [row for mask in real for row in mask]
        rows = [row if mask.all() else row[mask] for row, mask in zip(rows, kept, strict=True)]
        same = len({(row.shape, row.dtype) for row in rows}) == 1
        return torch.stack(rows) if same else rows
    same = len({(part.shape[1:], part.dtype) for part in parts}) == 1
    return torch.cat(parts) if same else rows


def _put(tree: dict[Any, Any], path: list[Any], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _as_tuples(tree: Any) -> Any:
    """Return nested dicts with those that have integer keys as tuples."""
    if not isinstance(tree, Mapping):
        return tree
    values = {key: _as_tuples(value) for key, value in tree.items()}
    return tuple(values.values()) if all(isinstance(key, int) for key in values) else values
