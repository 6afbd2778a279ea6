"""The root schema: which sections an experiment file has, and how a file becomes a validated `ExperimentConfig`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from etude.config import (
    Document,
    SectionSpec,
    Selection,
    apply_overrides,
    dump_yaml,
    find_config,
    import_user_modules,
    json_schema,
    lookup,
    plain,
    read_config,
    validate_document,
)
from etude.core import ConfigError
from etude.experiment.data_checks import settle_data
from etude.experiment.dialects import MOVED_KEYS, moved_settings, trainer_settings, unify_dialects
from etude.experiment.meaningful_dialect import meaningful_settings
from etude.experiment.outputs import settle_outputs
from etude.multimodal.loss_section import LOSS_PROVIDED
from etude.multimodal.vocab_section import VocabSection, settle_vocabulary
from etude.multitask.checks import settle_tasks
from etude.multitask.curriculum import Phase
from etude.multitask.sections import Name, Phases, TaskSection
from etude.trainer import TrainerConfig

SECTIONS: dict[str, SectionSpec] = {
    "name": SectionSpec(model=str, description="Name of the experiment; found from the file's place if left out."),
    "description": SectionSpec(model=str, description="What the experiment is about, in a sentence."),
    "imports": SectionSpec(model=list[str], description="Modules or files that register your own components."),
    "model": SectionSpec(
        kind="model", provided=("vocab_size", "n_types"), description="The model and its arguments."
    ),
    "data": SectionSpec(kind="data", description="The data set and its arguments."),
    "vocab": SectionSpec(
        model=VocabSection, description="How many tokens each modality has, where the data does not tell."
    ),
    "loss": SectionSpec(
        kind="loss",
        provided=LOSS_PROVIDED,
        description="The loss; found from the shapes of the first batch if left out.",
    ),
    "optimizer": SectionSpec(kind="optimizer", provided=("params",), description="The optimizer; adamw by default."),
    "scheduler": SectionSpec(
        kind="scheduler", provided=("total_steps", "steps_per_epoch"), description="The learning-rate schedule."
    ),
    "tasks": SectionSpec(
        model=dict[Name, TaskSection],
        description="Tasks that share the model, by name: head, loss, data, labels, weight, metrics and variants.",
    ),
    "weighting": SectionSpec(
        kind="weighting", provided=("tasks",), description="How the losses of tasks become one; static by default."
    ),
    "curriculum": SectionSpec(
        model=Phases, description="Phases in which tasks come in: a list, or `default` for the four of a code model."
    ),
    "training": SectionSpec(model=TrainerConfig, description="How long to train and what to do on the way."),
    "callbacks": SectionSpec(
        kind="callback", many=True, provided=("tokenizer",), description="Callbacks, called in this order."
    ),
}

_COMPONENT_ROOMS = (
    "callbacks",
    "data",
    "losses",
    "metrics",
    "models",
    "multimodal.loss_section",
    "multitask.gradient_monitor",
    "multitask.heads",
    "multitask.weighting",
    "optim",
)
_OPTIONAL_KEYS = ("use_mixed_precision", "precision_dtype", "meaningful_loss", "num_threads", "checkpoint_dir")


@dataclass(slots=True)
class ExperimentConfig:
    """A validated experiment: every section as it will be built, and the document for messages about it."""

    name: str
    path: Path | None
    document: Document
    sections: dict[str, Any]

    @property
    def training(self) -> TrainerConfig:
        """The `training` section, as a `Trainer` in Python takes it.

        Learning rate, weight decay and warm-up are filled in from their sections where the optimizer is AdamW and the
        schedule `warmup_cosine`, which a `Trainer` makes of them; others are for you to build and to give.
        """
        training: TrainerConfig = self.sections["training"]
        return training

    @property
    def vocab(self) -> VocabSection:
        """The `vocab` section; it says nothing if the file has none."""
        vocab: VocabSection = self.sections["vocab"]
        return vocab

    @property
    def tasks(self) -> dict[str, TaskSection]:
        """The `tasks` section; empty if there is none."""
        return self.sections.get("tasks") or {}

    @property
    def phases(self) -> list[Phase]:
        """The `curriculum` section; empty if there is none."""
        return self.sections.get("curriculum") or []

    def selection(self, section: str) -> Selection | None:
        """Return the component of a section, or None if it has none."""
        return self.sections.get(section)

    def require(self, section: str) -> Selection:
        """Return the component of a section; raise ConfigError if the file lacks it."""
        selection = self.selection(section)
        if selection is None:
            where = f"{self.document.place('')}: " if self.path else ""
            raise ConfigError(f"{where}there is no `{section}:` section; add one with `name:` and its arguments")
        return selection

    def to_dict(self) -> dict[str, Any]:
        """Return the whole config as plain data, defaults included: it loads again to the same experiment."""
        result: dict[str, Any] = {"name": self.name}
        for key in SECTIONS:
            value = self.sections.get(key)
            if key == "imports" and value:
                result[key] = [self._absolute_import(one) for one in value]
            elif key == "vocab":
                result |= {} if self.vocab.is_empty else {key: plain(value)}
            elif key != "name" and (value is not None or key == "scheduler"):
                result[key] = plain(value)
        if self.tasks:
            result["tasks"] = _plain_tasks(self.tasks)
        if self.phases:
            result["curriculum"] = [_plain_phase(phase) for phase in self.phases]
        moved = {*MOVED_KEYS, *meaningful_settings(self.selection("loss"))}
        result["training"] = {
            key: value
            for key, value in result["training"].items()
            if key not in moved and (value is not None or key not in _OPTIONAL_KEYS)
        }
        return result

    def to_yaml(self) -> str:
        """Return `to_dict` as YAML."""
        return dump_yaml(self.to_dict())

    def _absolute_import(self, one: str) -> str:
        base = self.path.parent if self.path else Path.cwd()
        file = base / one
        return str(file.resolve()) if one.endswith(".py") and file.exists() else one


def load_experiment_config(
    experiment: str | Path, config: str | None = None, *, overrides: Sequence[str] = ()
) -> ExperimentConfig:
    """Load `experiments/<experiment>/configs/<config>.yaml`, or a file by its path.

    Raises ConfigError with one line for every mistake.
    """
    return load_config(find_config(str(experiment), config), overrides=overrides)


def load_config(
    path: str | Path = "config.yaml", *, overrides: Sequence[str] = (), announce: bool = False
) -> ExperimentConfig:
    """Load and validate a YAML or JSON file; raise ConfigError with one line for every mistake."""
    return validate_experiment(read_config(Path(path)), overrides=overrides, announce=announce)


def validate_experiment(
    document: Document, *, overrides: Sequence[str] = (), announce: bool = False
) -> ExperimentConfig:
    """Validate a document: import the user's modules, apply overrides, unify dialects, fill in companions.

    With `announce`, a line names the code of every module under `imports:` before it is run.
    """
    load_components()
    document = apply_overrides(document, overrides)
    base = document.path.parent if document.path else Path.cwd()
    imports = document.data.get("imports")
    if isinstance(imports, list) and all(isinstance(one, str) for one in imports):
        import_user_modules(imports, base, document=document, announce=announce)
    unify_dialects(document)
    _add_companions(document)
    sections = validate_document(document, SECTIONS)
    settle_tasks(sections, document)
    settle_vocabulary(sections, document)
    settle_outputs(sections, document)
    settle_data(sections, document)
    sections["training"] = sections["training"].model_copy(update=trainer_settings(sections))
    name = sections.get("name") or _name_of(document.path)
    return ExperimentConfig(name, document.path, document, sections)


def create_trainer_config(config: ExperimentConfig) -> TrainerConfig:
    """Return the `training` section with the numbers of all other sections that have a key in it.

    Learning rate, weight decay, schedule and the settings of the meaningful loss are filled in, whichever optimizer
    they are for: build that and give it to the `Trainer`, and a schedule with other settings than `warmup_steps` too.
    """
    return config.training.model_copy(update=moved_settings(config.sections))


def create_model_config(config: ExperimentConfig) -> dict[str, Any]:
    """Return the arguments of the model, defaults included: `LeNet5(**create_model_config(config))`."""
    selection = config.require("model")
    return {**selection.defaults, **selection.arguments}


def experiment_schema(imports: Iterable[str] = ()) -> dict[str, Any]:
    """Return the JSON Schema of experiment files, with every registered component."""
    load_components()
    import_user_modules(list(imports), Path.cwd())
    return json_schema(SECTIONS)


def load_components() -> None:
    """Import the rooms whose components config files can name."""
    for room in _COMPONENT_ROOMS:
        import_module(f"etude.{room}")


def _add_companions(document: Document) -> None:
    model = document.data.get("model")
    name = model.get("name") if isinstance(model, dict) else model
    if not isinstance(name, str):
        return
    try:
        companions = lookup("model", name).companions
    except ConfigError:
        return  # validation tells, with its place
    for section, value in companions.items():
        given = document.data.get(section, {})
        if isinstance(given, dict) and "name" not in given:  # left out, or only some of its arguments given
            document.data[section] = {**value, **given}


def _plain_tasks(tasks: Mapping[str, TaskSection]) -> dict[str, Any]:
    """Return the tasks as a file would give them, without the keys that they do not say."""
    result = {name: _said(plain(task)) for name, task in tasks.items()}
    for task in result.values():
        task["variants"] = {name: _said(variant) for name, variant in task["variants"].items()}
    return result


def _plain_phase(phase: Phase) -> dict[str, Any]:
    return {key: _said(value) if key in ("start", "ramp") else value for key, value in _said(plain(phase)).items()}


def _said(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value is not None}


def _name_of(path: Path | None) -> str:
    if path is None:
        return "experiment"
    if path.parent.name == "configs":
        return f"{path.parent.parent.name}/{path.stem}"
    return path.stem
