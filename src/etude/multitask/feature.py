"""The sections `tasks`, `weighting` and `curriculum` of experiment files, and what they add to a run."""

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from etude.config import Document, Feature, RunDraft, SectionSpec, Selection
from etude.engine.state import callbacks_in
from etude.multitask.build import SampleCount, build_tasks, own_data, with_own_data
from etude.multitask.checks import make_curriculum, settle_tasks
from etude.multitask.curriculum.callback import CurriculumCallback
from etude.multitask.sections import Name, Phases, TaskSection
from etude.multitask.task import MultiTask

logger = logging.getLogger("etude")


class Tasks(Feature):
    """Several tasks that share a model."""

    sections: ClassVar = {
        "tasks": SectionSpec(
            model=dict[Name, TaskSection],
            description="Tasks that share the model, by name: head, loss, data, labels, weight, metrics and variants.",
        ),
        "weighting": SectionSpec(
            kind="weighting",
            provided=("tasks",),
            description="How the losses of tasks are combined; static by default.",
        ),
        "curriculum": SectionSpec(
            model=Phases,
            description="Phases that introduce tasks: a list, or `default` for the four of a code model.",
        ),
    }

    def settle(self, sections: dict[str, Any], document: Document) -> None:
        """Fill in losses and default phases; raise ConfigError if the sections contradict."""
        settle_tasks(sections, document)

    def plain(self, sections: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sections without unset keys."""
        found = super().plain(sections)
        if tasks := found.get("tasks"):
            found["tasks"] = {name: _given(task) for name, task in tasks.items()}
            for task in found["tasks"].values():
                task["variants"] = {name: _given(variant) for name, variant in task["variants"].items()}
        if phases := found.get("curriculum"):
            found["curriculum"] = [
                {key: _given(value) if key in ("start", "ramp") else value for key, value in _given(phase).items()}
                for phase in phases
            ]
        return found

    def data_sets(self, sections: Mapping[str, Any]) -> dict[str, tuple[str, Selection]]:
        """Return the tasks' own data sets."""
        return own_data(sections.get("tasks") or {})

    def join_data(self, sections: Mapping[str, Any], document: Document, shared: Any, own: Mapping[str, Any]) -> Any:
        """Return the data with every data set of a task as a stream."""
        return with_own_data(sections, document, shared, own) if sections.get("tasks") else shared

    def after_model(self, draft: RunDraft) -> None:
        """Add the heads to the model; create the task, the curriculum and the sample counter."""
        tasks = draft.sections.get("tasks")
        if not tasks:
            return
        draft.model, task = build_tasks(draft)
        curriculum = make_curriculum(draft.sections.get("curriculum") or [], tasks, draft.document)
        draft.trainer |= {"task": task, "curriculum": curriculum}
        if draft.world_size == 1:
            draft.callbacks.append(SampleCount(task))

    def evaluating(self, trainer: Any, checkpoint: Any) -> None:
        """Evaluate with the tasks and variants of the checkpoint's phase."""
        saved = callbacks_in(checkpoint)
        kind = f"{CurriculumCallback.__name__}."
        trainer.callbacks.load_state_dict({key: state for key, state in saved.items() if key.startswith(kind)})
        task = trainer.task
        if isinstance(task, MultiTask) and (inactive := [name for name in task.tasks if name not in task.weights]):
            logger.warning(
                "%s is from phase %s, which does not train %s: not evaluated",
                checkpoint.path.name,
                checkpoint.state["clock"].get("phase"),
                ", ".join(inactive),
            )


FEATURE = Tasks()


def _given(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value is not None}
