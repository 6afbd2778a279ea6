"""The default curriculum of a code model, in four phases, and functions of it.

| phase | epochs | tasks |
|---|---|---|
| code | 1–10 | code_generation, as masked language modelling |
| simple_ontology | 11–30 | + ontology_annotation, with the simple labels |
| full_ontology | 31–50 | ontology_annotation with the full labels, + test_generation |
| all_tasks | from 51 | all tasks |
"""

from collections.abc import Mapping

from etude.multitask.curriculum.curriculum import Curriculum
from etude.multitask.curriculum.phase import ALL, Phase, check_spelling

DEFAULT_TASKS = (
    "code_generation",
    "ontology_annotation",
    "test_generation",
    "quality",
    "security",
    "clarification",
    "explanation",
)
"""The tasks of the default curriculum."""

DEFAULT_PHASES = (
    Phase("code", 1, ["code_generation"], variants={"code_generation": "masked"}),
    Phase(
        "simple_ontology",
        11,
        ["code_generation", "ontology_annotation"],
        variants={"ontology_annotation": "simple"},
    ),
    Phase(
        "full_ontology",
        31,
        ["code_generation", "ontology_annotation", "test_generation"],
        variants={"ontology_annotation": "full"},
    ),
    Phase("all_tasks", 51, ALL, variants={"ontology_annotation": "full"}),
)
"""The four phases; epochs are counted from 1."""

_DEFAULT = Curriculum(DEFAULT_PHASES, DEFAULT_TASKS)


def current_phase(epoch: float) -> Phase:
    """Return the default phase at an epoch, counted from 1.

    >>> [current_phase(epoch).name for epoch in (1, 10, 11, 30, 31, 50, 51)]
    ['code', 'code', 'simple_ontology', 'simple_ontology', 'full_ontology', 'full_ontology', 'all_tasks']
    """
    return _DEFAULT.current_phase(epoch)


def active_tasks(phase: Phase | float) -> tuple[str, ...]:
    """Return the tasks of a default phase, or of the one at an epoch, counted from 1.

    >>> active_tasks(31)
    ('code_generation', 'ontology_annotation', 'test_generation')
    """
    return _DEFAULT.active_tasks(phase)


def loss_weights(epoch: float, weights: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return the weights of the default curriculum's active tasks at an epoch, counted from 1.

    The weights of new tasks grow from 0.1 to 1 over five epochs. `weights` are static weights, such as
    `default_weights()`: those of inactive tasks are ignored, a task without one has the weight 1, and your own tasks
    are added in the last phase. Raises ConfigError for a name that looks misspelt.

    >>> loss_weights(10)
    {'code_generation': 1.0}
    >>> loss_weights(11), loss_weights(16)
    ({'code_generation': 1.0, 'ontology_annotation': 0.1}, {'code_generation': 1.0, 'ontology_annotation': 1.0})
    """
    if weights is None:
        return _DEFAULT.loss_weights(epoch)
    check_spelling(weights, DEFAULT_TASKS)
    return Curriculum(DEFAULT_PHASES, dict.fromkeys(DEFAULT_TASKS, 1.0) | dict(weights)).loss_weights(epoch)
