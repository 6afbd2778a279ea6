"""The active tasks of a run: their variants and weights, and their metrics in logs."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from etude.core.batch import STREAM, Batch
from etude.core.errors import ConfigError
from etude.core.loader import Loader
from etude.core.spelling import suggest
from etude.core.task import Measures, Task, Terms
from etude.data import DataLoader, StreamLoader, Streams, make_loader
from etude.data.sources.adapters import ForeignLoader
from etude.distributed import World
from etude.metrics.metric_set import Together, build_metrics
from etude.multitask.curriculum.phase import check_weight
from etude.multitask.model import MultiTaskModel
from etude.multitask.spec import ActiveTask, TaskSpec, check_known, check_labels, check_task, strategy_of
from etude.multitask.weighting import StaticWeights, Weighting
from etude.optim.eager import without_compiler

logger = logging.getLogger("etude")

LOSS = "loss"


class ActiveTasks(Task):
    """The tasks of a `MultiTask`; a phase of a curriculum may train some of them, the others are inactive."""

    chooses_metrics = True
    uses_all_parameters = False  # a batch for only some tasks leaves the heads of the others without gradients

    def __init__(self, tasks: Mapping[str, TaskSpec], weighting: Weighting | None = None) -> None:
        if not tasks:
            raise ConfigError("there are no tasks; pass at least one")
        for name, spec in tasks.items():
            check_task(name, spec)
        self.tasks = dict(tasks)
        if weighting is not None and not isinstance(weighting, Weighting):
            raise ConfigError(f"weighting must be an object, such as PCGrad({[*tasks]}), found {weighting!r:.60}")
        if weighting is not None and weighting.tasks != tuple(tasks):
            raise ConfigError(
                f"the weighting has the tasks {', '.join(weighting.tasks)}, but there are {', '.join(tasks)}; "
                "create it with the same names in the same order"
            )
        # Fixed weights need no tensors: they are plain numbers in the terms.
        self.weighting = None if isinstance(weighting, StaticWeights) else weighting
        static = weighting.weights.tolist() if isinstance(weighting, StaticWeights) else [1.0] * len(tasks)
        self._static = dict(zip(tasks, static, strict=True))
        self._variants: dict[tuple[str, str | None], ActiveTask] = {}
        for name, spec in self.tasks.items():
            for variant, one in ((None, spec), *spec.variants.items()):
                self._variants[name, variant] = ActiveTask(
                    one, strategy_of(one), Together(build_metrics(one.metrics, f"the metrics of task '{name}'"))
                )
        self.samples = dict.fromkeys(self.tasks, 0)
        """Number of samples that each task has learned from on this process."""
        self.in_phase = False
        """Whether a curriculum has chosen the active tasks."""
        self.version = 0
        """Changes when other tasks, or other variants of them, become active."""
        self._weights: dict[str, float] = {}
        self._active: dict[str, ActiveTask] = {}
        self._scales: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._measuring = False
        self.alike = False
        """Whether all training batches of a stream have the same keys: then the first one reveals misspelt labels."""
        self._checked: set[tuple[Any, ...]] = set()
        self._tried: set[int] = set()
        """The variants of tasks whose metrics have received a training batch."""
        self._warned: set[str] = set()
        self._unlabelled: list[str] = []
        """The tasks without labels in the last evaluation."""
        self._plans: dict[tuple[Any, ...], dict[str, ActiveTask]] = {}
        self.activate({name: spec.weight for name, spec in self.tasks.items()})

    def activate(self, weights: Mapping[str, float], variants: Mapping[str, str] | None = None) -> None:
        """Train these tasks from now on, each with its weight, and in the variant that `variants` names.

        All others are inactive, and their heads are not run. Raises ConfigError for an unknown task or variant, and
        for negative or non-finite weights.
        """
        for task, weight in weights.items():
            check_known("a weight", task, self.tasks)
            check_weight(weight, f"the weight of the task '{task}'")
        for task, variant in (variants or {}).items():
            check_known("a variant", task, self.tasks)
            if (task, variant) not in self._variants:
                known = suggest(variant, self.tasks[task].variants)
                raise ConfigError(f"the task '{task}' has no variant '{variant}'{known}")
        chosen = variants or {}
        self._weights = {task: self._static[task] * weights[task] for task in self.tasks if task in weights}
        for scale in self._scales.values():  # in place, because a captured step reads it
            scale.copy_(self._weight_vector(scale.dtype), non_blocking=True)
        active = {task: self._variants[task, chosen.get(task)] for task in self._weights}
        if active != self._active:  # a ramp changes weights at every step, but not how the model is run
            self._active = active
            self._plans.clear()
            self.version += 1

    def _weight_vector(self, dtype: torch.dtype) -> Tensor:
        """Return the weights of all tasks, 0 for inactive ones."""
        return torch.tensor([self._weights.get(task, 0.0) for task in self.tasks], dtype=dtype)

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the active tasks, before a weighting adapts them."""
        return dict(self._weights)

    def streams(self) -> frozenset[str] | None:
        """Return the streams that active tasks read; None if one of them reads any batch with its labels."""
        names = [active.spec.stream for active in self._active.values()]
        return None if None in names else frozenset(name for name in names if name is not None)

    def head_of(self, task: str) -> str | None:
        """Return the current head of a task, None if it is inactive."""
        return self._active[task].spec.head if task in self._active else None

    # --- before training

    def join(self, model: nn.Module) -> None:
        """Add the weighting to the model, so that it is saved, moved and trained with it.

        Raises ConfigError if the model cannot have one, or has another one.
        """
        if self.weighting is None:
            return
        if not isinstance(model, MultiTaskModel):
            raise ConfigError(
                f"{type(self.weighting).__name__} weights the tasks of a MultiTaskModel, but the model is a "
                f"{type(model).__name__}; pass MultiTaskModel(trunk, heads)"
            )
        if model.weighting is not None and model.weighting is not self.weighting:
            raise ConfigError(
                f"the model has the {type(model.weighting).__name__} of another task already; create a model for "
                "this one"
            )
        model.weighting = self.weighting

    def used_outside(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of the weighting."""
        return [] if self.weighting is None else list(self.weighting.parameters())

    def extend(self, optimizer: torch.optim.Optimizer) -> None:
        """Add parameters of the weighting that the optimizer lacks, without weight decay.

        Raises ConfigError if a torch scheduler already uses the optimizer: it would not include them.
        """
        if self.weighting is None:
            return
        groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
        wanted = [param for param in self.weighting.parameters() if param.requires_grad]
        if any(groups[id(param)].get("weight_decay") for param in wanted if id(param) in groups):
            logger.warning(
                "the optimizer decays the parameters of %s, which pulls the tasks towards equal weights; create it "
                "with model.parameter_groups()",
                type(self.weighting).__name__,
            )
        missing = [param for param in wanted if id(param) not in groups]
        if missing and getattr(optimizer.step, "_wrapped_by_lr_sched", False):  # as torch's schedulers do
            raise ConfigError(
                f"the optimizer has no parameters of {type(self.weighting).__name__}, and a torch scheduler already "
                "uses it; call task.join(model) first and create the optimizer with model.parameter_groups()"
            )
        if missing:
            with without_compiler():
                optimizer.add_param_group({"params": missing, "weight_decay": 0.0})

    def check_loader(self, loader: Loader | None, accumulation_steps: int) -> None:
        """Skip streams that no task reads; raise TrainingError for labels that no stream has.

        Warns if the weighting compares tasks that never occur in the same step.
        """
        self.alike = isinstance(loader, DataLoader) or _is_shuffled_by_torch(loader)
        if not isinstance(loader, StreamLoader):
            return
        firsts = [next(iter(make_loader(Streams({name: part}), 1))) for name, part in loader.data.parts.items()]
        check_labels(self.tasks, list(dict.fromkeys(key for one in firsts for key in one if key != STREAM)), None)
        read = {one.spec.stream for one in self._variants.values()}
        if None not in read:
            if unread := sorted(set(loader.data.parts) - read):
                logger.warning("no task reads the stream %s, so it is skipped", " or ".join(map(repr, unread)))
            loader.choose(only=self.streams())
        compares = self.weighting is not None and self.weighting.needs != "nothing"
        if compares and loader.data.draw == "alternate" and accumulation_steps == 1:
            logger.warning(
                "%s compares tasks, but with `draw: alternate` a step has only one stream; "
                "set data.draw to together, or training.grad_accum_steps above 1",
                type(self.weighting).__name__,
            )

    # --- resuming

    def decisions(self) -> dict[str, Any]:
        """Return the decisions of the losses on their first batches, by task and variant."""
        found: dict[str, Any] = {}
        for (task, variant), active in self._variants.items():
            if decided := active.strategy.decisions():
                found.setdefault(task, {})[variant or ""] = decided
        return found

    def decide(self, decisions: Mapping[str, Any]) -> None:
        """Restore the decisions of the losses."""
        for (task, variant), active in self._variants.items():
            active.strategy.decide(decisions.get(task, {}).get(variant or "", {}))

    def begin_run(self) -> None:
        """Forget what an earlier run has decided, and the phase in which its curriculum has ended."""
        super().begin_run()
        self.samples = dict.fromkeys(self.tasks, 0)
        if self.in_phase:
            self.in_phase = False
            self.activate({name: spec.weight for name, spec in self.tasks.items()})

    # --- metrics

    def measure(self, measures: Measures) -> None:
        """Refuse metrics of the whole run: every task has its own."""
        raise ConfigError(
            "`metrics` are those of one task, and there are several: give each its own, with `metrics` of the task or "
            "TaskSpec(metrics={'f1': F1(…)})"
        )

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return `loss`, the weighted sum over tasks, and what each loss derives: `<task>/perplexity` …

        There is no `loss` if a trained task had no labels: a sum without it would look like progress.
        """
        found: dict[str, float] = {}
        losses: dict[str, float] = {}
        for task, spec in self.tasks.items():
            prefix = f"{task}/"
            mine = {name.removeprefix(prefix): value for name, value in means.items() if name.startswith(prefix)}
            if LOSS not in mine or math.isnan(mine[LOSS]):
                continue
            losses[task] = self._static[task] * spec.weight * mine[LOSS]
            active = self._active.get(task, self._variants[task, None])
            found |= {prefix + name: value for name, value in active.strategy.derived(mine).items()}
        missing = [task for task, weight in self._weights.items() if weight and task not in losses]
        if missing and not self._measuring:
            return found
        self._unlabelled = missing
        if missing:
            self.no_numbers()
        return {LOSS: sum(losses.values()) if losses else math.nan, **found}

    def ordered(self, numbers: dict[str, float]) -> dict[str, float]:
        """Return metrics in the order of the tasks, not of the data; those of no task come first."""
        places = {name: place for place, name in enumerate(self.tasks)}
        return dict(sorted(numbers.items(), key=lambda item: places.get(item[0].rpartition("/")[0], -1)))

    def lend(self, model: nn.Module, batch: Batch) -> Terms:
        """Run the model on a batch of another rank; the metrics of the tasks do not include it."""
        before, self._measuring = self._measuring, False
        try:
            return super().lend(model, batch)
        finally:
            self._measuring = before

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Within this block the metrics of the tasks accumulate."""
        self._measuring = True
        try:
            for active in self._active.values():
                active.measures.reset()
            yield
        finally:
            self._measuring = False

    def no_data(self) -> None:
        """Warn: an evaluation may have no data for the active tasks."""
        if self._measuring:
            logger.warning("there is no data for the active tasks, so nothing is measured")

    def no_numbers(self) -> None:
        """Warn once about each task without labels in an evaluation; there may be no other metrics either."""
        if not self._unlabelled:
            self.no_data()
        for task in [one for one in self._unlabelled if one not in self._warned]:
            self._warned.add(task)
            logger.warning("the task '%s' has no validation labels, so the validation loss does not include it", task)

    def measured(self, world: World, device: torch.device) -> dict[str, float]:
        """Return the metrics of this evaluation over all ranks; those without data are left out."""
        return {
            f"{task}/{name}": value
            for task, active in self._active.items()
            for name, value in active.measures.results(world, device, keep=False).items()
            if not math.isnan(value)
        }

    def files(self) -> dict[str, str]:
        """Return the files of the metrics, with the task in their names."""
        measured = {task: active.measures.metrics.values() for task, active in self._active.items()}
        return {
            f"{task}_{name}": text
            for task, metrics in measured.items()
            for metric in metrics
            for name, text in metric.files().items()
        }


def _is_shuffled_by_torch(loader: Loader | None) -> bool:
    """Whether a torch loader collates samples in the default way: then all of them must have the same keys."""
    source = loader.source if isinstance(loader, ForeignLoader) else None
    return (
        isinstance(source, torch.utils.data.DataLoader)
        and source.collate_fn is torch.utils.data.default_collate
        and type(source.sampler) in (torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler)
        and type(source.batch_sampler) is torch.utils.data.BatchSampler
    )
