"""Tensor parallelism: the layers of a model divided over processes, by its own plan or one of the config."""

import logging
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from etude.core.blocks import repeated_blocks
from etude.core.errors import ConfigError

STYLES = ("colwise", "rowwise", "colwise_gathered", "replicated")
_HUGGING_FACE = {"colwise_rep": "colwise_gathered", "colwise_gather_output": "colwise_gathered"}
"""Names of the same styles in the plans of transformers."""


@runtime_checkable
class HasTensorPlan(Protocol):
    """A model that tells how its layers can be divided."""

    def tensor_plan(self, size: int) -> Mapping[str, str]:
        """Return a style for patterns of module names; raise ConfigError if `size` processes cannot divide them."""


def divide_layers(model: nn.Module, mesh: Any, plan: Mapping[str, str] | None = None) -> None:
    """Divide the layers of a model over a mesh; raise ConfigError if there is no plan or it does not fit."""
    plan = plan if plan is not None else plan_of(model, mesh.size())
    tied = tied_names(model)
    styles: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        found = [name for name, one in model.named_modules() if fnmatchcase(name, pattern) and _is_layer(one)]
        if not found:
            raise ConfigError(f"the tensor plan divides '{pattern}', which is no layer of {type(model).__name__}")
        layers = {name: model.get_submodule(name) for name in found if style != "replicated"}
        styles |= {name: _style(style, layer, name, mesh.size()) for name, layer in layers.items()}
    parallelize_module(model, mesh, styles)
    inside = tuple(f"{block}." for block in repeated_blocks(model))
    for name in styles:
        if not name.startswith(inside):
            model.get_submodule(name).register_forward_hook(_wait)
    # Of a layer that does not fit, torch prints a traceback beside the error that it raises.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    for first, others in tied.items():
        _tie(model, first, others)


def plan_of(model: nn.Module, size: int) -> Mapping[str, str]:
    """Return the model's own plan: ours have `tensor_plan`, those of Hugging Face `_tp_plan`.

    The plan of a model with another one inside, such as the trunk of several tasks, is that of the inner one.
    """
    if isinstance(model, HasTensorPlan):
        return model.tensor_plan(size)
    for name, child in model.named_children():
        if isinstance(child, HasTensorPlan):
            return {f"{name}.{pattern}": style for pattern, style in child.tensor_plan(size).items()}
    found = getattr(model, "_tp_plan", None)
    if not isinstance(found, Mapping) or not found:
        raise ConfigError(
            f"parallel.tensor is {size}, but {type(model).__name__} has no tensor plan; give one in "
            "parallel.tensor_plan, such as {'layers.*.up': colwise, 'layers.*.down': rowwise}, or use parallel.shard"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        if isinstance(heads := getattr(getattr(model, "config", None), name, None), int) and heads % size:
            raise ConfigError(f"parallel.tensor is {size}, which does not divide {name} {heads} of the model")
    plan = {_own_pattern(model, str(key)): _HUGGING_FACE.get(one, str(one)) for key, one in found.items()}
    if unknown := sorted({style for style in plan.values() if style not in STYLES}):
        raise ConfigError(
            f"the tensor plan of {type(model).__name__} has the styles {', '.join(unknown)}, which are not "
            f"supported ({', '.join(STYLES)} are); use parallel.shard instead"
        )
    return plan


def _own_pattern(model: nn.Module, pattern: str) -> str:
    """Return a pattern of names in this model: some versions give those of the model inside it."""
    if any(fnmatchcase(name, pattern) for name, _ in model.named_modules()):
        return pattern
    return f"{getattr(model, 'base_model_prefix', '')}.{pattern}"


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding))


def _style(style: str, module: nn.Module, name: str, size: int) -> ParallelStyle:
    if isinstance(module, nn.Embedding):
        if style != "rowwise":
            raise ConfigError(f"the tensor plan divides the embedding '{name}' {style}; only rowwise is supported")
        return RowwiseParallel(input_layouts=Replicate())
    divided = {"rowwise": ("in_features", "inputs"), "colwise": ("out_features", "outputs")}
    if style in divided and (features := getattr(module, divided[style][0])) % size:
        which = f"the {features} {divided[style][1]} of the layer '{name}'"
        raise ConfigError(f"parallel.tensor is {size}, which does not divide {which}")
    if style == "colwise_gathered":
        return ColwiseParallel(output_layouts=Replicate())
    return ColwiseParallel() if style == "colwise" else RowwiseParallel()


class _Waited(torch.autograd.Function):
    """The tensor that a collective gives, once it is there."""

    @staticmethod
    def forward(_ctx: Any, output: AsyncCollectiveTensor) -> Tensor:
        found: Tensor = output.trigger_wait()
        return found.view_as(found)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _wait(_layer: nn.Module, _inputs: Any, output: Any) -> Any:
    """Wait for the output of a layer: torch's compiled code drops the gradient of one that is still under way."""
    wait: Any = _Waited.apply
    return wait(output) if isinstance(output, AsyncCollectiveTensor) else output


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Return parameters with several names: the first name, and the others."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return {first: others for first, *others in names.values() if others}


def _tie(model: nn.Module, first: str, others: list[str]) -> None:
    """Let names share a parameter again: dividing a layer replaces it."""
    param = model.get_parameter(first)
    for name in others:
        module, _, leaf = name.rpartition(".")
        other = model.get_parameter(name)
        alike = isinstance(param, DTensor) and isinstance(other, DTensor) and param.placements == other.placements
        if other is not param and not alike:
            raise ConfigError(
                f"{first} and {name} are one parameter, which the tensor plan divides in two ways; divide both alike"
            )
        setattr(model.get_submodule(module), leaf, param)
