"""A model as the engine sees it: how it is called, how it returns logits, parameter names without wrappers.

x                                  model(x)
(x,) · (x, labels) · DataBatch     model(x)
(x, y, …, labels)                  model(x, y, …)
{"tokens", "types", "attn_mask"}   model(tokens[:, :-1], types[:, :-1], attn_mask[:, :-1])
{"input_ids", …} · any mapping     model(**inputs), by the names of `forward`, without the labels;
                                   attention_mask and attn_mask are the same thing
any other object                   model(batch): a dataclass, a graph, a PackedSequence …
"""

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etude.core.batch import LABEL_KEYS, SETTING_KEYS, Batch, JointBatch, is_next_token, targets_of
from etude.core.errors import TrainingError
from etude.core.forms import kind_of

OTHER_NAMES = (("attn_mask", "attention_mask"), ("attention_mask", "attn_mask"))
"""(parameter, key): synonyms of the attention mask, so that either name in a batch fits either parameter."""
MAIN_KEYS = ("input_ids", "tokens", "input")
"""Keys of the main input; if `forward` uses another name for it, it is passed by position."""
OTHER_INPUTS = frozenset(
    {"position_ids", "token_type_ids", "past_key_values", "inputs_embeds", "labels", "head_mask"}
)
"""Parameter names that are never types or a mask, whatever their position."""
WRAPPED_MODULES = ("_orig_mod", "_fsdp_wrapped_module")
"""Names under which torch.compile and FSDP hold the module they wrap."""
_WRAPPER_PARTS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Name components that torch's wrappers add (compile, activation checkpointing, FSDP)."""
_NO_BATCHES = ("builtins", "numpy")
"""Top-level packages of numbers, strings and arrays: these objects are not batches."""


class ModelCall:
    """Calls a model with a batch; the signature of `forward` is read once, in the constructor.

    >>> model = nn.Linear(3, 2)
    >>> call = ModelCall(model)
    >>> import torch
    >>> call(model, (torch.zeros(4, 3), torch.zeros(4))).shape
    torch.Size([4, 2])
    """

    __slots__ = ("_forward", "_plans")

    def __init__(self, model: Callable[..., Any]) -> None:
        self._forward = Forward.of(model)
        self._plans: dict[tuple[tuple[str, ...], bool], CallPlan] = {}

    def __call__(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Run `model` (the one passed to the constructor, or a wrapper of it) on the inputs of `batch`."""
        kind = kind_of(batch)
        if isinstance(batch, JointBatch):
            raise TrainingError(
                "a batch with samples of several streams is for several tasks; set `draw` of the streams to alternate, "
                "or define tasks"
            )
        if kind == "tuple":
            if 1 <= len(batch) <= 2:
                return model(batch[0])
            if batch:
                return model(*batch[:-1])
        elif kind == "mapping":
            return self._plan(tuple(batch), labels=False).run(model, batch)
        elif kind != "value" or type(batch).__module__ not in _NO_BATCHES:
            return model(batch)
        raise TrainingError(
            f"a batch is a tensor, a tuple such as (input, labels), a mapping, a dataclass or an object with `.to`; "
            f"found {'an empty ' if kind == 'tuple' else ''}{type(batch).__name__}"
        )

    def takes_labels(self, batch: Batch) -> bool:
        """Whether `forward` has a parameter for the labels of this batch, or computes a loss if asked to."""
        forward = self._forward
        return "return_loss" in forward.names or (forward.label is not None and targets_of(batch)[0] is not None)

    def with_labels(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Run `model` on inputs and labels, so that it computes its own loss."""
        forward = self._forward
        if kind_of(batch) == "tuple" and len(batch) > 1:
            if forward.label is not None:
                return model(*batch[:-1], **{forward.label: batch[-1]})
            return model(*batch) if forward.takes_positions(len(batch)) else self(model, batch)
        if kind_of(batch) != "mapping":
            return self(model, batch)
        batch = forward.with_tokens_as_labels(batch) if is_next_token(batch) else batch
        if "return_loss" in forward.names:
            batch = {"return_loss": True, **batch}
        return self._plan(tuple(batch), labels=True).run(model, batch)

    def _plan(self, keys: tuple[str, ...], *, labels: bool) -> "CallPlan":
        plan = self._plans.get((keys, labels))
        if plan is None:
            plan = self._plans[keys, labels] = self._forward.plan(keys, labels=labels)
        return plan


_CALLS: WeakKeyDictionary[nn.Module, ModelCall] = WeakKeyDictionary()


def call_of(model: nn.Module) -> ModelCall:
    """Return the `ModelCall` of a module, made once."""
    if model not in _CALLS:
        _CALLS[model] = ModelCall(model)
    return _CALLS[model]


class CallPlan(NamedTuple):
    """How the values of a mapping are passed to `forward`."""

    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    next_token: bool
    """Drop the last position of every input: it has no next token."""
    renamed: tuple[tuple[str, str], ...] = ()
    """(parameter, key) of values that the model takes under another name."""
    without_cache: bool = False
    """Hugging Face models separate packed documents by position ids, but only if they build no cache."""

    def run(self, model: Callable[..., Any], batch: Mapping[str, Any]) -> Any:
        """Call the model as planned; an optional input missing from the batch is None."""
        positional = [batch.get(key) for key in self.positional]
        keywords = {key: batch[key] for key in self.keywords}
        for name, key in self.renamed:
            keywords[name] = batch[key]
        if self.without_cache:
            keywords["use_cache"] = False
        if self.next_token:
            positional = [_without_last(value) for value in positional]
            keywords = {key: _without_last(value) for key, value in keywords.items()}
        return model(*positional, **keywords)


@dataclass(frozen=True, slots=True)
class Forward:
    """The parameters of a `forward`."""

    positional: tuple[str, ...]
    """Parameters that can be passed by position, in order."""
    names: frozenset[str]
    """Parameters that can be passed by keyword."""
    required: tuple[str, ...]
    any_positional: bool
    any_keyword: bool
    text: str
    """The signature, for messages."""

    @classmethod
    def of(cls, model: Callable[..., Any]) -> "Forward":
        """Read the signature of the innermost module (or of a plain function)."""
        if isinstance(model, nn.Module):
            model = unwrap(model).forward
        parameters = inspect.signature(model).parameters.values()
        kinds = {parameter.kind for parameter in parameters}
        single = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        return cls(
            positional=tuple(p.name for p in single if p.kind is not p.KEYWORD_ONLY),
            names=frozenset(p.name for p in single if p.kind is not p.POSITIONAL_ONLY),
            required=tuple(p.name for p in single if p.default is p.empty),
            any_positional=inspect.Parameter.VAR_POSITIONAL in kinds,
            any_keyword=inspect.Parameter.VAR_KEYWORD in kinds,
            text=", ".join(f"{p.name}=…" if p.default is not p.empty else str(p).split(":")[0] for p in parameters),
        )

    def takes_positions(self, count: int) -> bool:
        """Whether so many arguments can be passed by position."""
        return self.any_positional or len(self.positional) >= count

    @property
    def label(self) -> str | None:
        """The parameter for labels, if there is one."""
        return next(
            (name for name in (*LABEL_KEYS, "y") if name in self.names), "labels" if self.any_keyword else None
        )

    def with_tokens_as_labels(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a next-token batch with labels: as long as the inputs if the model shifts them, as Hugging Face's do.

        A model with other names for its inputs gets next tokens as labels.
        """
        rest = {key: value for key, value in batch.items() if key != "tokens"}
        tokens = labels = batch["tokens"]
        mask = rest.get("attn_mask", rest.get("attention_mask"))
        if isinstance(mask, Tensor) and mask.shape == tokens.shape:
            labels = tokens.masked_fill(mask == 0, -100)
        if {"input_ids", "labels"} <= self.names:
            return {"input_ids": tokens, **rest, "labels": labels}
        rest = {key: _without_last(value) for key, value in rest.items()}
        return {"input_ids": tokens[:, :-1], **rest, "labels": labels[:, 1:].contiguous()}

    def plan(self, keys: tuple[str, ...], *, labels: bool = False) -> CallPlan:
        """Decide how a mapping with these keys is passed; raise TrainingError if it does not fit the signature.

        Labels are passed only if `forward` requires them, or with `labels`.
        """
        plan = self._next_token_plan(keys) if is_next_token(keys) else self._mapping_plan(keys, labels)
        settings = tuple(
            key for key in SETTING_KEYS if key in keys and key in self.names and key not in plan.keywords
        )
        plan = plan._replace(keywords=(*plan.keywords, *settings))
        given = {*plan.keywords, *(name for name, _ in plan.renamed), *self.positional[: len(plan.positional)]}
        missing = [name for name in self.required if name not in given]
        if missing or not (plan.positional or plan.keywords):
            lacks = f"; it lacks {', '.join(missing)}" if missing else "; none of them fits"
            raise TrainingError(
                f"the batch does not fit the model: forward takes ({self.text}), "
                f"the batch has the keys {', '.join(keys) or 'none'}{lacks}"
            )
        return plan

    def _mapping_plan(self, keys: tuple[str, ...], labels: bool) -> CallPlan:
        not_inputs = (*LABEL_KEYS, *SETTING_KEYS)
        label = next((key for key in LABEL_KEYS if key in keys), None)
        if label is not None and labels and self.label is not None:
            plan = self._mapping_plan(tuple(key for key in keys if key != label), labels=False)
            return plan._replace(renamed=(*plan.renamed, (self.label, label)))
        inputs = [key for key in keys if key not in not_inputs or key in self.required]
        keywords = [key for key in inputs if self.any_keyword or key in self.names]
        if "decoder_input_ids" in self.names and "decoder_input_ids" not in keys and "labels" in keys:
            keywords.append("labels")  # an encoder-decoder builds its decoder inputs from the labels
        main = next((key for key in MAIN_KEYS if key in inputs), inputs[0] if len(inputs) == 1 else None)
        renamed = tuple(
            (name, key) for name, key in OTHER_NAMES if key in inputs and name in self.names and key not in keywords
        )
        packed = "document_ids" in keys and "use_cache" in self.names and "use_cache" not in keys
        if main is None or main in self.names or not self._takes_first(inputs):
            return CallPlan((), tuple(keywords), False, renamed, packed)
        # forward has another name for its main input (`x`, `input`): pass it by position
        return CallPlan((main,), tuple(key for key in keywords if key != main), False, renamed, packed)

    def _takes_first(self, inputs: Collection[str]) -> bool:
        """Whether the first position is free for an input that forward does not take by name."""
        if self.positional:
            return self.positional[0] not in inputs
        return self.any_positional and not self.any_keyword

    def _next_token_plan(self, keys: tuple[str, ...]) -> CallPlan:
        extras = tuple(key for key in ("types", "attn_mask") if key in keys)
        named = tuple(key for key in extras if key in self.names)
        renamed = tuple(
            (name, key) for name, key in OTHER_NAMES if key in extras and name in self.names and key not in named
        )
        if not self.positional and not self.any_positional:
            return CallPlan((), ("tokens", *(extras if self.any_keyword else named)), next_token=True)
        if named or renamed or not extras or any(name in OTHER_INPUTS for name in self.positional[1:3]):
            return CallPlan(("tokens",), named, next_token=True, renamed=renamed)
        if self.any_positional or len(self.positional) >= 3:
            return CallPlan(("tokens", "types", "attn_mask")[: 3 if "attn_mask" in keys else 2], (), next_token=True)
        if self.any_keyword:
            return CallPlan(("tokens",), extras, next_token=True)
        if len(self.positional) == 1 + len(extras):
            return CallPlan(("tokens", *extras), (), next_token=True)
        return CallPlan(("tokens",), (), next_token=True)


def _without_last(value: Any) -> Any:
    return value[:, :-1] if isinstance(value, Tensor) else value


@dataclass(frozen=True, slots=True, eq=False)
class HeadOutput:
    """Hidden states (…, d) and the weight (V, d) of an output layer that has not been applied yet.

    A loss that supports this class never materialises all logits; other code reads `logits`.

    >>> output = HeadOutput(torch.ones(2, 5, 3), torch.ones(7, 3))
    >>> output.shape, output.logits.shape
    (torch.Size([2, 5, 7]), torch.Size([2, 5, 7]))
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    """If set, the logits are softcap · tanh(logits / softcap)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", linked(self.hidden, self.weight, self.bias))

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits, without computing them."""
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def logits(self) -> Tensor:
        """All logits (…, V), recomputed at every access."""
        logits = F.linear(self.hidden.to(self.weight.dtype), self.weight, self.bias)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def linked(hidden: Tensor, *parameters: Tensor | None) -> Tensor:
    """Return `hidden` with `parameters` added to its autograd graph; they get no gradient through it.

    DistributedDataParallel searches the graph of the model's output for unused parameters (`find_unused_parameters`).
    Parameters that only the loss uses must be reachable there too.
    """
    used = [parameter for parameter in parameters if parameter is not None and parameter.requires_grad]
    if not used or not torch.is_grad_enabled():
        return hidden
    return _Link.apply(hidden, *used)  # type: ignore[no-untyped-call,no-any-return]


class _Link(torch.autograd.Function):
    """The identity of its first argument."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.num_parameters = len(parameters)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (grad, *[None] * ctx.num_parameters)


def is_divided(tensor: Tensor) -> bool:
    """Whether processes divide a tensor (a DTensor)."""
    package = sys.modules.get("torch.distributed.tensor")  # nobody has such a tensor without it
    return package is not None and isinstance(tensor, package.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with all of its elements: one that processes divide is gathered, differentiably."""
    if not is_divided(tensor):
        return tensor
    gathered: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return gathered


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def sums_of_bits(weights: Iterable[Tensor]) -> list[int]:
    """Return a number for each tensor that shows whether it has changed. Synchronises with the device.

    Sums of integers are exact in any order: they do not depend on the number of threads.
    """
    real = (torch.view_as_real(one) if one.is_complex() else one for one in weights)
    sums = [one.view(_INTEGERS[one.itemsize]).sum(dtype=torch.int64) for one in real if one.numel()]
    return [int(one) for one in sums]


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, DataParallel, torch.compile or FSDP wrappers."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
            continue
        inner = next((model._modules[name] for name in WRAPPED_MODULES if name in model._modules), None)
        if inner is None:
            return model
        model = inner


def clean_name(name: str) -> str:
    """Return a parameter's name without the components that wrappers add.

    >>> clean_name("encoder._orig_mod.layers.0.weight")
    'encoder.layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def clean_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return the module's state dict under the names of the unwrapped module; the tensors are not copied."""
    return {clean_name(name): value for name, value in unwrap(module).state_dict().items()}
