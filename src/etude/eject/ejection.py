"""Ejecting an experiment: build it, write it as plain PyTorch, and check that both take the same steps."""

import contextlib
import copy
import io
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from etude.config.signature import parameters_of
from etude.core import ConfigError, TrainingError
from etude.core.files import write_text
from etude.core.model import clean_state_dict
from etude.core.random import aside, host_draws
from etude.data import DataSplits
from etude.distributed import World
from etude.eject.data import data_text
from etude.eject.plain import Transformer
from etude.eject.refusal import check_config, refuse
from etude.eject.source import Sources
from etude.eject.text import Facts, LossText, call, file_text, optimizer_call
from etude.engine.objective import Objective
from etude.experiment import ExperimentConfig, build_data, build_trainer, load_config, load_experiment_config
from etude.lazy import package_version
from etude.losses.inferred import InferredLoss
from etude.losses.language import LanguageModelingLoss
from etude.losses.strategies import ClassificationLoss, LossStrategy
from etude.losses.task import SupervisedTask
from etude.losses.wrapped import FunctionLoss
from etude.models import CausalTransformerLM
from etude.monitor import RunFolder
from etude.optim.clipping import FLAT_NUMEL
from etude.trainer import Trainer

_PLAIN_MODELS: dict[Any, tuple[Any, tuple[str, ...]]] = {CausalTransformerLM: (Transformer, ("n_types", "max_len"))}
"""Model → the same model without what only other uses need, and arguments that it does not have."""
_REGRESSION: dict[Any, tuple[str, tuple[str, ...]]] = {
    nn.MSELoss: ("mse_loss", ()),
    nn.L1Loss: ("l1_loss", ()),
    nn.HuberLoss: ("huber_loss", ("delta",)),
}
"""Loss of torch → its function and the options of it."""
_CHECKED_STEPS = 2
DATA_SUFFIX = ".data.safetensors"


def eject(
    source: str | Path, out: str | Path, overrides: Sequence[str] = (), *, overwrite: bool = False
) -> list[Path]:
    """Write an experiment, or that of a run folder, as one file of plain PyTorch; return the files written.

    Raises ConfigError, with the key, if it has something that cannot be written plainly.
    """
    path = Path(out)
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} already exists; choose another file, or use --overwrite")
    if Path(source).is_dir():
        config = _config_of_run(RunFolder.open(source), overrides)
    else:
        config = load_experiment_config(source, overrides=overrides)
    made = ejected(config, of=str(source))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return made.write(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); choose another file") from error


def _config_of_run(folder: RunFolder, overrides: Sequence[str]) -> ExperimentConfig:
    """Return the config of a run, with its number of threads; raise ConfigError if its weights have other roundings."""
    folder.check_rebuildable()
    config = load_config(folder.config_path, overrides=overrides, announce=True)
    known: dict[str, Any] = {}
    if folder.environment_path.exists():
        known = json.loads(folder.environment_path.read_text(encoding="utf-8"))
    training = config.sections["training"]
    if (kind := known.get("device", {}).get("type", "cpu")) != "cpu" and training.device != "cpu":
        raise refuse(
            config, "training.device", f"the run was on {kind}; add training.device=cpu to train it on the CPU"
        )
    if (processes := known.get("processes", 1)) > 1:
        raise ConfigError(
            f"{folder.path} cannot be ejected: {processes} processes trained it; eject its config instead"
        )
    if training.num_threads is None and "cpu_threads" in known:
        config.sections["training"] = training.model_copy(update={"num_threads": known["cpu_threads"]})
    return config


@dataclass(frozen=True, slots=True)
class Ejected:
    """An experiment as the text of a Python file, and samples that it reads from a file beside it."""

    text: str
    tensors: dict[str, Tensor]

    def write(self, path: Path) -> list[Path]:
        """Write the file, and `NAME.data.safetensors` beside it if it reads samples from there; return both."""
        beside = [path.with_suffix(DATA_SUFFIX)] if self.tensors else []
        for one in beside:
            save_file({key: value.contiguous() for key, value in self.tensors.items()}, one)
        write_text(path, self.text)
        return [path, *beside]


def ejected(config: ExperimentConfig, *, of: str = "") -> Ejected:
    """Return the experiment as a Python file that imports nothing of etude.

    The first steps of both are compared: it is returned only if all weights are the same, bit for bit.
    """
    check_config(config)
    training = config.sections["training"].model_copy(update={"device": "cpu"})
    built = replace(config, sections={**config.sections, "training": training, "callbacks": None})
    data = build_data(built, World())
    trainer = build_trainer(built, data=data, world=World(), progress=False)
    _check_trainer(config, trainer)
    sources = Sources()
    written = data_text(config, data.splits, sources)
    loss, draws = _examine(config, trainer)
    has_schedule = _add_schedule(config, trainer, sources)
    params = list(trainer.model.parameters())
    assert trainer.total_steps is not None
    assert trainer.loaders.steps_per_epoch is not None
    facts = Facts(
        head=_head(config, of),
        model=_model_call(config, data.splits, sources),
        optimizer=_optimizer(config, trainer.optimizer),
        learning_rate=float(trainer.optimizer.param_groups[0]["lr"]),
        loss=loss,
        steps_per_epoch=trainer.loaders.steps_per_epoch,
        total_steps=trainer.total_steps,
        has_schedule=has_schedule,
        draws=draws,
        has_buffers=any(True for _ in trainer.model.buffers()),
        is_small=sum(param.numel() for param in params) <= FLAT_NUMEL,
    )
    made = Ejected(file_text(facts, written, sources, training), written.tensors)
    _check_steps(config, made, trainer)
    return made


def _head(config: ExperimentConfig, of: str) -> str:
    about = (config.sections.get("description") or f"The experiment {config.name}.").rstrip(".")
    left = ", ".join(one.component.name for one in config.sections.get("callbacks") or [])
    without = f"Left out, as they do not change the weights: checkpoints during the run, {left}.\n" if left else ""
    return f"""{about}.

Made with `etude eject {of or config.name}` (etude {package_version()}, torch {torch.__version__}). It needs neither
etude nor its config, and ends with the same weights, bit for bit, on a CPU with the same number of threads.
{without}
    python FILE.py [weights.safetensors]
"""


# --- what is built


def _check_trainer(config: ExperimentConfig, trainer: Trainer) -> None:
    """Raise ConfigError for a task, an objective or parameters that the written step does not have."""
    if type(trainer.task) is not SupervisedTask or type(trainer.step.objective) is not Objective:
        raise refuse(config, "loss", f"{type(trainer.task).__name__} is more than one plain loss")
    params, groups = list(trainer.model.parameters()), trainer.optimizer.param_groups
    if len(groups) != 1 or [id(one) for one in groups[0]["params"]] != [id(one) for one in params]:
        raise refuse(config, "optimizer", "some parameters are frozen, or have their own settings")
    if {param.dtype for param in params} not in ({torch.float32}, {torch.float64}):
        raise refuse(config, "model", "its weights are not all float32, or all float64")
    if trainer.learning_rate.callbacks:
        raise refuse(config, "scheduler", "torch's schedulers are not written; name one of `etude list`")


def _optimizer(config: ExperimentConfig, optimizer: torch.optim.Optimizer) -> str:
    kinds = [kind for kind in type(optimizer).__mro__ if vars(torch.optim).get(kind.__name__) is kind]
    own = type(optimizer).__module__ == "etude.optim.optimizers"
    if not kinds or not (own or kinds[0] is type(optimizer)):
        raise refuse(config, "optimizer", f"{type(optimizer).__name__} is not an optimizer of torch")
    return optimizer_call(optimizer, kinds[0])


def _add_schedule(config: ExperimentConfig, trainer: Trainer, sources: Sources) -> bool:
    schedule = trainer.learning_rate.schedule
    if schedule is None:
        return False
    if not isinstance(schedule, FunctionType):
        raise refuse(config, "scheduler", f"it is a {type(schedule).__name__}, not a function")
    with _placed(config, "scheduler"):
        sources.add_closure(schedule, "lr_factor")
    return True


def _model_call(config: ExperimentConfig, splits: DataSplits, sources: Sources) -> str:
    """Add the source of the model; return the expression that makes it."""
    selection = config.require("model")
    factory = selection.component.factory
    known = parameters_of(factory)[0]
    sizes = {name: size for name, size in splits.model_sizes().items() if name in known}
    given = {key: value for key, value in (sizes | selection.arguments).items() if value != known[key][1]}
    plain, absent = _PLAIN_MODELS.get(factory, (factory, ()))
    for key in absent:
        if key != "max_len" and given.get(key):
            raise refuse(config, f"model.{key}", "the plain model has no such argument")
    given = {key: value for key, value in given.items() if key not in absent}
    for key, value in given.items():
        if not _is_literal(value):
            raise refuse(config, f"model.{key}", f"a {type(value).__name__} cannot be written as a constant")
    with _placed(config, "model"):
        return call(sources.add(plain), given)


def _is_literal(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_literal, value))
    return value is None or isinstance(value, (bool, int, float, str))


@contextlib.contextmanager
def _placed(config: ExperimentConfig, key: str) -> Any:
    try:
        yield
    except ConfigError as error:
        raise refuse(config, key, str(error)) from error


def _examine(config: ExperimentConfig, trainer: Trainer) -> tuple[LossText, bool]:
    """Run a copy of the model on the first batch; return its loss, and whether it draws random numbers in training."""
    model, calls = copy.deepcopy(trainer.model), list[tuple[Any, Any]]()
    assert trainer.loaders.train is not None
    batch = next(iter(trainer.loaders.train.iterate(0)))
    model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    outputs = list[Any]()
    model.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    draws = []
    with aside(0), torch.no_grad():
        for mode in (True, False):
            before = host_draws()
            trainer.task(model.train(mode), batch, metrics=False)
            draws.append(before != host_draws())
    given = [value for args, kwargs in calls[:1] for value in (*args, *kwargs.values()) if value is not None]
    if len(given) != 1 or not isinstance(given[0], Tensor) or not isinstance(outputs[0], Tensor):
        raise refuse(config, "model", "its forward must take one tensor and return one")
    if draws[1]:
        raise refuse(config, "model", "it draws random numbers in evaluation too")
    strategy = trainer.task.strategy  # type: ignore[attr-defined]
    return _loss_text(config, strategy.chosen if isinstance(strategy, InferredLoss) else strategy), draws[0]


def _loss_text(config: ExperimentConfig, strategy: LossStrategy | None) -> LossText:
    half = ".float()" if config.sections["training"].resolved_precision == "bf16" else ""
    if type(strategy) is FunctionLoss and type(strategy.function) in _REGRESSION:
        name, names = _REGRESSION[type(strategy.function)]
        given = {key: getattr(strategy.function, key) for key in names}
        total = call(f"F.{name}", given | {"reduction": "sum"}, f"predictions{half}", "labels").replace("'", '"')
        return LossText(total, "labels.numel()", output="predictions")
    if type(strategy) not in (LanguageModelingLoss, ClassificationLoss):
        raise refuse(
            config, "loss", f"{type(strategy).__name__} is not cross entropy, mse, l1 or huber; use one of them"
        )
    assert isinstance(strategy, (LanguageModelingLoss, ClassificationLoss))
    if isinstance(strategy, ClassificationLoss) and strategy.class_weights is not None:
        raise refuse(config, "loss.class_weights", "they are not written; remove them")
    is_language = isinstance(strategy, LanguageModelingLoss)
    if isinstance(strategy, LanguageModelingLoss):
        if strategy.fused_head is not False:
            raise refuse(config, "loss.fused_head", "it is not plain PyTorch; set it to false")
        if strategy.shift:
            raise refuse(config, "loss.shift", "the labels are the next tokens already; remove it")
    ignored = strategy.ignore_index if strategy.ignore_index is not None and strategy.ignore_index >= 0 else None
    options = {"ignore_index": ignored, "label_smoothing": strategy.label_smoothing or None}
    listed = "".join(f", {key}={value!r}" for key, value in options.items() if value is not None)
    tensors = f"logits{half}.flatten(0, 1), labels.flatten()" if is_language else f"logits{half}, labels"
    count = "labels.numel()" if ignored is None else f"int((labels != {ignored}).sum())"
    total = f'F.cross_entropy({tensors}, reduction="sum"{listed})'
    return LossText(total, count, is_language=is_language and not strategy.label_smoothing)


# --- whether both do the same


def _check_steps(config: ExperimentConfig, made: Ejected, trainer: Trainer) -> None:
    """Take the first steps with the written file and with the trainer; raise TrainingError if a weight differs."""
    assert trainer.total_steps is not None
    number = min(_CHECKED_STEPS, trainer.total_steps)
    # Another seed than that of the run: what the file does not seed itself must not be right by chance.
    with aside(trainer.config.seed + 1), contextlib.redirect_stdout(io.StringIO()):
        written = _written_model(made, number)
    with trainer.state.random.running():
        _take_steps(trainer, number)
    found, expected = written.state_dict(), clean_state_dict(trainer.model)
    different = [name for name in {**expected, **found} if not _same(expected.get(name), found.get(name))]
    if different:
        raise TrainingError(
            f"{config.name} cannot be ejected: after {number} steps {different[0]} of the written file differs from "
            "that of the experiment, for example because the model draws random numbers with NumPy"
        )


def _written_model(made: Ejected, number: int) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ejected.py"
        made.write(path)
        names: dict[str, Any] = {"__name__": "ejected", "__file__": str(path)}
        exec(compile(made.text, str(path), "exec"), names)
        model: nn.Module = names["train"](number)
    return model


def _take_steps(trainer: Trainer, number: int) -> None:
    loader = trainer.loaders.train
    assert loader is not None
    trainer.learning_rate.follow(trainer.config)
    trainer.model.train()
    groups = (group for epoch in count() for group in trainer.loaders.accumulator.group(loader.iterate(epoch), epoch))
    for step, batches in enumerate(islice(groups, number)):
        trainer.learning_rate.set(step)
        trainer.step(batches)


def _same(first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    bits = [one.contiguous().view(-1).view(torch.uint8) for one in (first, second)]
    return first.shape == second.shape and first.dtype == second.dtype and torch.equal(*bits)
