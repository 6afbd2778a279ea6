"""Runs made in Python, made again from what their config.yaml records: to evaluate and to resume them."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from etude.checkpoint import Checkpoint, load_model_state
from etude.checkpoint.trust import errors_of
from etude.config.document import Document
from etude.config.imports import import_user_modules
from etude.config.overrides import apply_overrides
from etude.core import ConfigError, RunFolderError
from etude.core.spelling import listed, suggest
from etude.distributed import World
from etude.monitor import RunFolder
from etude.trainer import Trainer, TrainerConfig
from etude.trainer.recipe import SETTING, check_known, modules_in, rebuild

_SPLITS = {"validation": "val_loader", "train": "train_loader"}
ONLY_TRAINING = (
    *("warmup_steps", "scheduler_type", "use_scheduler"),
    *("validate_interval", "validate_every_steps", "keep_best", "restore_best", "monitor", "mode"),
)
"""Settings that have no effect on a model that is evaluated."""
_OF_WRITING = (
    "checkpoint_dir",
    "save_every_steps",
    "async_save",
    "checkpoint_interval",
    "freeze",
    "unfreeze",
    "ema",
    "batch_transform",
)
_OF_OPTIMIZER = ("training.learning_rate", "training.weight_decay")
_EVALUATED = ("model", "loss", "val_loss", "task", "metrics")


class PythonRun:
    """A run folder of a `Trainer`, with what it records about that.

    Raises RunFolderError if it records nothing. Without `import_class` nothing is made: what a folder names may be any
    code.
    """

    def __init__(self, folder: RunFolder, overrides: Sequence[str] = (), *, import_class: bool = False) -> None:
        self.folder = folder
        self._document = apply_overrides(Document(_read(folder), folder.config_path), overrides)
        for override in overrides:
            if not override.lstrip().startswith(("training.", "parallel.", "parallel=")):
                raise ConfigError(
                    f"{override.partition('=')[0].strip()}: {folder.path} holds a run made in Python, of which only "
                    "keys of training and parallel can be changed"
                )
        recipe, settings = self._document.data.get("python"), self._document.data.get("training")
        if not isinstance(recipe, Mapping) or not isinstance(settings, Mapping):
            folder.check_rebuildable()
            raise RunFolderError(f"{folder.config_path} is damaged: it has no sections python and training")
        self.recipe, self.settings = recipe, settings
        self.name = str(self._document.data.get("name") or "run")
        self._allowed = import_class
        self._has_other_optimizer = any(override.lstrip().startswith(_OF_OPTIMIZER) for override in overrides)

    def trainer(self, world: World, progress: bool) -> Trainer:
        """Return the trainer, with the newest intact checkpoint. A single process has the whole model."""
        names = [name for name in self.recipe if not name.startswith(SETTING)]
        parts: dict[str, Any] = {"config": self.config(), "progress": progress, "world": world, **self._parts(names)}
        recorded, given = parts.pop("parallel", {}), self._document.data.get("parallel", {})
        if world.size > 1:
            parts["parallel"] = {**recorded, **given} if isinstance(given, dict) else given
        changes = self._has_other_optimizer
        trainer = Trainer(output_dir=self.folder.path, resume=not changes, name=self.name, **parts)
        if changes:
            trainer.load_checkpoint(self.folder.path, keep_hyperparameters=True)
        return trainer

    def evaluator(self, split: str, checkpoint: Checkpoint, world: World) -> Trainer:
        """Return a trainer with the weights of a checkpoint, whose validation data is that of the split."""
        there = [one for one, name in _SPLITS.items() if name in self.recipe]
        if split not in there:
            raise ConfigError(f"{self.folder.path} has no data of a split {split!r}{suggest(split, there)}")
        parts = self._parts([*_EVALUATED, _SPLITS[split]])
        parts["val_loader"] = parts.pop(_SPLITS[split])
        trainer = Trainer(**parts, config=self.config(evaluates=True), progress=False, world=world)
        with errors_of(checkpoint.path):
            trainer.check_facts(checkpoint.meta, checkpoint.path)
            load_model_state(trainer.model, checkpoint.model_state)
        return trainer

    @property
    def device(self) -> str:
        """The device of the run, as in its config."""
        return str(self.settings.get("device") or "auto")

    def config(self, *, evaluates: bool = False) -> dict[str, Any]:
        """Return the settings of the run."""
        objects = [name for name in self.recipe if name.startswith(SETTING)] if not evaluates else []
        found = {name.removeprefix(SETTING): part for name, part in self._parts(objects).items()}
        left_out = {*ONLY_TRAINING, *_OF_WRITING} if evaluates else set()
        changed = {name: value for name, value in self.settings.items() if not _is_default(name, value)}
        return {**{name: value for name, value in changed.items() if name not in left_out}, **found}

    def _modules(self, recipe: Any) -> list[str]:
        return [one for one in modules_in(recipe) if one.partition(".")[0] not in ("etude", "torch")]

    def _parts(self, names: Sequence[str]) -> dict[str, Any]:
        """Return parts of the run; raise RunFolderError, in one line, if they cannot be made."""
        modules = self._modules([self.recipe[name] for name in names if name in self.recipe])
        try:
            check_known(self.recipe, names)
            if not self._allowed:
                code = listed(self._modules(self.recipe), shorten=True)
                raise ConfigError(
                    f"it has code of {code}; if you trust the folder, --import-class imports that code and runs it"
                )
            import_user_modules(modules, self.folder.path, path="python", document=self._document, announce=True)
            return rebuild(self.recipe, names)
        except ConfigError as error:
            raise RunFolderError(
                f"{self.folder.path} holds a run made in Python: {error}; or use its script, with "
                f"Trainer(…, output_dir={str(self.folder.path)!r}, resume=True)"
            ) from error


def python_run(folder: RunFolder, overrides: Sequence[str], import_class: bool) -> PythonRun | None:
    """Return the run if it was made in Python; raise ConfigError if `import_class` is of no use."""
    if folder.config_path.is_file() and not folder.is_rebuildable:  # reading a pipe might block forever
        return PythonRun(folder, overrides, import_class=import_class)
    if import_class:
        raise ConfigError(
            f"--import-class is for runs made in Python, but {folder.path} has a whole config; remove it"
        )
    return None


def _is_default(name: str, value: Any) -> bool:
    """Whether a setting was not given: what is given has warnings of its own."""
    field = TrainerConfig.model_fields.get(name)
    return field is not None and field.default == value


def _read(folder: RunFolder) -> dict[str, Any]:
    try:
        with folder.config_path.open("rb") as file:
            found = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise RunFolderError(f"{folder.config_path} cannot be read ({reason}); restore it from a backup") from error
    return found if isinstance(found, dict) else {}
