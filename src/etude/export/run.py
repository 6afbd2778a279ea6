"""Exporting a run: its weights, a folder for the Hub, or a program that is checked on a batch of the run's data."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor, nn

from etude.checkpoint import Checkpoint
from etude.checkpoint.example import load_example
from etude.core import Batch, ConfigError, Task
from etude.core.batch import JointBatch
from etude.core.run_layout import EXAMPLE
from etude.data import StreamLoader
from etude.distributed import World
from etude.experiment.build import build_data
from etude.experiment.config import load_config
from etude.experiment.load import model_of, read_weights
from etude.experiment.opened import OpenedRun
from etude.export.hub import Card, save_hub
from etude.export.program import save_onnx, save_program
from etude.export.weights import save_weights, writing_into
from etude.monitor import RunFolder

Format = Literal["state_dict", "hub", "torch", "onnx"]
FORMATS: tuple[str, ...] = get_args(Format)
_SAMPLES = 4
"""Samples of the batch that a program is traced with and compared on."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and sentences about it."""

    files: list[Path]
    words: list[str]


def export_run(
    run_dir: str | Path,
    to: str,
    *,
    out: str | Path | None = None,
    which: str | int = "best",
    overrides: Sequence[str] = (),
    import_class: bool = False,
) -> Exported:
    """Export a checkpoint of a run into a folder; `RUN_DIR/export/FORMAT` by default.

    to: `state_dict`, plain weights in model.safetensors; `hub`, the files of a model repository; `torch`, a program of
        torch.export in model.pt2; `onnx`, model.onnx. Programs take batches of any size, and are compared with the
        model on a batch of the run's data.
    which: `best` (the last if no checkpoint is the best), `last`, or a step number.
    overrides: of the config, such as the path of the data that a program is compared on; for programs only.
    import_class: for a run made in Python, import the module of its recorded class.

    Raises ConfigError with the reason if the model cannot be exported in this form.
    """
    if to not in FORMATS:
        raise ConfigError(f"there is no format {to!r} (there are: {', '.join(FORMATS)})")
    if overrides and to in ("state_dict", "hub"):
        raise ConfigError(f"{' '.join(overrides)}: overrides have no effect on --to {to}; remove them")
    folder = RunFolder.open(run_dir)
    checkpoint = read_weights(folder, which, lazy=to in ("state_dict", "hub"))
    place = Path(out) if out is not None else folder.path / "export" / to
    is_new = not place.exists()
    try:
        with writing_into(place):
            return _export(folder, checkpoint, to, place, overrides, import_class)
    except BaseException:
        if is_new:
            shutil.rmtree(place, ignore_errors=True)
        raise


def _export(
    folder: RunFolder, checkpoint: Checkpoint, to: str, place: Path, overrides: Sequence[str], import_class: bool
) -> Exported:
    source = str(checkpoint.path)
    if to == "state_dict":
        path = save_weights(_weights(folder, checkpoint, import_class), place / "model.safetensors")
        return Exported([path], [f"{path}: the weights of {source}"])
    if to == "hub":
        model = model_of(folder, checkpoint, import_class=import_class)
        files = save_hub(model, place, _card(folder, checkpoint), checkpoint.meta.get("tokenizer"))
        return Exported(files, [f"{place}: {', '.join(file.name for file in files)}, of {source}"])
    task: Task | None = None
    data = "the run's data"
    if folder.is_rebuildable:
        model, batch, task = _with_batch(folder, checkpoint, overrides)
    else:
        model, batch, is_real = _with_example(folder, checkpoint, to, overrides, import_class)
        data = data if is_real else "made-up data of its shapes"
    if to == "onnx":
        saved = save_onnx(model, batch, place / "model.onnx", task=task)
    else:
        saved = save_program(model, batch, place / "model.pt2", task=task)
    words = f"{saved.path}: {source}, by {saved.exporter}; inputs: {', '.join(saved.inputs)}"
    sizes = ", ".join(map(str, saved.sizes))
    difference = f"  largest difference from the model {saved.difference:.3g}, on {data} in batches of {sizes}"
    return Exported([saved.path], [words, difference])


def _weights(folder: RunFolder, checkpoint: Checkpoint, import_class: bool) -> Mapping[str, Any] | nn.Module:
    """Return the weights of a checkpoint; if it has only fingerprints of frozen ones, the model that has them."""
    is_whole = all(isinstance(value, Tensor) for value in checkpoint.model_state.values())
    return checkpoint.model_state if is_whole else model_of(folder, checkpoint, import_class=import_class)


def _with_example(
    folder: RunFolder, checkpoint: Checkpoint, to: str, overrides: Sequence[str], import_class: bool
) -> tuple[nn.Module, Batch, bool]:
    """Return the model of a run made in Python, its example batch, and whether that is not made up."""
    if overrides:
        raise ConfigError(f"{' '.join(overrides)}: a run made in Python has no config that this overrides; remove it")
    if not (folder.path / EXAMPLE).is_file():
        raise ConfigError(
            f"{folder.path} has no {EXAMPLE}, which a run made in Python keeps if its batches are tensors in tuples or "
            "mappings and its task calls the model plainly; in Python: "
            f"etude.export.save_{'onnx' if to == 'onnx' else 'program'}(load_model(…), batch, path)"
        )
    batch, is_real = load_example(folder.path)
    return model_of(folder, checkpoint, import_class=import_class), batch, is_real


def _with_batch(folder: RunFolder, checkpoint: Checkpoint, overrides: Sequence[str]) -> tuple[nn.Module, Batch, Task]:
    """Return the model of a run on the CPU, the first samples of its validation or training data, and its task."""
    small = ("training.device=cpu", f"training.batch_size={_SAMPLES}")
    config = load_config(folder.config_path, overrides=[*overrides, *small], announce=True)
    data = build_data(config, World())
    trainer = OpenedRun(config, checkpoint, World()).trainer(data)
    loader: Any = data.loader("validation") or data.loader("train")
    batches = (loader if isinstance(loader, StreamLoader) else loader.in_order()).iterate(0)
    try:
        batch = next(batches)
        return trainer.model, batch[0] if isinstance(batch, JointBatch) else batch, trainer.task
    finally:
        batches.close()


def _card(folder: RunFolder, checkpoint: Checkpoint) -> Card:
    """Return what is known about a run: the metrics of the exported step, the sections of its config."""
    result, meta = folder.read_result(), checkpoint.meta
    is_last = result.get("step") == meta.get("step")
    metrics = {name: float(value) for name, value in result["metrics"].items()} if is_last else checkpoint.metrics
    if not folder.is_rebuildable:
        return Card(folder.path.name, metrics)
    config = load_config(folder.config_path)
    sections, sizes, facts = config.to_dict(), meta.get("model_sizes") or {}, meta.get("data") or {}
    classes = {"id2label": dict(enumerate(facts["classes"]))} if "classes" in facts else {}
    details = {"section": sections.get("model"), "sizes": sizes, **classes, "data": facts}
    dataset = sections.get("data")
    name = dataset.get("name", "unknown") if isinstance(dataset, dict) else str(dataset or "unknown")
    return Card(config.name, metrics, _task(sizes), name, details)


def _task(sizes: dict[str, Any]) -> str:
    """Return the Hub's name of a task, from the sizes of the data."""
    shape, is_classes = sizes.get("input_shape"), "num_classes" in sizes
    if "vocab_size" in sizes:
        return "text-classification" if is_classes else "text-generation"
    if shape is not None and len(shape) == 3 and is_classes:
        return "image-classification"
    if shape is not None and len(shape) == 1:
        return "tabular-classification" if is_classes else "tabular-regression"
    return "other"
