"""Running any language model without its output layer, so that the loss can apply it chunk by chunk.

While the model runs, its output layer returns its input. The model's logits are then hidden states, which go to the
loss with the layer's weights as a `HeadOutput`. This is correct only for models that return the layer's output
unchanged, which is checked on the first batch.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from etude.core.batch import Batch, map_tensors, tensors_in
from etude.core.buffers import probing
from etude.core.errors import TrainingError
from etude.core.model import HeadOutput, ModelCall, linked, unwrap, whole
from etude.losses.strategies import head_of, logits_of

FEW_POSITIONS = 16
"""Number of positions of the first sample that are used for the check."""
LARGE = 30_000.0
"""Logits of this size show whether a model caps them."""


@runtime_checkable
class NamesItsHead(Protocol):
    """A model that tells which module is its output layer, like those of Hugging Face."""

    def get_output_embeddings(self) -> Any:
        """Return the output layer, or None."""


class FusedHead:
    """A model's output layer, and a way to run the model without it.

    `name` is the layer's name in the model, such as `lm_head`; True uses the model's `get_output_embeddings`.
    """

    def __init__(self, model: nn.Module, name: str | bool = True) -> None:
        """Find the layer; raise TrainingError if there is none or if it is not linear."""
        self.model = unwrap(model)
        self.head = find_head(self.model, name)
        self._checked = False

    def run(self, call: ModelCall, model: nn.Module, batch: Batch) -> Any:
        """Return the output of `model`, with a `HeadOutput` instead of its logits.

        Raises TrainingError if the model changes its logits before it returns them.
        """
        if not self._checked:
            self.check(call, batch)
        with self._forward(lambda hidden: linked(hidden, self.head.weight, self.head.bias)):
            output = call(model, batch)
        head = head_of(output)
        if head is None:
            hidden, weight = logits_of(output), whole(self.head.weight)
            if not torch.is_autocast_enabled(hidden.device.type):
                hidden = hidden.to(weight.dtype)  # many models convert their supposed logits to float32
            head = HeadOutput(hidden, weight, None if self.head.bias is None else whole(self.head.bias))
        return {**output, "logits": head} if isinstance(output, Mapping) else head

    @contextmanager
    def _forward(self, function: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Within this block the layer computes `function`. torch.compile keeps a separate graph for each function."""

        def forward(_: nn.Module, hidden: Tensor) -> Tensor:
            return function(hidden)

        before = self.head.__dict__.get("forward")
        hooks = self.head._forward_pre_hooks, self.head._forward_hooks
        if (
            whole(self.head.weight) is not self.head.weight
        ):  # of tensor parallelism: they divide what the layer returns
            self.head._forward_pre_hooks, self.head._forward_hooks = OrderedDict(), OrderedDict()
        self.head.forward = MethodType(forward, self.head)  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.head._forward_pre_hooks, self.head._forward_hooks = hooks
            del self.head.forward
            if before is not None:
                self.head.forward = before  # type: ignore[method-assign]

    def check(self, call: ModelCall, batch: Batch) -> None:
        """Raise TrainingError if the model changes its logits before it returns them.

        The first positions of a batch are run with an output layer that returns large numbers, which must come out
        unchanged: one per class in evaluation, one per feature in training. Synchronises with the device once.
        """
        few = few_positions(batch)
        given: list[Tensor] = []

        def large(width: int, hidden: Tensor) -> Tensor:
            shape = (*hidden.shape[:-1], width)
            values = torch.linspace(-LARGE, LARGE, math.prod(shape), device=hidden.device, dtype=torch.float32)
            given.append(values.view(shape).to(hidden.dtype))
            return given[-1]

        for training, width in ((False, self.head.out_features), (True, self.head.in_features)):
            given.clear()
            try:
                with probing(self.model, training=training), self._forward(partial(large, width)):
                    output = call(self.model, few)
            except Exception as error:
                raise _unfit(f"without its output layer it fails with {type(error).__name__}: {error}") from error
            if head_of(output) is not None:
                break  # the model itself already leaves its output layer to the loss
            if len(given) != 1:
                raise _unfit(f"it runs its output layer {len(given)} times")
            found = logits_of(output)
            if found.shape != given[0].shape or not torch.equal(found, given[0].to(found.dtype)):
                when = "in training " if training else ""
                raise _unfit(
                    f"{when}it changes what its output layer returns (a factor, a soft cap, a slice, dropout)"
                )
        self._checked = True


def find_head(model: nn.Module, name: str | bool) -> nn.Linear:
    """Return the output layer by name, or the one that the model itself reports; raise TrainingError."""
    if isinstance(name, str):
        head = dict(model.named_modules()).get(name)
        found = f"is a {type(head).__name__}" if head is not None else "does not exist"
        trouble = f"fused_head: the module {name!r} of {type(model).__name__} {found}"
    else:
        head = model.get_output_embeddings() if isinstance(model, NamesItsHead) else None
        trouble = f"fused_head: {type(model).__name__} does not report its output layer by get_output_embeddings()"
    if isinstance(head, nn.Linear) and getattr(head.forward, "__func__", None) is nn.Linear.forward:
        return head
    layers = [known for known, module in model.named_modules() if isinstance(module, nn.Linear)]
    choice = f"the last of its linear layers are {', '.join(layers[-3:])}" if layers else "it has no linear layers"
    raise TrainingError(f"{trouble}; set the name of a linear layer ({choice}), or set fused_head: false")


def few_positions(batch: Batch) -> Batch:
    """Return the first sample of a batch; only its beginning, if the batch has sequences of one length.

    >>> few_positions({"input_ids": torch.zeros(8, 512), "labels": torch.zeros(8, 512)})["labels"].shape
    torch.Size([1, 16])
    >>> few_positions((torch.zeros(8, 512), torch.zeros(8)))[0].shape
    torch.Size([1, 512])
    """
    shapes = {tensor.shape for tensor in tensors_in(batch)}
    whole = len(shapes) != 1 or any(len(shape) != 2 for shape in shapes)

    def cut(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            return tensor
        return tensor[:1] if whole else tensor[:1, :FEW_POSITIONS]

    return map_tensors(batch, cut)


def _unfit(why: str) -> TrainingError:
    return TrainingError(f"fused_head cannot be used with this model: {why}; set fused_head: false")
