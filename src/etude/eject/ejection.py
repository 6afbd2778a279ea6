"""Ejecting an experiment: build it, write it as plain PyTorch, and check that both take the same steps."""

import contextlib
import io
import json
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from etude.core import ConfigError, TrainingError
from etude.core.files import write_bytes, write_text
from etude.core.model import clean_state_dict
from etude.core.random import aside
from etude.core.spelling import shorten
from etude.distributed import World
from etude.eject.data import data_text
from etude.eject.examine import add_schedule, check_trainer, examine, model_call, optimizer_text, placed
from etude.eject.refusal import check_config, refuse
from etude.eject.source import Sources
from etude.eject.text import Facts, file_text
from etude.experiment import ExperimentConfig, build_data, build_trainer, load_config, load_experiment_config
from etude.lazy import package_version
from etude.monitor import RunFolder
from etude.optim.clipping import FLAT_NUMEL
from etude.trainer import Trainer

_CHECKED_STEPS = 2
DATA_SUFFIX = ".data.safetensors"


def eject(
    source: str | Path, out: str | Path, overrides: Sequence[str] = (), *, overwrite: bool = False
) -> list[Path]:
    """Write an experiment, or that of a run folder, as one file of plain PyTorch; return the files written.

    The file ends with .py and its folder exists. Raises ConfigError, with the key, if the experiment has something
    that cannot be written plainly.
    """
    path = Path(out)
    _check_place(path, overwrite)
    if Path(source).is_dir():
        config = _config_of_run(RunFolder.open(source), overrides)
    else:
        config = load_experiment_config(source, overrides=overrides)
    made = ejected(config, of=str(source))
    if made.tensors:
        _check_free(path.with_suffix(DATA_SUFFIX), overwrite)
    try:
        return made.write(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); choose another file") from error


def _check_place(path: Path, overwrite: bool) -> None:
    """Raise ConfigError if a file of Python code cannot be written there."""
    if path.suffix != ".py":
        raise ConfigError(f"{path} does not end with .py; choose a name such as {path.with_suffix('.py')}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the folder {path.parent} does not exist; create it, or choose another file")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; choose another file")
    _check_free(path, overwrite)


def _check_free(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} already exists; choose another file, or use --overwrite")


def _config_of_run(folder: RunFolder, overrides: Sequence[str]) -> ExperimentConfig:
    """Return the config of a run, with its number of threads; raise ConfigError if its weights have other roundings."""
    folder.check_rebuildable()
    config = load_config(folder.config_path, overrides=overrides, announce=True)
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # a run does not depend on this file
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
            write_bytes(one, save({key: value.contiguous() for key, value in self.tensors.items()}))
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
    check_trainer(config, trainer)
    sources = Sources()
    written = data_text(config, data.splits, sources)
    loss, draws = examine(config, trainer)
    has_schedule = add_schedule(config, trainer, sources)
    params = list(trainer.model.parameters())
    assert trainer.total_steps is not None
    assert trainer.loaders.steps_per_epoch is not None
    facts = Facts(
        head=_head(config, of),
        model=model_call(config, data.splits, sources),
        optimizer=optimizer_text(config, trainer),
        has_groups=len(trainer.optimizer.param_groups) > 1,
        learning_rate=float(trainer.optimizer.param_groups[0]["lr"]),
        loss=loss,
        steps_per_epoch=trainer.loaders.steps_per_epoch,
        total_steps=trainer.total_steps,
        has_schedule=has_schedule,
        draws=draws,
        has_buffers=any(True for _ in trainer.model.buffers()),
        is_small=sum(param.numel() for param in params) <= FLAT_NUMEL,
    )
    with placed(config, "model"):
        made = Ejected(file_text(facts, written, sources, training), written.tensors)
    _check_steps(config, made, trainer)
    return made


def _head(config: ExperimentConfig, of: str) -> str:
    about = (config.sections.get("description") or f"The experiment {config.name}").strip().rstrip(".")
    left = ", ".join(one.component.name for one in config.sections.get("callbacks") or [])
    made = f"Made with `etude eject {of or config.name}` (etude {package_version()}, torch {torch.__version__})."
    promise = (
        "It needs neither etude nor its config, and ends with the same weights, bit for bit, on a CPU with the same"
    )
    without = f" Left out, as they do not change the weights: {left}." if left else ""
    words = [f"{about}.", f"{made} {promise} number of threads.{without}"]
    text = "\n\n".join(textwrap.fill(one, 110, break_long_words=False) for one in words)
    safe = text.replace("\\", "\\\\").replace('"', "'")
    return f"{safe}\n\n    python FILE.py [weights.safetensors]\n"


# --- whether both do the same


def _check_steps(config: ExperimentConfig, made: Ejected, trainer: Trainer) -> None:
    """Take the first steps with the written file and with the trainer; raise TrainingError if a weight differs."""
    assert trainer.total_steps is not None
    number = min(_CHECKED_STEPS, trainer.total_steps)
    # Another seed than that of the run: what the file does not seed itself must not be right by chance.
    with aside(trainer.config.seed + 1), contextlib.redirect_stdout(io.StringIO()):
        try:
            written = _written_model(made, number)
        except Exception as error:
            what = shorten(f"{type(error).__name__}: {error}", 120)
            raise TrainingError(f"{config.name} cannot be ejected: the written file fails with {what}") from error
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
