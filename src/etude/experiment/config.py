"""The root schema: the sections of an experiment file, and validation into an `ExperimentConfig`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.config import (
    Document,
    Feature,
    SectionSpec,
    Selection,
    apply_overrides,
    dump_yaml,
    find_config,
    lookup,
    read_config,
)
from etude.config.editor import json_schema
from etude.config.imports import import_user_modules
from etude.config.schema import validate_document
from etude.config.selection import plain, selections_in
from etude.config.signature import parameters_of
from etude.core import ConfigError
from etude.distributed.settings import ParallelConfig
from etude.experiment.features import ROOM_OF, all_features, features_for, with_features, with_training_models
from etude.experiment.settle import DEFAULT_NAMES, LEGACY_KEYS, move_legacy_keys, settle_data, settle_outputs
from etude.trainer import TrainerConfig

MODEL_SIZES = ("vocab_size", "n_types", "num_classes", "input_shape", "in_features", "out_features")
"""Model sizes that the data provides by default."""
_SECTIONS: dict[str, SectionSpec | None] = {
    "name": SectionSpec(
        model=str, description="Name of the experiment; by default derived from the path of the file."
    ),
    "description": SectionSpec(model=str, description="What the experiment is about, in a sentence."),
    "imports": SectionSpec(model=list[str], description="Modules or files that register your own components."),
    "model": SectionSpec(
        kind="model", provided=MODEL_SIZES, description="The model and its arguments; sizes are taken from the data."
    ),
    "data": SectionSpec(kind="data", description="The data set and its arguments."),
    "vocab": None,
    "loss": SectionSpec(
        kind="loss", description="The loss; by default chosen from the first batch; `model`: the model's own."
    ),
    "validation_loss": SectionSpec(kind="loss", description="Another loss for validation and `etude evaluate`."),
    "metrics": SectionSpec(
        kind="metric", many=True, description="Metrics of the validation, beside those of the loss: f1, auroc …"
    ),
    "optimizer": SectionSpec(kind="optimizer", provided=("params",), description="The optimizer; adamw by default."),
    "scheduler": SectionSpec(
        kind="scheduler", provided=("total_steps", "steps_per_epoch"), description="The learning-rate schedule."
    ),
    "tasks": None,
    "weighting": None,
    "curriculum": None,
    "training": SectionSpec(
        model=TrainerConfig, description="How long to train, and when to log, validate and save."
    ),
    "parallel": SectionSpec(
        model=ParallelConfig, description="How several processes divide data and model: ddp, fsdp, auto, or sizes."
    ),
    "callbacks": SectionSpec(
        kind="callback", many=True, provided=("tokenizer",), description="Callbacks, called in this order."
    ),
}
"""The keys of a file in display order; None marks those of features."""


@dataclass(slots=True)
class ExperimentConfig:
    """A validated experiment: every section as it will be built, and the document for messages."""

    name: str
    path: Path | None
    document: Document
    sections: dict[str, Any]
    features: tuple[Feature, ...] = ()
    """The features that the file uses."""

    @property
    def training(self) -> TrainerConfig:
        """The `training` section as a `Trainer` in Python takes it.

        Learning rate, weight decay and warm-up are filled in from their sections if the optimizer is AdamW and the
        schedule is `warmup_cosine`, the defaults of a `Trainer`. Build and pass other optimizers and schedules
        yourself.
        """
        return _for_python(self, any_optimizer=False)

    def __getattr__(self, key: str) -> Any:
        """Return a section by its key; None if the file has none."""
        if key not in _SECTIONS:
            raise AttributeError(f"an experiment has no section '{key}'")
        return self.sections.get(key)

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
        """Return the complete config as plain data, defaults included; loading it gives the same experiment."""
        result: dict[str, Any] = {"name": self.name}
        served = {key for feature in self.features for key in feature.sections}
        for key, value in self.sections.items():
            if key == "imports" and value:
                result[key] = [self._absolute_import(one) for one in value]
            elif key not in ("name", *served) and (value is not None or key == "scheduler"):
                result[key] = plain(value)
        for feature in self.features:
            result |= feature.plain(self.sections)
        result = {key: result[key] for key in _SECTIONS if key in result}
        result["training"] = {
            key: value for key, value in result["training"].items() if value is not None or key not in LEGACY_KEYS
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
    """Validate a document: import the user's modules, apply overrides, move legacy keys, fill in companions.

    With `announce`, every module under `imports:` is logged before it is run.
    """
    document = apply_overrides(document, overrides)
    base = document.path.parent if document.path else Path.cwd()
    imports = document.data.get("imports")
    if isinstance(imports, list) and all(isinstance(one, str) for one in imports):
        import_user_modules(imports, base, document=document, announce=announce)
    move_legacy_keys(document)
    _add_companions(document)
    sections = _validate(document)
    components = selections_in(sections).values()
    features = features_for(sections, [one.component.factory.__module__ for one in components])
    for feature in features:
        feature.settle(sections, document)
    settle_outputs(sections, document)
    settle_data(sections, document, features)
    name = sections.get("name") or _name_of(document.path)
    return ExperimentConfig(name, document.path, document, sections, features)


def create_trainer_config(config: ExperimentConfig) -> TrainerConfig:
    """Return the `training` section with the values of all other sections that have a key in it.

    Learning rate, weight decay, schedule and the settings of the meaningful loss are filled in for any optimizer.
    Build that optimizer and pass it to the `Trainer`, also a schedule with settings other than `warmup_steps`.
    """
    return _for_python(config, any_optimizer=True)


def _for_python(config: ExperimentConfig, *, any_optimizer: bool) -> TrainerConfig:
    """Return the `training` section with the values that a `Trainer` in Python needs from other sections.

    A `Trainer` builds AdamW from learning rate and weight decay, so those of another optimizer are omitted unless the
    caller asks for them. A schedule with settings other than `warmup_steps` is omitted too: its name alone would be
    wrong.
    """
    optimizer, scheduler = config.selection("optimizer"), config.selection("scheduler")
    found: dict[str, Any] = {"use_scheduler": False} if scheduler is None else {}
    if optimizer is not None and (any_optimizer or optimizer.component.name == DEFAULT_NAMES["optimizer"]):
        arguments = optimizer.defaults | optimizer.arguments
        found |= {"learning_rate": arguments.get("lr"), "weight_decay": arguments.get("weight_decay")}
    if scheduler is not None and not _changed(scheduler) - {"warmup_steps"}:
        warmup = (scheduler.defaults | scheduler.arguments).get("warmup_steps")
        found |= {"use_scheduler": True, "scheduler_type": scheduler.component.name, "warmup_steps": warmup}
    for feature in config.features:
        found |= feature.trainer_settings(config.sections)
    training: TrainerConfig = config.sections["training"]
    return training.model_copy(update=found)


def _changed(selection: Selection) -> set[str]:
    """Return the arguments of a section that differ from the default."""
    known = parameters_of(selection.component.factory)[0]
    return {key for key, value in selection.arguments.items() if key not in known or known[key][1] != value}


def create_model_config(config: ExperimentConfig) -> dict[str, Any]:
    """Return the arguments of the model, defaults included: `LeNet5(**create_model_config(config))`."""
    selection = config.require("model")
    return {**selection.defaults, **selection.arguments}


def experiment_schema(imports: Iterable[str] = ()) -> dict[str, Any]:
    """Return the JSON Schema of experiment files, with every registered component."""
    import_user_modules(list(imports), Path.cwd())
    sections = all_sections()
    return json_schema({**sections, "training": with_training_models(sections["training"], all_features())})


def all_sections() -> dict[str, SectionSpec]:
    """Return every section that an experiment file may have."""
    return with_features(_SECTIONS, all_features())


def _add_companions(document: Document) -> None:
    model = document.data.get("model")
    name = model.get("name") if isinstance(model, dict) else model
    if not isinstance(name, str):
        return
    try:
        companions = lookup("model", name).companions
    except ConfigError:
        return  # validation reports it with its location
    for section, value in companions.items():
        given = document.data.get(section, {})
        if isinstance(given, dict) and "name" not in given:  # omitted, or only some of its arguments given
            document.data[section] = {**value, **given}


def _validate(document: Document) -> dict[str, Any]:
    """Validate with the features whose keys the file has; with all features to explain a mistake."""
    for key in document.data:
        if key in ROOM_OF and not features_for([key]):
            raise ConfigError(f"{document.place(key)}: needs {ROOM_OF[key]}, which is not installed")
    try:
        return validate_document(document, with_features(_SECTIONS, features_for(document.data)))
    except ConfigError:
        return validate_document(document, all_sections())


def _name_of(path: Path | None) -> str:
    if path is None:
        return "experiment"
    if path.parent.name == "configs":
        return f"{path.parent.parent.name}/{path.stem}"
    return path.stem
