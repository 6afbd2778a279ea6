"""Run a step once more, and find where its first non-finite value comes from; nothing of the run changes."""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from etude.core import Batch, Terms
from etude.core.batch import is_empty, num_samples, tensors_in
from etude.core.buffers import BufferGuard
from etude.core.division import divide
from etude.core.forms import parts_of
from etude.core.model import unwrap
from etude.core.random import rng_state, set_rng_state
from etude.engine.step import Step

Random = dict[str, Tensor]
"""States of torch's generators."""
FINITE = "run again, the step is finite: the fault depends on something besides weights, batch and torch's generators"

FINITE_AT_FIRST = (
    "run again, the first pass of the step is finite: its second one, at weights that the optimizer has moved, was "
    "not; lower rho"
)


def torch_random(device: torch.device) -> Random:
    """Return the states of torch's generators on the CPU and the device, without waiting."""
    found = {"torch": torch.get_rng_state()}
    return found | {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else found


@dataclass(slots=True)
class Finding:
    """Where the first non-finite value comes from."""

    text: str = ""
    micro_batch: int = 0
    """Index of the micro-batch."""
    rows: list[int] = field(default_factory=list)
    """The samples of the micro-batch that are affected, if they can be distinguished."""
    sizes: list[int] = field(default_factory=list)
    """The samples of every micro-batch."""


class Search:
    """Runs the batches of a step forward and backward, with hooks on every layer.

    Infinite masks and NaN in place of missing labels are no fault while what is computed from them is finite.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.model = unwrap(step.model)
        self._names = {module: name for name, module in self.model.named_modules()}
        self._found = Finding()
        self._batch: Batch = None
        self._bad_part: tuple[str, list[int]] | None = None
        """The first part of the batch with non-finite values, and its samples with them."""
        self._bad_inputs: dict[nn.Module, list[int]] = {}
        """The samples with non-finite values by layer, for layers whose input has such values."""
        self._seen: list[Tensor] = []
        """Keeps tensors, so that their ids stay theirs."""
        self._users: dict[int, str] = {}
        """The innermost layer that gets a tensor as its input, by the tensor's id."""
        self._first_gradient = self._first_param = ""

    def run(self, batches: Sequence[Batch], random: Random | None = None) -> Finding:
        """Find the first non-finite value of a step with these batches, drawing from `random`."""
        batches = self._divided(batches)
        self._found.sizes = [num_samples(batch) for batch in batches]
        with self._without_effect():
            with self._hooks():
                self._set_random(random)
                self._step(batches)
            if not self._found.text and (self._first_gradient or self._first_param):
                self._set_random(random)
                self._found.text = self._in_backward(batches)
        return self._found

    def _divided(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the micro-batches of this rank that fit into memory, without the other ranks."""
        size, ranks = self.step.splitter.size, self.step.world.size
        if size is None:
            return [*batches]
        most = max(1, size // ranks)
        return [part for batch in batches for part in divide(batch, -(-num_samples(batch) // most))]

    # --- one step

    def _step(self, batches: Sequence[Batch]) -> None:
        for place, batch in enumerate(batches):
            if is_empty(batch):  # the share of this rank
                continue
            self._batch, self._found.micro_batch = batch, place
            self._see_batch(batch)
            terms = self._terms(batch)
            bad = [name for name, term in terms.items() if not _is_finite(term.sum)]
            if bad and not self._found.text:
                self._blame_batch_or(
                    f"the output of the model is finite, but {', '.join(bad)} is not; check the loss and the labels",
                    [],
                )
            if self._found.text:
                return
            self._backward(terms)
            if self._first_gradient or self._first_param:
                return
        self._found.micro_batch = 0

    def _terms(self, batch: Batch) -> Terms:
        with self.step.precision.autocast():
            return self.step.task(self.model, batch, metrics=False)

    def _backward(self, terms: Terms) -> None:
        losses = [term.sum * term.weight for term in terms.values() if term.is_weighted and term.sum.requires_grad]
        if losses:
            self.step.precision.scale(torch.stack([loss.sum() for loss in losses]).sum()).backward()

    def _in_backward(self, batches: Sequence[Batch]) -> str:
        """Return what the backward pass does, by torch's anomaly mode."""
        made = ""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                with torch.autograd.detect_anomaly(check_nan=True):
                    for batch in batches:
                        self._backward(self._terms(batch))
            except RuntimeError as error:
                if operator := re.search(r"Function '(\w+)'", str(error)):
                    made = f"; {operator[1]} returned NaN{_origin([str(one.message) for one in said])}"
        param = f"; the first parameter with such a gradient is {self._first_param}" * bool(self._first_param)
        what = self._first_gradient or "the gradients are not"
        batch = "" if self._bad_part is None else f"; the {self._bad_part[0]}"
        return f"the loss is finite, but {what}{param}{made}{batch}"

    # --- hooks

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        handles: list[Any] = []
        for module in self._names:
            handles.append(module.register_forward_pre_hook(self._see_input, with_kwargs=True))
            handles.append(module.register_forward_hook(self._see_output, with_kwargs=True))
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                handles.append(param.register_hook(partial(self._see_param, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see_batch(self, batch: Batch) -> None:
        bad = ((name, tensor) for name, tensor in _named(batch) if not _is_finite(tensor))
        name, tensor = next(bad, ("", None))
        said = f"batch contains non-finite values (part {name or 0})"
        self._bad_part = None if tensor is None else (said, self._rows(tensor))

    def _blame_batch_or(self, text: str, rows: list[int]) -> None:
        """Report the batch if it contains non-finite values, and else this."""
        if self._bad_part is not None:
            text, rows = f"the {self._bad_part[0]}", self._bad_part[1]
        self._found.text, self._found.rows = text, rows

    def _see_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [*tensors_in((args, kwargs))]
        for tensor in tensors:
            self._seen.append(tensor)
            self._users[id(tensor)] = self._name(module)
        self._bad_inputs.pop(module, None)
        if not self._found.text and (bad := [one for one in tensors if not _is_finite(one)]):
            self._bad_inputs[module] = self._rows(bad[0])  # by now: a layer may work in place

    def _see_output(self, module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any) -> None:
        for tensor in tensors_in(output):
            self._seen.append(tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._see_gradient, self._name(module), id(tensor)))
            if not self._found.text and not _is_finite(tensor):
                self._blame(module, tensor)

    def _blame(self, module: nn.Module, output: Tensor) -> None:
        """Report why the first output that is not finite is not."""
        own = [f"parameter {name}" for name, param in module.named_parameters() if not _is_finite(param)]
        if not own and (rows := self._bad_inputs.get(module)) is not None:
            text = f"the input of {self._name(module)} is not finite, although the output of every earlier layer is; "
            self._blame_batch_or(f"{text}check the code before it", rows)
            return
        own += [f"buffer {name}" for name, buffer in module.named_buffers() if bool(buffer.isnan().any())]
        why = f"its {own[0]} is not finite" if own else "its inputs are finite"
        self._found.rows = [] if own else self._rows(output)
        self._found.text = f"{self._name(module)} is the first layer whose output is not finite; {why}"

    def _see_gradient(self, name: str, key: int, gradient: Tensor) -> None:
        if not self._first_gradient and not self._first_param and not _is_finite(gradient):
            user = self._users.get(key)
            where = f"in the backward pass of {user}" if user else f"in the code after {name}"
            self._found.rows = self._rows(gradient)
            self._first_gradient = f"the gradient is not: it begins {where}"

    def _see_param(self, name: str, gradient: Tensor) -> None:
        if not self._first_param and not _is_finite(gradient):
            self._first_param = name

    def _rows(self, tensor: Tensor) -> list[int]:
        """Return the samples in which a tensor is not finite; none if its rows are not the samples, or all are."""
        size = num_samples(self._batch)
        if tensor.dim() == 0 or tensor.shape[0] != size:
            return []
        found: list[int] = (~tensor.detach().reshape(size, -1).isfinite()).any(dim=1).nonzero().flatten().tolist()
        return found

    def _name(self, module: nn.Module) -> str:
        return f"{self._names[module] or 'the model'} ({type(module).__name__})"

    # --- no effect on the run

    @contextmanager
    def _without_effect(self) -> Iterator[None]:
        """Restore gradients, buffers and generators; run compiled models eagerly, since hooks need their layers."""
        buffers, random = BufferGuard(self.model, caches=True), rng_state()
        buffers.remember()
        params = [*self.model.parameters()]
        gradients = [param.grad for param in params]
        for param in params:
            param.grad = None
        with ExitStack() as stack:
            if self.model._compiled_call_impl is not None:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            try:
                yield
            finally:
                for param, gradient in zip(params, gradients, strict=True):
                    param.grad = gradient
                buffers.restore(only_changed=True)
                set_rng_state(random)
                self._seen, self._users, self._bad_inputs, self._batch = [], {}, {}, None

    def _set_random(self, random: Random | None) -> None:
        if random is not None:
            torch.set_rng_state(random["torch"])
            if "cuda" in random:
                torch.cuda.set_rng_state(random["cuda"], self.step.updater.device)


def _named(batch: Batch, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch with their paths."""
    if isinstance(batch, Tensor):
        yield path, batch
    elif (parts := parts_of(batch)) is not None:
        for key, value in parts.items():
            yield from _named(value, f"{path}.{key}" if path else str(key))
    else:
        yield from ((path, tensor) for tensor in tensors_in(batch))


def _origin(warned: list[str]) -> str:
    """Return the line of code that anomaly mode blames, in brackets; the last one that is not torch's own."""
    lines = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s+(.+)', "\n".join(warned))
    own = [one for one in lines if "/torch/" not in one[0] and "/etude/" not in one[0]]
    return f" ({own[-1][2]} in {own[-1][0]}:{own[-1][1]})" if own else ""


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())  # a host synchronisation: the step is run only to be looked at
