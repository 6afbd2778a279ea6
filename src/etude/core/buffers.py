"""Restoring running statistics and other buffers after a skipped update or a trial forward pass.

One batch with a NaN would leave NaN in batch norm statistics for good, although the update itself is skipped.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from etude.core.random import aside

Place = tuple[nn.Module, str]


class BufferGuard:
    """Keeps copies of a model's persistent buffers; costs nothing for a model without buffers.

    With `caches` it also copies non-persistent buffers.

    >>> norm = nn.BatchNorm1d(2)
    >>> guard = BufferGuard(norm)
    >>> guard.remember()
    >>> _ = norm(torch.full((3, 2), float("nan")))
    >>> guard.put_back(torch.tensor(1.0))
    >>> norm.running_mean, norm.num_batches_tracked
    (tensor([0., 0.]), tensor(0))
    """

    def __init__(self, model: nn.Module, *, caches: bool = False) -> None:
        self._places: list[Place] = [
            (module, name)
            for module in model.modules()
            for name in module._buffers
            if caches or name not in module._non_persistent_buffers_set
        ]
        self._before: list[Tensor | None] = [None] * len(self._places)

    def remember(self) -> None:
        """Copy the buffers, before the forward pass."""
        if self._places:
            self._copy()

    @torch.no_grad()
    def _copy(self) -> None:
        """Copy the buffers into memory that is reused in every step."""
        before, now = [], []
        for index, (module, name) in enumerate(self._places):
            buffer, copy = module._buffers[name], self._before[index]
            if buffer is not None and copy is not None and not is_lazy(buffer) and _are_alike(buffer, copy):
                before.append(copy)
                now.append(buffer)
            else:
                self._before[index] = _copy_of(buffer)
        if before:
            torch._foreach_copy_(before, now)

    @torch.no_grad()
    def restore(self, *, only_changed: bool = False) -> None:
        """Restore the remembered values, with `only_changed` those of buffers that differ; that synchronises.

        Writing to a buffer that is part of an autograd graph makes its backward pass fail.
        """
        for (module, name), before in zip(self._places, self._before, strict=True):
            if not (only_changed and _is_same(module._buffers[name], before)):
                _put((module, name), before)

    def put_back(self, skipped: Tensor) -> None:
        """Restore the remembered values if `skipped` is 1; decided on the device, without a synchronisation."""
        if not self._places:
            return
        if not skipped.is_cpu:
            self.choose(skipped)
        elif skipped.item():
            self.restore()

    @torch.no_grad()
    def choose(self, skipped: Tensor) -> None:
        """Do what `put_back` does on the device of `skipped`, with few kernels for any number of buffers."""
        bad = skipped.bool()
        usual: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        changed: list[tuple[Place, Tensor | None]] = []
        for place, before in zip(self._places, self._before, strict=True):
            module, name = place
            now = module._buffers[name]
            if now is None and before is None:
                continue
            if now is None or before is None or not _are_alike(now, before) or now.device != skipped.device:
                changed.append((place, before))
            elif now.is_contiguous() and before.is_contiguous():
                usual.setdefault(now.dtype, []).append((now.view(-1), before.view(-1)))
            elif overlaps(now):
                module._buffers[name] = torch.where(bad, before, now)
            else:
                torch.where(bad, before, now, out=now)
        for pairs in usual.values():
            nows, befores = (list(tensors) for tensors in zip(*pairs, strict=True))
            chosen = torch.where(bad, torch.cat(befores), torch.cat(nows))
            torch._foreach_copy_(nows, torch.split_with_sizes(chosen, [one.numel() for one in nows]))
        # Buffers were created, dropped, resized or moved in this step, or lie on another device than the update: the
        # host must decide, so it waits for the device.
        if changed and bad.item():
            for place, before in changed:
                _put(place, before)


def _copy_of(buffer: Tensor | None) -> Tensor | None:
    """Return a copy; an uninitialised (lazy) buffer is returned itself, as it has no values yet."""
    return buffer if buffer is None or is_lazy(buffer) else buffer.detach().clone()


def _put(place: Place, before: Tensor | None) -> None:
    module, name = place
    now = module._buffers[name]
    if now is before:
        if now is not None and isinstance(module, _NormBase):  # it was lazy, and was initialised in this step
            module.reset_running_stats()
    elif now is not None and before is not None and _are_alike(now, before) and not overlaps(now):
        now.copy_(before)
    else:
        module._buffers[name] = None if before is None else before.clone()


def _is_same(now: Tensor | None, before: Tensor | None) -> bool:
    if now is None or before is None:
        return now is before
    if is_lazy(now) or is_lazy(before) or not _are_alike(now, before):
        return False
    return now.is_meta or torch.equal(now, before)


def _are_alike(now: Tensor, before: Tensor) -> bool:
    if now is before:  # lazy
        return False
    return now.shape == before.shape and now.dtype == before.dtype and now.device == before.device


def overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory, as in an expanded tensor: such a tensor cannot be written in place."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@contextmanager
def probing(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Run the model without side effects: no gradients, no compilation; modes, buffers and RNG state are restored."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    guard = BufferGuard(model, caches=True)
    guard.remember()
    model.train(training)
    # Importing torch._dynamo takes a second; code that has compiled something has imported it already.
    eagerly = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        with torch.no_grad(), aside(0), torch.random.fork_rng(list(devices)), eagerly:
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            guard.restore(only_changed=True)
