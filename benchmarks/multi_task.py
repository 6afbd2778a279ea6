"""What several tasks cost in a step: against a loop written by hand, and by way of weighing them.

python -m benchmarks.multi_task [--quick] [--no-peers] [--json FILE] [--device cuda]
"""

import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.table import (
    NOT_RUN,
    Row,
    Table,
    failure,
    missing,
    progress,
    publish,
    quartiles,
    read_options,
    take_device,
)
from etude.engine.callback_list import CallbackList
from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import BinaryLoss, ClassificationLoss, LanguageModelingLoss, MultiLabelLoss
from etude.models import CausalTransformerLM
from etude.multitask import MultiTask, MultiTaskModel, TaskSpec
from etude.multitask.gradients import TaskGradientWatcher
from etude.multitask.heads import BinaryHead, LanguageModelHead, SequenceClassifier, TokenClassifier
from etude.multitask.weighting import (
    FAMO,
    DynamicWeightAverage,
    GradNorm,
    PCGrad,
    StaticWeights,
    UncertaintyWeighting,
    Weighting,
)
from etude.optim import AdamW

VOCAB, CLASSES, LABELS = 1000, 12, 9
TASKS = ("code", "roles", "quality", "belongs")
WEIGHTINGS: dict[str, Callable[[Sequence[str]], Weighting]] = {
    "static": StaticWeights,
    "uncertainty": UncertaintyWeighting,
    "dwa": DynamicWeightAverage,
    "gradnorm": GradNorm,
    "famo": FAMO,
    "pcgrad": PCGrad,
}
COLUMNS = {
    "way": "",
    "ms/step": ".2f",
    "× by hand": ".3f",
    "quartiles": "",
    "passes": "",
}
PASSES = {
    "gradnorm": "+4 backward passes to the last block",
    "famo": "+1 forward pass after the update",
    "pcgrad": "4 backward passes in place of 1",
    "static, looking at the tasks' gradients": "+4 backward passes",
}
BatchDict = dict[str, Tensor]


def make_batch(rows: int, length: int, device: torch.device) -> BatchDict:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (rows, length + 1), generator=generator)
    batch = {
        "input_ids": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "roles": torch.randint(CLASSES, (rows, length), generator=generator),
        "quality": torch.randint(2, (rows, LABELS), generator=generator).float(),
        "belongs": torch.randint(2, (rows,), generator=generator).float(),
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def make_model(weighting: Weighting | None, device: torch.device, width: int) -> MultiTaskModel:
    torch.manual_seed(0)
    trunk = CausalTransformerLM(VOCAB, d_model=width, n_layers=4, n_heads=4, dropout=0.0, max_len=1024)
    heads = {
        "code": LanguageModelHead(in_features=width),
        "roles": TokenClassifier(CLASSES, in_features=width),
        "quality": SequenceClassifier(LABELS, in_features=width),
        "belongs": BinaryHead(in_features=width),
    }
    model = MultiTaskModel(trunk, heads)
    model.weighting = weighting
    return model.to(device)


def make_task(weighting: Weighting | None) -> MultiTask:
    specs = {
        "code": TaskSpec("code", LanguageModelingLoss(shift=False)),
        "roles": TaskSpec("roles", ClassificationLoss(ignore_index=-100), labels="roles"),
        "quality": TaskSpec("quality", MultiLabelLoss(), labels="quality", weight=0.5),
        "belongs": TaskSpec("belongs", BinaryLoss(), labels="belongs", weight=0.3),
    }
    return MultiTask(specs, weighting)


class Watcher(TaskGradientWatcher):
    """Looks at the gradients of every step."""

    def wants_task_gradients(self, step: int) -> bool:
        return True


def etude_step(
    name: str, batch: BatchDict, device: torch.device, width: int, *, looking: bool
) -> Callable[[], object]:
    weighting = WEIGHTINGS[name](TASKS)
    model, task, precision = (
        make_model(weighting, device, width),
        make_task(weighting),
        MixedPrecision("fp32", device),
    )
    updater = Updater(AdamW(model.parameter_groups(), lr=1e-4), clip_norm=1.0, precision=precision)
    step = Step(model, task, updater, precision)
    if looking:
        step.objective.connect(CallbackList([Watcher()]))
    return lambda: step([batch])


def losses_by_hand(model: MultiTaskModel, batch: BatchDict) -> list[Tensor]:
    """The four losses as a hand-written loop would have them: plain layers on the trunk's features."""
    hidden = model.trunk.features(batch["input_ids"])
    code = F.linear(hidden, model.trunk.head.weight)
    heads: dict[str, nn.Linear] = {
        name: next(layer for layer in model.heads[name].modules() if isinstance(layer, nn.Linear))
        for name in TASKS[1:]
    }
    mean = hidden.mean(1)
    return [
        F.cross_entropy(code.flatten(0, 1), batch["labels"].flatten()),
        F.cross_entropy(heads["roles"](hidden).flatten(0, 1), batch["roles"].flatten()),
        0.5 * F.binary_cross_entropy_with_logits(heads["quality"](mean), batch["quality"]),
        0.3 * F.binary_cross_entropy_with_logits(heads["belongs"](mean).squeeze(-1), batch["belongs"]),
    ]


def by_hand(batch: BatchDict, device: torch.device, width: int) -> Callable[[], object]:
    model = make_model(None, device, width)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack(losses_by_hand(model, batch)).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        return loss.detach()

    return step


def torchjd_pcgrad(batch: BatchDict, device: torch.device, width: int) -> Callable[[], object]:
    """PCGrad with the package torchjd: its Jacobian of the losses, then its aggregator, then torch's optimizer."""
    from torchjd.aggregation import PCGrad as TheirPCGrad
    from torchjd.autojac import jac_to_grad, mtl_backward

    model = make_model(None, device, width)
    params = list(model.parameters())
    shared = list(model.trunk.parameters())
    own = [list(model.heads[name].parameters()) for name in TASKS]
    optimizer, aggregator = torch.optim.AdamW(params, lr=1e-4, fused=True), TheirPCGrad()

    def step() -> object:
        optimizer.zero_grad()
        hidden = model.trunk.features(batch["input_ids"])
        losses = _losses_from(model, hidden, batch)
        mtl_backward(losses, features=hidden, tasks_params=own, shared_params=shared[:-1])
        jac_to_grad(shared[:-1], aggregator)
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        return losses

    return step


def _losses_from(model: MultiTaskModel, hidden: Tensor, batch: BatchDict) -> list[Tensor]:
    class Given:
        @staticmethod
        def features(_: Tensor) -> Tensor:
            return hidden

        head = model.trunk.head

    class View:
        trunk, heads = Given, model.heads

    return losses_by_hand(View, batch)


def race(contestants: dict[str, Callable[[], object]], rounds: int, steps: int, device: torch.device) -> list[Row]:
    """Time all ways in turns; each ratio is to the hand-written loop of the same round."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for name, step in contestants.items():
        progress(f"warming up {name}")
        for _ in range(3):
            step()
    for turn in range(rounds):
        order = list(contestants)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            progress(f"round {turn + 1} of {rounds}: {name}")
            times[name].append(_seconds(contestants[name], steps, device))
    progress("")
    reference = times[next(iter(contestants))]
    rows: list[Row] = []
    for name, mine in times.items():
        low, middle, high = quartiles([one / base for one, base in zip(mine, reference, strict=True)])
        rows.append(
            {
                "way": name,
                "ms/step": quartiles(mine)[1] * 1e3,
                "× by hand": middle,
                "quartiles": f"{low:.3f} … {high:.3f}",
                "passes": PASSES.get(name.removeprefix("Etude, "), ""),
            }
        )
    return rows


def _seconds(step: Callable[[], object], steps: int, device: torch.device) -> float:
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = clock()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (clock() - start) / steps


def main(argv: Sequence[str] | None = None) -> None:
    device, given = take_device(argv)
    options = read_options("What several tasks cost in a step.", given)
    torch.set_num_threads(1)
    rows, length, width = (2, 16, 32) if options.quick else (64, 256, 512) if device.type == "cuda" else (8, 64, 128)
    rounds, steps = (2, 2) if options.quick else (9, 5) if device.type == "cuda" else (21, 10)
    batch = make_batch(rows, length, device)
    contestants = {"by hand, fused AdamW": by_hand(batch, device, width)}
    for name in WEIGHTINGS:
        contestants[f"Etude, {name}"] = etude_step(name, batch, device, width, looking=False)
    contestants["Etude, static, looking at the tasks' gradients"] = etude_step(
        "static", batch, device, width, looking=True
    )
    peers: list[Row] = []
    if options.peers:
        name = "torchjd, pcgrad"
        if why := missing(["torchjd"]) or failure(lambda: torchjd_pcgrad(batch, device, width)()):
            peers.append({"way": name, NOT_RUN: why})
        else:
            contestants[name] = torchjd_pcgrad(batch, device, width)
    table = Table(
        f"Four tasks on one batch of {rows} × {length} tokens, transformer 4 × {width}, fp32, on {device.type}.",
        COLUMNS,
        f"{rounds} rounds of {steps} steps each, in turns; × by hand is the median of the ratios to the hand-written "
        f"loop of the same round{', of CPU time, one thread' if device.type == 'cpu' else ''}. A step is forward, "
        f"backward, clipping and AdamW; Etude's also counts, checks for infinities and can skip the update.",
    )
    table.rows.extend([*race(contestants, rounds, steps, device), *peers])
    publish("multi_task", [table], options, device=device.type)


if __name__ == "__main__":
    main()
