"""The loss of several tasks at once: Σ weight·loss, with every task's loss reported."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from etude.core.errors import ConfigError, TrainingError
from etude.core.spelling import listed, suggest
from etude.core.task import LossTerm, Terms
from etude.losses.binary import binary_cross_entropy_term, multi_label_bce_term
from etude.losses.functional import cross_entropy_term, mean_of
from etude.losses.strategies import LossStrategy, logits_of, shape_of
from etude.losses.task import as_strategy
from etude.losses.wrapped import LossFunction
from etude.multitask.curriculum.phase import check_spelling, check_weight
from etude.multitask.spec import explained

TaskLoss = str | LossStrategy | LossFunction
"""A name of `NAMED_LOSSES`, a strategy, or a function of (predictions, labels)."""

NAMED_LOSSES: Mapping[str, Callable[[Tensor, Tensor], LossTerm]] = {
    "cross_entropy": cross_entropy_term,
    "segmentation": functools.partial(cross_entropy_term, class_dim=1),
    "binary_cross_entropy": binary_cross_entropy_term,
    "multi_label": multi_label_bce_term,
}
"""Losses of tasks by name; labels of -100 are missing and do not count, in the last two NaN as well."""


class TaskLosses(NamedTuple):
    """The loss of several tasks."""

    loss: Tensor
    """Σ weight·loss over the tasks, which is trained."""
    losses: dict[str, Tensor]
    """The loss of every task, unweighted and detached, for reports."""


def default_weights() -> dict[str, float]:
    """Return the default weights of the tasks of a code model, as a new dictionary.

    Use them with `loss_weights(epoch, default_weights())` and `multi_task_loss`: weights of inactive tasks are
    ignored, and a task without one, such as the curriculum's annotation task, has the weight 1.

    - code_generation, 1.0: the main task. It has a label at every token, and other weights are relative to it.
    - test_generation, 0.8: tests are code too. Its gradient mostly agrees with that of code
      generation, so its weight is nearly as large; slightly less, because tests are narrower and
      more repetitive code that should not dominate the style of the model.
    - quality and security, 0.5: they classify code, with a few labels per function. They
      improve the shared features; at half weight they do not dominate the tokens, and neither
      is more important than the other.
    - clarification and explanation, 0.3: they relate code to natural language. One
      has a single bit per sample and the other pulls the model towards prose, so they are auxiliary.

    These are starting points: other losses or data may need other weights.

    >>> default_weights()["code_generation"]
    1.0
    """
    return {
        "code_generation": 1.0,
        "test_generation": 0.8,
        "quality": 0.5,
        "security": 0.5,
        "clarification": 0.3,
        "explanation": 0.3,
    }


def multi_task_loss(
    tasks: Mapping[str, tuple[Any, Tensor]],
    weights: Mapping[str, float | Tensor],
    losses: Mapping[str, TaskLoss] | None = None,
) -> TaskLosses:
    """Return Σ weight·loss of `{task: (prediction, target)}`, and the loss of every task.

    Each loss is the mean over the labels of its task; a task without labels has loss 0. The arguments and errors are
    those of `multi_task_terms`.

    >>> code = (torch.zeros(2, 5, 8), torch.zeros(2, 5, dtype=torch.int64))
    >>> quality = (torch.zeros(2, 3), torch.tensor([[1.0, 0.0, 1.0], [float("nan")] * 3]))
    >>> total, each = multi_task_loss({"code": code, "quality": quality}, {"code": 1.0, "quality": 0.5})
    >>> round(total.item(), 4), {task: round(loss.item(), 4) for task, loss in each.items()}
    (2.426, {'code': 2.0794, 'quality': 0.6931})
    """
    terms = multi_task_terms(tasks, weights, losses)
    means = {task: mean_of(term) for task, term in terms.items()}
    # Skip a task of weight 0 instead of multiplying: its loss may be infinite.
    weighed = [means[task] * term.weight for task, term in terms.items() if not _is_zero(term.weight)]
    first = next(iter(means.values()))
    total = torch.stack(weighed).sum() if weighed else torch.zeros_like(first)
    return TaskLosses(total, {task: mean.detach() for task, mean in means.items()})


def multi_task_terms(
    tasks: Mapping[str, tuple[Any, Tensor]],
    weights: Mapping[str, float | Tensor],
    losses: Mapping[str, TaskLoss] | None = None,
) -> Terms:
    """Return one term per task, under its name and with its weight: sums and counts for the engine.

    A prediction is a tensor or any output that holds logits. The loss of a task is the one in `losses`, else chosen
    by shapes, for predictions (…, C):

    integers (…)                       cross entropy
    integers (B, H, W)                 cross entropy, for predictions (B, C, H, W)
    labels shaped like the prediction  binary cross entropy of every label; (…) also fits predictions (…, 1)

    Class probabilities and regression have the shapes of the last and must be named. Weights and losses may include
    inactive tasks; a task without a weight has the weight 1. Raises ConfigError for weights that are misspelt,
    negative or not finite and for losses of a task that has neither outputs nor a weight, TrainingError for shapes
    that no loss fits.
    """
    losses = losses or {}
    if not tasks:
        raise TrainingError("there are no tasks; pass {task: (prediction, target)}")
    for task, pair in tasks.items():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TrainingError(f"task '{task}' must have a (prediction, target), found a {type(pair).__name__}")
    check_weights(weights, tasks)
    for name in losses:
        if name not in tasks and name not in weights:
            raise ConfigError(
                f"the losses name a task '{name}' that is not there{suggest(name, {**tasks, **weights})}; remove it or "
                "pass its prediction and target"
            )
    terms: Terms = {}
    for task, (prediction, target) in tasks.items():
        weight = weights.get(task, 1.0)
        with explained(task), torch.set_grad_enabled(torch.is_grad_enabled() and not _is_zero(weight)):
            term = _unweighed_term(prediction, target, losses.get(task))
        terms[task] = LossTerm(term.sum, term.count, weight)
    return terms


def check_weights(weights: Mapping[str, float | Tensor], tasks: Collection[str]) -> None:
    """Raise ConfigError for a negative or non-finite weight, or one whose name looks like a misspelt task.

    Weights of inactive tasks, and tasks without weights, are allowed. Weights on a GPU are not checked, because
    reading them would synchronise.
    """
    check_spelling(weights, tasks)
    for task, weight in weights.items():
        if isinstance(weight, Tensor) and not weight.is_cpu:
            continue
        check_weight(weight.item() if isinstance(weight, Tensor) else weight, f"the weight of the task '{task}'")


def _unweighed_term(prediction: Any, target: Tensor, loss: TaskLoss | None) -> LossTerm:
    if loss is None:
        loss = _inferred_name(shape_of(prediction), target)
    if isinstance(loss, str):
        if loss not in NAMED_LOSSES:
            raise ConfigError(f"unknown loss '{loss}'{suggest(loss, NAMED_LOSSES)}")
        return NAMED_LOSSES[loss](logits_of(prediction), target)
    terms = as_strategy(loss).terms(prediction, {"labels": target}, metrics=False)
    if len(terms) != 1:
        raise TrainingError(f"its loss has {len(terms)} terms ({listed(terms)}), a task has one; split the task")
    (term,) = terms.values()
    return term


def _inferred_name(size: torch.Size, target: Tensor) -> str:
    """Return the loss that fits an output of this size, or raise TrainingError with the available ones."""
    shape = target.shape
    if shape == size or size == (*shape, 1):
        return "binary_cross_entropy"  # without label weights, multi-label is the same
    if not target.is_floating_point() and target.dtype is not torch.bool:
        if shape == size[:-1]:
            return "cross_entropy"
        if len(size) == 4 and shape == size[:1] + size[2:]:
            return "segmentation"
    raise TrainingError(
        f"no loss fits an output of shape {tuple(size)} with {str(target.dtype).removeprefix('torch.')} labels "
        f"{tuple(shape)}; pass integers {tuple(size[:-1])} for cross entropy, labels of the output's shape for "
        "binary cross entropy, or set the loss"
    )


def _is_zero(weight: float | Tensor) -> bool:
    """Whether a weight is the number 0; a tensor is not read."""
    return not isinstance(weight, Tensor) and weight == 0
