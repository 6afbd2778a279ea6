"""The text of an ejected file: constants, model, data, schedule, evaluation, step and loop."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from string import Template
from typing import Any

from torch import Tensor

from etude.eject.source import Sources, import_lines

NAMES = (
    *(
        "SEED",
        "BATCH_SIZE",
        "STEP_SIZE",
        "STEPS_PER_EPOCH",
        "TOTAL_STEPS",
        "LEARNING_RATE",
        "CLIP_NORM",
        "CLIP_VALUE",
    ),
    *("FOLDER", "LENGTH", "TRAIN_SIZE", "VALIDATION_SIZE", "SCALE", "SHIFT", "weights"),
    *("load_data", "get_batch", "loss_sum", "evaluate", "train_step", "train"),
)
"""Names that every file defines, or may define, itself."""
_WIDTH = 118
"""Longest line of a call."""

# Lines of the file. Those that begin with [names] are written only if all of these values are set, with ! if not.
_CONSTANTS = """
SEED = $seed
BATCH_SIZE = $batch_size
[many]STEP_SIZE = $grad_accum_steps * BATCH_SIZE  # samples of one optimizer step
STEPS_PER_EPOCH = $steps_per_epoch
TOTAL_STEPS = $total_steps
LEARNING_RATE = $learning_rate
[gradient_clip_norm]CLIP_NORM = $gradient_clip_norm
[gradient_clip_value]CLIP_VALUE = $gradient_clip_value
$constants
"""
_LOSS = '''
def loss_sum($output: Tensor, labels: Tensor) -> Tensor:
    """Return the loss summed over the labels; the step divides by their number."""
    return $total
'''
_EVALUATE = '''
@torch.no_grad()
def evaluate(model: nn.Module, data: $kind) -> dict[str, float]:
    """Return the mean $measured on the validation data."""
    model.eval()
[has_classes]    total, correct, count = 0.0, 0, 0
[!has_classes]    total, count = 0.0, 0
    places = $validation
    for start in range(0, VALIDATION_SIZE, BATCH_SIZE):
        inputs, labels = get_batch(data, places[start : start + BATCH_SIZE])
$forward_in_loop
        total += loss.item()
[has_classes]        correct += int((logits.argmax(-1) == labels).sum())
        count += $count
    model.train()
    return {$measures}
'''
_STEP = '''
def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, $given) -> float:
    """Take one optimizer step; return the mean loss of its samples."""
[has_buffers]    before = [buffer.clone() for buffer in model.buffers()]
    optimizer.zero_grad()
[many]    total, count = 0.0, 0
[many]    for inputs, labels in batches:
[many]$forward_in_loop
[many]        loss.backward()
[many]        total += loss.item()
[many]        count += $count
[!many]$forward
[!many]    loss.backward()
[!many]    count = $count
[has_groups]    params = [param for group in optimizer.param_groups for param in group["params"]]
[has_groups]    grads = [param.grad for param in params if param.grad is not None]
[!has_groups]    grads = [param.grad for param in model.parameters() if param.grad is not None]
[is_small]    norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]))
[!is_small]    norm = torch.nn.utils.get_total_norm(grads)
[gradient_clip_norm]    # These are gradients of the sum. Dividing by the count gives those of the mean; if their
[gradient_clip_norm]    # norm would be above CLIP_NORM, dividing by norm / CLIP_NORM instead leaves exactly that.
[gradient_clip_norm]    divisor = (norm / CLIP_NORM).clamp_min(count)
    if norm.isfinite():  # otherwise the update is skipped
        for grad in grads:
[gradient_clip_norm]            grad.div_(divisor)
[!gradient_clip_norm]            grad.div_(count)
[gradient_clip_value]            grad.clamp_(-CLIP_VALUE, CLIP_VALUE)
        optimizer.step()
[has_buffers]    else:
[has_buffers]        for buffer, old in zip(model.buffers(), before, strict=True):
[has_buffers]            buffer.copy_(old)
[many]    return total / count
[!many]    return loss.item() / count
'''
_TRAIN = '''
def train(num_steps: int = TOTAL_STEPS) -> nn.Module:
    """Train a new model and return it."""
    torch.manual_seed(SEED)
    model = $model
$optimizer
[has_schedule has_groups]    rates = [group["lr"] for group in optimizer.param_groups]
[draws]    torch.manual_seed(mix(SEED, 0))  # for dropout
    train_data, $others = load_data()
    for step in range(num_steps):
        epoch, place = divmod(step, STEPS_PER_EPOCH)
        if place == 0:
$order
[drop_last]            order = order[: TRAIN_SIZE // BATCH_SIZE * BATCH_SIZE]  # full batches
        places = order[place * $size : (place + 1) * $size]
[has_schedule has_groups]        for group, rate in zip(optimizer.param_groups, rates, strict=True):
[has_schedule has_groups]            group["lr"] = rate * lr_factor(step)
[has_schedule !has_groups]        optimizer.param_groups[0]["lr"] = LEARNING_RATE * lr_factor(step)
[many]        parts = np.split(places, range(BATCH_SIZE, len(places), BATCH_SIZE))
[many]        loss = train_step(model, optimizer, [get_batch(train_data, part) for part in parts])
[!many]        loss = train_step(model, optimizer, *get_batch(train_data, places))
        if (step + 1) % $log_interval == 0:
            print(f"step {step + 1}  loss {loss:.6g}")
[validation]        if $due:
[validation]            print(f"step {step + 1}  validation {evaluate(model, validation_data)}")
    return model
'''
_MAIN = """
if __name__ == "__main__":
[num_threads]    torch.set_num_threads($num_threads)
[deterministic]    torch.use_deterministic_algorithms(True)
    weights = train().state_dict()
    # Contiguous copies: safetensors stores neither other layouts nor weights that share memory.
    weights = {name: value.clone(memory_format=torch.contiguous_format) for name, value in weights.items()}
    save_file(weights, sys.argv[1] if len(sys.argv) > 1 else "weights.safetensors")
"""


@dataclass(frozen=True, slots=True)
class DataText:
    """Source text about the data. A place is the number of a sample, or where a block of tokens begins."""

    constants: str
    kind: str
    """Type of the data of a split."""
    functions: str
    """`load_data` and `get_batch`."""
    order: list[str]
    """Lines that set `order`, the places of the samples of `epoch`."""
    validation: str
    """Expression for the places of the validation samples; empty if there are none."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Samples that no file holds as the model gets them: stored beside the script."""


@dataclass(frozen=True, slots=True)
class LossText:
    """Source text about the loss."""

    total: str
    """Expression of the model's output and `labels` for the summed loss."""
    count: str
    """Expression of `labels` for the number of labels that count."""
    output: str = "logits"
    """Name of the model's output: logits or predictions."""
    is_language: bool = False
    """Whether perplexity is reported."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the file is written from, besides the data."""

    head: str
    """What the file is and where it comes from."""
    model: str
    """Expression for a new model."""
    optimizer: list[str]
    """Lines that set `optimizer`."""
    has_groups: bool
    """Whether parameters are in several groups, with settings of their own."""
    learning_rate: float
    loss: LossText
    steps_per_epoch: int
    total_steps: int
    has_schedule: bool
    draws: bool
    """Whether the model draws random numbers in training."""
    has_buffers: bool
    is_small: bool
    """Whether the norm of the gradients is computed from one vector of all of them."""


def file_text(facts: Facts, data: DataText, sources: Sources, training: Any) -> str:
    """Return the whole file; `training` is the section of that name."""
    loss, many, has_classes = facts.loss, training.grad_accum_steps > 1, facts.loss.output == "logits"
    epochs, rest = divmod(facts.total_steps, facts.steps_per_epoch)
    measures = ['"loss": total / count', *(['"accuracy": correct / count'] * has_classes)]
    values = {
        **dict(training),
        **asdict(facts),
        **asdict(loss),
        "total_steps": facts.total_steps if rest else f"{epochs} * STEPS_PER_EPOCH",
        "constants": data.constants,
        "kind": data.kind,
        "validation": data.validation,
        "many": many,
        "has_classes": has_classes,
        "measured": "loss and the accuracy" if has_classes else "loss",
        "measures": ", ".join([*measures, *(['"perplexity": math.exp(total / count)'] * loss.is_language)]),
        "forward": _forward(loss, training, 4),
        "forward_in_loop": _forward(loss, training, 8),
        "given": "batches: list[tuple[Tensor, Tensor]]" if many else "inputs: Tensor, labels: Tensor",
        "optimizer": "\n".join(f"    {line}" for line in facts.optimizer),
        "others": "validation_data" if data.validation else "*_",
        "order": "\n".join(f"            {line}" for line in data.order),
        "size": "STEP_SIZE" if many else "BATCH_SIZE",
        "due": " or ".join(
            [*(f"(step + 1) % {one} == 0" for one in _intervals(training)), "step + 1 == TOTAL_STEPS"]
        ),
    }
    evaluated = [_EVALUATE] if data.validation else []
    filled = [_filled(one, values) for one in (_CONSTANTS, _LOSS, *evaluated, _STEP, _TRAIN, _MAIN)]
    parts = [filled[0], sources.text(), data.functions, *filled[1:]]
    sources.imports |= {
        ("torch", "", ""),
        ("torch.nn.functional", "", "F"),
        ("torch", "Tensor", ""),
        ("torch", "nn", ""),
        ("safetensors.torch", "save_file", ""),
        ("sys", "", ""),
    }
    if data.validation and loss.is_language:
        sources.imports.add(("math", "", ""))
    sources.check_names(NAMES)
    body = "\n\n\n".join(part.strip("\n") for part in parts if part)
    return f'"""{facts.head}"""\n\n{import_lines(sources.imports)}\n\n{body}\n'


def _filled(template: str, values: Mapping[str, Any]) -> str:
    """Return the lines of a template whose conditions hold, with its values."""
    kept = []
    for line in template.strip("\n").split("\n"):
        wanted, _, text = line[1:].partition("]") if line.startswith("[") else ("", "", line)
        if all(bool(values[one.lstrip("!")]) != one.startswith("!") for one in wanted.split()):
            kept.append(text)
    return Template("\n".join(kept)).substitute(values)


def call(name: str, arguments: Mapping[str, Any], *first: str, indent: int = 4) -> str:
    """Return a call with keyword arguments, over several lines if it is long.

    >>> print(call("f", {"a": 1, "b": ("x", None)}, "params"))
    f(params, a=1, b=("x", None))
    """
    listed = [*first, *(f"{key}={literal(value)}" for key, value in arguments.items())]
    short = f"{name}({', '.join(listed)})"
    if len(short) + indent + len("optimizer = ") <= _WIDTH:
        return short
    space = " " * indent
    return f"{name}(\n" + "".join(f"{space}    {one},\n" for one in listed) + f"{space})"


def literal(value: Any) -> str:
    """Return the expression for a constant, strings in double quotes; raise TypeError for other values.

    >>> print(literal(["a", (1.5,), None]))
    ["a", (1.5,), None]
    """
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    raise TypeError(f"a {type(value).__name__} cannot be written as a constant")


def _forward(loss: LossText, training: Any, indent: int) -> str:
    """Return the lines that compute output and loss."""
    lines = [f"{loss.output} = model(inputs)", f"loss = loss_sum({loss.output}, labels)"]
    if training.resolved_precision == "bf16":
        lines = ['with torch.autocast("cpu", dtype=torch.bfloat16):', *(f"    {line}" for line in lines)]
    return "\n".join(" " * indent + line for line in lines)


def _intervals(training: Any) -> list[str]:
    """Return after how many steps there is a validation, besides the one at the end."""
    found = [] if training.validate_every_steps is None else [str(training.validate_every_steps)]
    if (epochs := training.validate_interval) > 0:
        found.append("STEPS_PER_EPOCH" if epochs == 1 else f"({epochs} * STEPS_PER_EPOCH)")
    return found
