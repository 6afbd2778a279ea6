"""Several tasks at once: selecting the tasks of a batch, one forward pass, and one loss per task."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from etude.core.batch import LABEL_KEYS, STREAM, Batch, JointBatch, num_samples
from etude.core.errors import TrainingError
from etude.core.lookups import explain_lookup
from etude.core.task import LossTerm, Terms
from etude.engine.objective import ObjectiveParts
from etude.losses.strategies import head_of
from etude.multitask.active import LOSS, ActiveTasks
from etude.multitask.rules import make_objective
from etude.multitask.spec import ActiveTask, check_labels, explained, learns_from

PENALTY, CAUSAL = "penalty", "causal"


class MultiTask(ActiveTasks):
    """Trains several tasks on one `MultiTaskModel`: `Trainer(model, loader, task=MultiTask({...}))`.

    A batch is used by the tasks that read its stream or, without a stream, by those whose labels it has. The model
    runs once for all of them, with only their heads; each loss is a sum over the labels of its task in the batch.
    Terms are named `<task>/loss`, `<task>/accuracy` and so on; `loss` is their sum with the static weights of the
    tasks, without ramps and learned weights, so that epochs are comparable.

    `weighting` (None: static weights) learns or adapts the weights; it becomes part of the model in `join`.
    """

    def is_for(self, batch: Batch) -> bool:
        """Return whether an active task reads this batch, even if its weight is 0."""
        return any(True for _ in self._requests(batch))

    # --- terms of a batch

    def __call__(self, model: nn.Module, batch: Batch, *, metrics: bool | None) -> Terms:
        """Run the model on the batch for its tasks, and return their terms."""
        requests = list(self._requests(batch))
        if not requests:
            return {}
        outputs = _run(model, requests)
        coefficients, penalties = self._coefficients(next(model.parameters()).device), self._penalties()
        terms: Terms = {}
        for (inputs, group), found in zip(requests, outputs, strict=True):
            for task, active in group.items():
                fresh = self._task_terms(task, active, found[active.spec.head], inputs, metrics=metrics)
                loss = fresh[f"{task}/{LOSS}"]
                loss.weight = coefficients[task]
                if task in penalties and torch.is_grad_enabled():  # validation does not measure it
                    present = _any(loss.count)
                    # Not a metric: its mean would depend on how labels are divided among ranks.
                    fresh[f"{task}/{PENALTY}"] = LossTerm(
                        penalties[task] * present, present, reported=False, optional=True
                    )
                for name, term in fresh.items():
                    if name in terms:
                        first = terms[name]
                        term = replace(first, sum=first.sum + term.sum, count=first.count + term.count)
                    terms[name] = term
        return terms

    def trained_on(self, batch: Batch) -> None:
        """Count the samples of every task that learns from them: tasks of weight 0 are only evaluated."""
        for inputs, group in self._requests(batch):
            size = num_samples(inputs)
            for task in group:
                if self._learns(task):
                    self.samples[task] += size

    def _learns(self, task: str) -> bool:
        """Whether an active task is trained."""
        return bool(self._weights[task])

    def outputs(self, model: nn.Module, batch: Batch) -> Any:
        """Return the outputs for a batch of the heads of its tasks."""
        requests = list(self._requests(batch))
        return dict(enumerate(_run(model, requests))) if requests else {}

    def predict(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Return the outputs of all active tasks, by task, with or without their labels."""
        ways: dict[bool | None, dict[str, str]] = {}
        for task, active in self._active.items():
            ways.setdefault(active.spec.causal, {})[task] = active.spec.head
        found: dict[str, Any] = {}
        for causal, heads in ways.items():
            outputs = model(batch if causal is None else {**batch, CAUSAL: causal}, list(heads.values()))
            found |= {task: outputs[head] for task, head in heads.items()}
        return {task: found[task] for task in self._active}

    def counts(self, batch: Batch) -> dict[str, Tensor | float]:
        """Return the count of every weighted term from the batch alone; raise TrainingError if a loss cannot know."""
        counts: dict[str, Tensor | float] = {}
        for inputs, group in self._requests(batch):
            for task, active in group.items():
                ahead = active.strategy.counts(_view_for(inputs, active.spec.labels))
                if ahead is None:
                    raise TrainingError(
                        f"task '{task}': the count of its loss depends on the model's output; with gradient "
                        "accumulation use a loss whose count does not, or set grad_accum_steps to 1 and, on several "
                        "processes, on_out_of_memory to error"
                    )
                if LOSS not in ahead:
                    raise _several_terms(task, ahead)
                found = {f"{task}/{LOSS}": ahead[LOSS]}
                if self._has_penalty:
                    found[f"{task}/{PENALTY}"] = _any(ahead[LOSS])
                for name, count in found.items():
                    counts[name] = counts[name] + count if name in counts else count
        return counts

    def weighted_terms(self, batch: Batch) -> list[str]:
        """Return the names of the weighted terms of this batch, in order, for a rank without samples."""
        kinds = (LOSS, PENALTY) if self._has_penalty else (LOSS,)
        tasks = [task for _, group in self._requests(batch) for task in group if self._learns(task)]
        return [f"{task}/{kind}" for task in dict.fromkeys(tasks) for kind in kinds]

    def scale(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights of all tasks as a vector on the device, 0 for inactive ones."""
        if (device, dtype) not in self._scales:
            self._scales[device, dtype] = self._weight_vector(dtype).to(device, non_blocking=True)
        return self._scales[device, dtype]

    def numbers(self) -> dict[str, float]:
        """Return the current weight of every active task, `<task>/weight`. Synchronises if it is learned."""
        weighting = self.weighting
        if weighting is None:
            return {f"{task}/weight": weight for task, weight in self._weights.items()}
        with torch.no_grad():
            values = weighting.latest(self.scale(weighting.device, weighting.dtype)).tolist()
        return {f"{task}/weight": values[place] for place, task in enumerate(self.tasks) if task in self._weights}

    @property
    def _has_penalty(self) -> bool:
        return self.weighting is not None and self.weighting.has_penalty

    def _coefficients(self, device: torch.device) -> Mapping[str, Tensor | float]:
        """Return the factor of every active task's loss: numbers, or tensors of a weighting.

        On CUDA they are tensors too, except for 0, because a captured step reads their current values.
        """
        weighting = self.weighting
        if weighting is None and device.type == "cuda":
            values = dict(zip(self.tasks, self.scale(device).unbind(), strict=True))
            return {task: values[task] if weight else 0.0 for task, weight in self._weights.items()}
        if weighting is None or not weighting.known_ahead:
            return self._weights
        scale = self.scale(weighting.device, weighting.dtype)
        found = zip(self.tasks, weighting.coefficients(torch.zeros_like(scale), scale).unbind(), strict=True)
        return {task: value if self._weights.get(task) else 0.0 for task, value in found}

    def _penalties(self) -> Mapping[str, Tensor]:
        """Return the weighting's penalty for every task; empty for most weightings."""
        weighting = self.weighting
        if weighting is None or not weighting.has_penalty or not torch.is_grad_enabled():
            return {}
        penalties = weighting.penalties(self.scale(weighting.device, weighting.dtype))
        if penalties is None:
            return {}
        found = zip(self.tasks, penalties.unbind(), strict=True)
        return {task: value for task, value in found if self._weights.get(task)}

    def _task_terms(
        self, task: str, active: ActiveTask, output: Any, inputs: Batch, *, metrics: bool | None
    ) -> Terms:
        view = _view_for(inputs, active.spec.labels)
        with explained(task):
            wanted = active.strategy.has_cheap_metrics(output, view) if metrics is None else metrics
            found = active.strategy.terms(output, view, metrics=wanted)
            if active.spec.metrics and (self._measuring or id(active.spec) not in self._tried):
                self._measure(active, output, view)
        weighted = [name for name, term in found.items() if term.is_weighted]
        if weighted != [LOSS]:
            raise _several_terms(task, weighted)
        for term in found.values():
            term.optional = True
        return {f"{task}/{name}": term for name, term in found.items()}

    def _measure(self, active: ActiveTask, output: Any, view: Batch) -> None:
        """Update the metrics with a batch. Outside validation only the first batch is tried, to find errors early."""
        if not self._measuring:
            self._tried.add(id(active.spec))
            if head_of(output) is not None:  # all logits of a language model take too much memory for a trial
                return
        predictions, labels = active.strategy.judged(output, view)
        measures = active.measures if self._measuring else deepcopy(active.measures)
        measures.update(predictions.detach(), labels)

    def _requests(self, batch: Batch) -> Iterator[tuple[Batch, dict[str, ActiveTask]]]:
        """Return inputs for the model with their tasks: one entry for each required forward pass."""
        for part in batch if isinstance(batch, JointBatch) else (batch,):
            ways: dict[bool | None, dict[str, ActiveTask]] = {}
            for task, active in self._present(part).items():
                ways.setdefault(active.spec.causal, {})[task] = active
            for causal, group in ways.items():
                yield part if causal is None else {**part, CAUSAL: causal}, group

    def _present(self, batch: Batch) -> dict[str, ActiveTask]:
        """Return the active tasks of a batch; cached by stream and keys."""
        plan = (batch.get(STREAM), *batch) if isinstance(batch, Mapping) else (None, str(type(batch)))
        if self.alike and plan not in self._checked and torch.is_grad_enabled():
            check_labels(self.tasks, [key for key in plan[1:] if key != STREAM], plan[0])
            self._checked.add(plan)
        if plan not in self._plans:
            self._plans[plan] = {
                name: active for name, active in self._active.items() if learns_from(name, active.spec, batch)
            }
        return self._plans[plan]

    # --- training

    def constants(self) -> Hashable:
        """Return which tasks have a weight, and the settings of their losses; the weights are on the device."""
        return tuple(
            (task, self._active[task].strategy.constants()) for task, weight in self._weights.items() if weight
        )

    def objective(self, parts: ObjectiveParts) -> Any:
        """Return the objective that the weighting needs."""
        return make_objective(self, parts)


def _run(model: nn.Module, requests: Sequence[tuple[Batch, dict[str, ActiveTask]]]) -> list[Mapping[str, Any]]:
    """Run the model once for each request, all in one call, as DistributedDataParallel requires."""
    batches = [inputs for inputs, _ in requests]
    heads = [[active.spec.head for active in group.values()] for _, group in requests]
    try:
        if len(requests) == 1:
            return [model(batches[0], heads[0])]
        found: list[Mapping[str, Any]] = model(JointBatch(batches), heads)
        return found
    except IndexError as error:
        if (explained := explain_lookup(error, model)) is None:
            raise
        raise explained from error


def _view_for(batch: Batch, labels: str | None) -> Batch:
    """Return the batch for the loss of one task: with only this task's labels."""
    if labels is None or not isinstance(batch, Mapping):
        return batch
    return {**{key: value for key, value in batch.items() if key not in LABEL_KEYS}, "labels": batch[labels]}


def _several_terms(task: str, weighted: Iterable[str]) -> TrainingError:
    return TrainingError(
        f"task '{task}': its loss has the weighted terms {', '.join(weighted) or 'none'}, but a task must have "
        f"exactly one, '{LOSS}'; split the task"
    )


def _any(count: Tensor | float) -> Tensor | float:
    """Return 1 if anything counts, else 0."""
    return (count > 0).float() if isinstance(count, Tensor) else float(count > 0)
