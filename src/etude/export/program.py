"""A model as a program that runs without its Python code: torch.export and ONNX, compared with the model."""

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from etude.core import Batch, ConfigError, Task
from etude.core.batch import num_samples
from etude.core.model import Forward, ModelCall, unwrap
from etude.core.spelling import shorten
from etude.engine.evaluation import eval_mode
from etude.engine.prediction import readable, tensors_in_output
from etude.export.weights import writing_into

OPSET = 18
"""Version of ONNX's operators for the older exporter."""
TOLERANCE = 1e-3
"""Largest difference from the model's outputs, relative to the largest of them."""
TRACER_WARNING: type[Warning] = torch.jit.TracerWarning  # type: ignore[attr-defined]
"""What the older exporter warns with where it takes a value of the example for a constant."""
Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class Program(nn.Module):
    """A model as a function of tensors; its outputs are those of `Trainer.predict`."""

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Take the arguments of an example call; those that are not tensors become constants."""
        super().__init__()
        self.model = model
        self._args, self._kwargs = list(args), dict(kwargs)
        names = Forward.of(model).positional
        self._places: list[int | str] = [place for place, one in enumerate(args) if isinstance(one, Tensor)]
        self._places += [name for name, one in kwargs.items() if isinstance(one, Tensor)]
        self.names = [
            place if isinstance(place, str) else names[place] if place < len(names) else f"input_{place}"
            for place in self._places
        ]

    def forward(self, *tensors: Tensor) -> Any:
        """Return the outputs of the model."""
        args, kwargs = list(self._args), dict(self._kwargs)
        for place, tensor in zip(self._places, tensors, strict=True):
            if isinstance(place, int):
                args[place] = tensor
            else:
                kwargs[place] = tensor
        return readable(self.model(*args, **kwargs))

    def example(self) -> tuple[Tensor, ...]:
        """Return the inputs of the example call."""
        found = [self._args[place] if isinstance(place, int) else self._kwargs[place] for place in self._places]
        return tuple(tensor.contiguous() for tensor in found)


class TaskProgram(Program):
    """A model that a task calls in its own way, such as several tasks their heads; its outputs are by task."""

    def __init__(self, model: nn.Module, task: Task, batch: Mapping[str, Any]) -> None:
        """Take an example batch; its tensors that change the outputs are the inputs, the others labels."""
        nn.Module.__init__(self)
        self.model, self._task, self._batch = model, task, dict(batch)
        self.names = [key for key, one in batch.items() if isinstance(one, Tensor) and not self._is_unused(key)]
        tensors = {key for key, one in batch.items() if isinstance(one, Tensor)}
        self._batch = {key: one for key, one in batch.items() if key in self.names or key not in tensors}

    def forward(self, *tensors: Tensor) -> Any:
        """Return the outputs of the tasks."""
        given = dict(zip(self.names, tensors, strict=True))
        return readable(self._task.predict(self.model, {**self._batch, **given}))

    def example(self) -> tuple[Tensor, ...]:
        """Return the inputs of the example batch."""
        return tuple(self._batch[name].contiguous() for name in self.names)

    def _is_unused(self, key: str) -> bool:
        """Whether neither another value nor the absence of a tensor of the batch changes the outputs."""
        others = {name: one for name, one in self._batch.items() if name != key}
        try:
            whole, other, without = (
                _leaves(readable(self._task.predict(self.model, one)))
                for one in (self._batch, {**others, key: (self._batch[key] == 0).to(self._batch[key])}, others)
            )
        except Exception:  # the model's own code: it needs this input
            return False
        same = [len(whole) == len(found) for found in (other, without)]
        return all(same) and all(
            torch.equal(one, two) and torch.equal(one, three)
            for one, two, three in zip(whole, other, without, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Saved:
    """A program that has been written, loaded again, and compared with the model."""

    path: Path
    inputs: list[str]
    difference: float
    """The largest difference from the model's outputs."""
    sizes: list[int]
    """The batch sizes that were compared."""
    exporter: str
    """Which exporter made it, and why if it is not the first choice."""


def save_program(model: nn.Module, batch: Batch, path: str | Path, *, task: Task | None = None) -> Saved:
    """Write a model with `torch.export`, for batches of any size; `batch` is an example.

    With a `task` that calls the model in its own way, such as a `MultiTask`, the outputs are those of its `predict`.

    `torch.export.load(path).module()(inputs)` runs it, without the code of the model. Raises ConfigError with the
    reason if the model cannot be exported, or only for one batch size.
    """

    def make(program: Program, file: Path) -> str:
        exported = torch.export.export(program, program.example(), dynamic_shapes=_dynamic(program), strict=False)
        # Without calls of Python functions, which masks of transformers have and a file cannot hold.
        stream = io.BytesIO()  # on a full disk torch's own writer ends the process
        torch.export.save(exported.run_decompositions({}), stream)
        file.write_bytes(stream.getbuffer())
        return "torch.export"

    def load(_: Program, file: Path) -> Run:
        module = torch.export.load(file).module()
        return lambda tensors: _leaves(module(*tensors))

    return _save(model, batch, Path(path), make, load, task)


def save_onnx(model: nn.Module, batch: Batch, path: str | Path, *, task: Task | None = None) -> Saved:
    """Write a model as ONNX, for batches of any size; `batch` is an example, `task` as of `save_program`.

    The file is compared with the model by onnxruntime. The exporter that is based on `torch.export` is used, and the
    older one if that fails. Raises ConfigError with the reason if both fail.
    """
    try:
        import onnx  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: F401
        import onnxruntime  # type: ignore[import-not-found, import-untyped, unused-ignore]
        import onnxscript  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"ONNX needs {error.name}: pip install 'etude[onnx]'") from error

    def make(program: Program, file: Path) -> str:
        outputs = [name for name, _ in _named(program(*program.example()))]
        names: dict[str, Any] = {"input_names": program.names, "output_names": outputs}
        options: dict[str, Any]
        try:
            options = {"dynamo": True, "dynamic_shapes": _dynamic(program), "external_data": False, "verbose": False}
            torch.onnx.export(program, program.example(), str(file), **options, **names)
            return "dynamo"
        except OSError:  # of the disk
            raise
        except Exception as error:  # of the exporter, or of the model's own code
            reason = _reason(error)
        axes = {name: {0: "batch"} for name in (*program.names, *outputs)}
        options = {"dynamo": False, "dynamic_axes": axes, "opset_version": OPSET}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", TRACER_WARNING)
            torch.onnx.export(program, program.example(), str(file), **options, **names)
        doubts = [one for one in caught if one.category is TRACER_WARNING]
        warning = f"; it may be wrong for other inputs: {_line(str(doubts[0].message))}" if doubts else ""
        return f"the older exporter, because dynamo failed ({reason}){warning}"

    def load(program: Program, file: Path) -> Run:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        names = [one.name for one in session.get_inputs()]

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            given = zip(program.names, tensors, strict=True)
            inputs = {name: tensor.cpu().numpy() for name, tensor in given if name in names}
            return [torch.from_numpy(one) for one in session.run(None, inputs)]

        return run

    return _save(model, batch, Path(path), make, load, task)


def example_program(model: nn.Module, batch: Batch, task: Task | None = None) -> Program:
    """Return a model with the arguments of its call for a batch. Raises ConfigError if the batch is too small."""
    model = unwrap(model)
    if task is not None and type(task).predict is not Task.predict:
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"a {type(task).__name__} is exported with a mapping as batch, not a {type(batch).__name__}"
            )
        program: Program = TaskProgram(model, task, batch)
    else:
        args, kwargs = ModelCall(model)(lambda *args, **kwargs: (args, kwargs), batch)
        program = Program(model, args, kwargs)
    if num_samples(batch) < 2 or any(one.dim() == 0 or len(one) != num_samples(batch) for one in program.example()):
        raise ConfigError(
            "a program for any batch size needs an example batch of at least 2 samples, with a row of every input for "
            "each sample"
        )
    return program


def _save(
    model: nn.Module,
    batch: Batch,
    path: Path,
    make: Callable[[Program, Path], str],
    load: Callable[[Program, Path], Run],
    task: Task | None,
) -> Saved:
    """Make a file beside its destination, load and compare it, and only then put it in place."""
    with (
        writing_into(path.parent),
        eval_mode(model),
        torch.no_grad(),
        tempfile.TemporaryDirectory(dir=path.parent) as folder,
        _quiet(),
    ):
        program = example_program(model, batch, task).eval()
        file = Path(folder) / path.name
        try:
            exporter = make(program, file)
            run = load(program, file)
        except OSError:  # of the disk
            raise
        except Exception as error:  # of the exporter, or of the model's own code
            raise ConfigError(f"{type(model).__name__} cannot be exported: {_reason(error)}") from error
        difference, sizes = _compare(program, run)
        file.replace(path)
    return Saved(path, program.names, difference, sizes, exporter)


def _compare(program: Program, run: Run) -> tuple[float, list[int]]:
    """Return the largest difference of the outputs for batches of several sizes, and the sizes."""
    example = program.example()
    sizes, largest = sorted({len(example[0]), len(example[0]) - 1, 1}, reverse=True), 0.0
    for size in sizes:
        tensors = [one[:size].contiguous() for one in example]
        try:
            expected, found = _leaves(program(*tensors)), list(run(tensors))
        except Exception as error:  # of the runtime, or of a model that takes one batch size only
            raise ConfigError(
                f"the model cannot be exported for batches of {size} samples: {_reason(error)}"
            ) from error
        if [one.shape for one in found] != [one.shape for one in expected]:
            raise ConfigError(f"the exported model returns other shapes for {size} samples")
        for one, other in zip(found, expected, strict=True):
            difference, scale = _difference(one.double().cpu(), other.double().cpu())
            if not difference <= TOLERANCE * max(1.0, scale):
                raise ConfigError(f"the exported model differs by {difference:.3g} from the model for {size} samples")
            largest = max(largest, difference)
    return largest, sizes


def _difference(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the largest difference, and the largest finite value; equal infinities, as of masks, do not differ."""
    if not expected.numel():
        return 0.0, 0.0
    difference = (found - expected).abs().masked_fill(found == expected, 0.0)
    return float(difference.max()), float(expected.abs().masked_fill(expected.isinf(), 0.0).max())


def _named(output: Any) -> list[tuple[str, Tensor]]:
    found = tensors_in_output(output)
    return [("_".join(map(str, ("output", *path))) if path else "output", tensor) for path, tensor in found]


def _leaves(output: Any) -> list[Tensor]:
    return [tensor for _, tensor in _named(output)]


def _dynamic(program: Program) -> dict[str, Any]:
    """Return which dimensions may have another size: the batch, and for token ids and masks the length."""
    auto = torch.export.Dim.AUTO
    sizes = [dict.fromkeys(range(1 if one.is_floating_point() else one.dim()), auto) for one in program.example()]
    return {"tensors": tuple(sizes)}


def _reason(error: Exception) -> str:
    """Return what an exporter says, in one line: the first cause."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return _line(f"{type(error).__name__}: {error}")


def _line(text: str) -> str:
    return shorten(" ".join(text.split()), 300)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence exporters, which report their progress, their deprecations and the graphs they fail at."""
    text, before = io.StringIO(), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
