"""The text of an ejected file: constants, model, data, schedule, evaluation, step and loop."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    parts = [
        _constants(facts, data, training),
        sources.text(),
        data.functions,
        _loss(facts.loss),
        _evaluate(facts, data, training) if data.validation else "",
        _step(facts, training),
        _train(facts, data, training),
        _main(training),
    ]
    sources.imports |= {
        ("torch", "", ""),
        ("torch.nn.functional", "", "F"),
        ("torch", "Tensor", ""),
        ("torch", "nn", ""),
        ("safetensors.torch", "save_file", ""),
        ("sys", "", ""),
    }
    if data.validation and facts.loss.is_language:
        sources.imports.add(("math", "", ""))
    sources.check_names(NAMES)
    body = "\n\n\n".join(part.strip("\n") for part in parts if part)
    return f'"""{facts.head}"""\n\n{import_lines(sources.imports)}\n\n{body}\n'


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


def _constants(facts: Facts, data: DataText, training: Any) -> str:
    lines = [f"SEED = {training.seed}", f"BATCH_SIZE = {training.batch_size}"]
    if training.grad_accum_steps > 1:
        lines.append(f"STEP_SIZE = {training.grad_accum_steps} * BATCH_SIZE  # samples of one optimizer step")
    lines.append(f"STEPS_PER_EPOCH = {facts.steps_per_epoch}")
    epochs, rest = divmod(facts.total_steps, facts.steps_per_epoch)
    lines.append(f"TOTAL_STEPS = {f'{epochs} * STEPS_PER_EPOCH' if not rest else facts.total_steps}")
    lines.append(f"LEARNING_RATE = {facts.learning_rate!r}")
    if training.gradient_clip_norm is not None:
        lines.append(f"CLIP_NORM = {training.gradient_clip_norm!r}")
    if training.gradient_clip_value is not None:
        lines.append(f"CLIP_VALUE = {training.gradient_clip_value!r}")
    return "\n".join([*lines, data.constants])


def _loss(loss: LossText) -> str:
    return f'''
def loss_sum({loss.output}: Tensor, labels: Tensor) -> Tensor:
    """Return the loss summed over the labels; the step divides by their number."""
    return {loss.total}
'''


def _forward(loss: LossText, training: Any, indent: int) -> str:
    """Return the lines that compute output and loss."""
    lines = [f"{loss.output} = model(inputs)", f"loss = loss_sum({loss.output}, labels)"]
    if training.resolved_precision == "bf16":
        lines = ['with torch.autocast("cpu", dtype=torch.bfloat16):', *(f"    {line}" for line in lines)]
    return "\n".join(" " * indent + line for line in lines)


def _evaluate(facts: Facts, data: DataText, training: Any) -> str:
    has_classes = facts.loss.output == "logits"
    numbers = {"loss": "total / count"} | ({"accuracy": "correct / count"} if has_classes else {})
    numbers |= {"perplexity": "math.exp(total / count)"} if facts.loss.is_language else {}
    returned = ", ".join(f'"{name}": {value}' for name, value in numbers.items())
    words = "loss and the accuracy" if has_classes else "loss"
    lines = [
        "@torch.no_grad()",
        f"def evaluate(model: nn.Module, data: {data.kind}) -> dict[str, float]:",
        f'    """Return the mean {words} on the validation data."""',
        "    model.eval()",
        "    total, correct, count = 0.0, 0, 0" if has_classes else "    total, count = 0.0, 0",
        f"    places = {data.validation}",
        "    for start in range(0, VALIDATION_SIZE, BATCH_SIZE):",
        "        inputs, labels = get_batch(data, places[start : start + BATCH_SIZE])",
        _forward(facts.loss, training, 8),
        "        total += loss.item()",
        *(["        correct += int((logits.argmax(-1) == labels).sum())"] * has_classes),
        f"        count += {facts.loss.count}",
        "    model.train()",
        f"    return {{{returned}}}",
    ]
    return "\n".join(lines)


def _step(facts: Facts, training: Any) -> str:
    many = training.grad_accum_steps > 1
    indent = 8 if many else 4
    given = "batches: list[tuple[Tensor, Tensor]]" if many else "inputs: Tensor, labels: Tensor"
    head = [f"def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, {given}) -> float:"]
    head.append('    """Take one optimizer step; return the mean loss of its samples."""')
    if facts.has_buffers:
        head.append("    before = [buffer.clone() for buffer in model.buffers()]")
    head.append("    optimizer.zero_grad()")
    if many:
        head += ["    total, count = 0.0, 0", "    for inputs, labels in batches:"]
    body = [*_forward(facts.loss, training, indent).splitlines(), " " * indent + "loss.backward()"]
    body += ["        total += loss.item()", f"        count += {facts.loss.count}"] if many else []
    body += [] if many else [f"    count = {facts.loss.count}"]
    vector = "torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]))"
    params = "model.parameters()"
    if facts.has_groups:
        body.append('    params = [param for group in optimizer.param_groups for param in group["params"]]')
        params = "params"
    body.append(f"    grads = [param.grad for param in {params} if param.grad is not None]")
    body += [f"    norm = {vector if facts.is_small else 'torch.nn.utils.get_total_norm(grads)'}"]
    divisor = "count"
    if training.gradient_clip_norm is not None:
        divisor = "divisor"
        body += [
            "    # These are gradients of the sum. Dividing by the count gives those of the mean; if their norm would",
            "    # be above CLIP_NORM, dividing by norm / CLIP_NORM instead leaves exactly that.",
            "    divisor = (norm / CLIP_NORM).clamp_min(count)",
        ]
    update = [f"grad.div_({divisor})"]
    if training.gradient_clip_value is not None:
        update.append("grad.clamp_(-CLIP_VALUE, CLIP_VALUE)")
    body += ["    if norm.isfinite():  # otherwise the update is skipped", "        for grad in grads:"]
    body += [*(f"            {line}" for line in update), "        optimizer.step()"]
    if facts.has_buffers:
        body += ["    else:", "        for buffer, old in zip(model.buffers(), before, strict=True):"]
        body += ["            buffer.copy_(old)"]
    return "\n".join([*head, *body, f"    return {'total' if many else 'loss.item()'} / count"])


def _train(facts: Facts, data: DataText, training: Any) -> str:
    many = training.grad_accum_steps > 1
    size = "STEP_SIZE" if many else "BATCH_SIZE"
    lines = [
        "def train(num_steps: int = TOTAL_STEPS) -> nn.Module:",
        '    """Train a new model and return it."""',
        "    torch.manual_seed(SEED)",
        f"    model = {facts.model}",
        *(f"    {line}" for line in facts.optimizer),
    ]
    if facts.has_schedule and facts.has_groups:
        lines.append('    rates = [group["lr"] for group in optimizer.param_groups]')
    if facts.draws:
        lines.append("    torch.manual_seed(mix(SEED, 0))  # for dropout")
    lines += [
        f"    train_data, {'validation_data' if data.validation else '*_'} = load_data()",
        "    for step in range(num_steps):",
        "        epoch, place = divmod(step, STEPS_PER_EPOCH)",
        "        if place == 0:",
        *(f"            {line}" for line in data.order),
        *(
            ["            order = order[: TRAIN_SIZE // BATCH_SIZE * BATCH_SIZE]  # full batches"]
            * training.drop_last
        ),
        f"        places = order[place * {size} : (place + 1) * {size}]",
    ]
    if facts.has_schedule and facts.has_groups:
        lines.append("        for group, rate in zip(optimizer.param_groups, rates, strict=True):")
        lines.append('            group["lr"] = rate * lr_factor(step)')
    elif facts.has_schedule:
        lines.append('        optimizer.param_groups[0]["lr"] = LEARNING_RATE * lr_factor(step)')
    if many:
        lines += [
            "        parts = np.split(places, range(BATCH_SIZE, len(places), BATCH_SIZE))",
            "        loss = train_step(model, optimizer, [get_batch(train_data, part) for part in parts])",
        ]
    else:
        lines.append("        loss = train_step(model, optimizer, *get_batch(train_data, places))")
    lines += [f"        if (step + 1) % {training.log_interval} == 0:"]
    lines += ['            print(f"step {step + 1}  loss {loss:.6g}")']
    if data.validation:
        due = " or ".join(
            [f"(step + 1) % {every} == 0" for every in _intervals(training)] + ["step + 1 == TOTAL_STEPS"]
        )
        lines.append(f"        if {due}:")
        lines.append('            print(f"step {step + 1}  validation {evaluate(model, validation_data)}")')
    return "\n".join([*lines, "    return model"])


def _intervals(training: Any) -> list[str]:
    """Return after how many steps there is a validation, besides the one at the end."""
    found = [] if training.validate_every_steps is None else [str(training.validate_every_steps)]
    if (epochs := training.validate_interval) > 0:
        found.append("STEPS_PER_EPOCH" if epochs == 1 else f"({epochs} * STEPS_PER_EPOCH)")
    return found


def _main(training: Any) -> str:
    lines = ['if __name__ == "__main__":']
    if training.num_threads is not None:
        lines.append(f"    torch.set_num_threads({training.num_threads})")
    if training.deterministic:
        lines.append("    torch.use_deterministic_algorithms(True)")
    lines += [
        "    weights = train().state_dict()",
        "    # Contiguous copies: safetensors stores neither other layouts nor weights that share memory.",
        "    weights = {name: value.clone(memory_format=torch.contiguous_format) for name, value in weights.items()}",
        '    save_file(weights, sys.argv[1] if len(sys.argv) > 1 else "weights.safetensors")',
    ]
    return "\n".join(lines)
