"""On a CUDA device: steps of several tasks never wait, skip bad updates whole, and resume exactly."""

import copy

import pytest
import torch
from torch import nn

from etude import Callback, Trainer
from etude.config.registry import lookup
from etude.core.batch import JointBatch
from etude.engine.callback_list import CallbackList
from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import ClassificationLoss, LanguageModelingLoss, MultiLabelLoss
from etude.metrics import F1
from etude.models import CausalTransformerLM
from etude.multitask import (
    LanguageModelHead,
    MultiTask,
    MultiTaskModel,
    SequenceClassifier,
    TaskSpec,
    TokenClassifier,
)
from etude.multitask.gradients import TaskGradientWatcher
from etude.optim import AdamW

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]

TASKS = ("code", "tags", "quality")
WEIGHTINGS = (None, "static", "uncertainty", "dwa", "gradnorm", "pcgrad", "famo")
NAN = float("nan")


def make_model(name, dropout=0.0):
    torch.manual_seed(0)
    trunk = CausalTransformerLM(vocab_size=64, d_model=32, n_layers=2, n_heads=2, max_len=32, dropout=dropout)
    heads = {
        "code": LanguageModelHead(),
        "tags": TokenClassifier(5, in_features=32),
        "quality": SequenceClassifier(4, in_features=32),
    }
    weighting = None if name is None else lookup("weighting", name).factory(TASKS)
    model = MultiTaskModel(trunk, heads)
    model.weighting = weighting
    return model


def make_task(weighting, streams=False):
    losses = {"code": LanguageModelingLoss(shift=True), "tags": ClassificationLoss(), "quality": MultiLabelLoss()}
    labels = {"code": None, "tags": "tags", "quality": "quality"}
    metrics = {"code": {}, "tags": {"f1": F1(num_classes=5)}, "quality": {"f1": F1(num_labels=4)}}
    return MultiTask(
        {
            task: TaskSpec(
                task,
                losses[task],
                stream=task if streams else None,
                labels=labels[task],
                weight=0.5,
                metrics=metrics[task],
            )
            for task in TASKS
        },
        weighting,
    )


def make_batch(seed, device="cuda", samples=6, **extra):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(64, (samples, 16), generator=generator)
    quality = (torch.rand(samples, 4, generator=generator) < 0.5).float()
    quality[torch.rand(samples, 4, generator=generator) < 0.3] = NAN
    tags = ids % 5
    tags[torch.rand(samples, 16, generator=generator) < 0.3] = -100
    mask = (torch.arange(16) < torch.randint(4, 17, (samples, 1), generator=generator)).long()
    batch = {"input_ids": ids, "attention_mask": mask, "tags": tags, "quality": quality}
    return {key: value.to(device) for key, value in batch.items()} | extra


def make_step(model, task, precision, lr=1e-3):
    chosen = MixedPrecision(precision, torch.device("cuda"))
    updater = Updater(AdamW(model.parameters(), lr=lr), clip_norm=1.0, precision=chosen)
    return Step(model, task, updater, chosen, metrics=True)


class EverySecond(TaskGradientWatcher):
    def __init__(self):
        super().__init__()
        self.found = []

    def wants_task_gradients(self, step):
        return step % 2 == 0

    def on_task_gradients(self, gradients):
        self.found.append(gradients)


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("num_micro", [1, 3])
def test_a_step_of_several_tasks_never_waits(no_waiting, name, precision, num_micro):
    model = make_model(name).cuda()
    task = make_task(model.weighting)
    step = make_step(model, task, precision)
    watcher = EverySecond()
    step.objective.connect(CallbackList([watcher]))
    batches = [make_batch(seed) for seed in range(num_micro)]
    batches[0]["tags"].fill_(-100)  # a task without labels
    while float(step(batches).skipped):  # up to the first update that counts, the step may look
        pass
    no_waiting(True)
    for place in range(4):
        step.clock.step = place
        report = step(batches)
    no_waiting(False)
    assert len(watcher.found) >= 2
    assert float(report.skipped) == 0
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("together", [False, True])
def test_steps_of_streams_never_wait(no_waiting, name, together):
    model = make_model(name).cuda()
    task = make_task(model.weighting, streams=True)
    step = make_step(model, task, "bf16")
    turns = [("code", "tags"), ("quality", "code"), ("tags", "tags"), ("quality",)]
    steps = [[make_batch(5 * place, stream=task) for place, task in enumerate(turn)] for turn in turns]
    if together:
        steps = [[JointBatch(parts)] for parts in steps]
    for parts in steps:
        step(parts)
    no_waiting(True)
    for parts in steps:
        step(parts)
    task.activate({"code": 0.7, "quality": 0.2})  # as a ramp does between steps
    step(steps[1])
    no_waiting(False)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_a_bad_batch_leaves_no_trace_on_the_device(no_waiting, name):
    model = make_model(name).cuda()
    step = make_step(model, make_task(model.weighting), "fp32")
    step([make_batch(0)])
    before = copy.deepcopy(model.state_dict())
    hook = model.trunk.blocks[0].register_forward_hook(lambda *_: _[2] * NAN)
    batch = make_batch(1)
    no_waiting(True)
    report = step([batch])
    no_waiting(False)
    hook.remove()
    assert float(report.skipped) == 1.0
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert float(step([make_batch(2)]).skipped) == 0.0


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_a_step_equals_that_on_the_cpu(name):
    states = []
    for device in ("cpu", "cuda"):
        model = make_model(name).double().to(device)
        precision = MixedPrecision("fp32", torch.device(device))
        updater = Updater(torch.optim.SGD(model.parameters(), lr=0.1), precision=precision)
        step = Step(model, make_task(model.weighting), updater, precision)
        for place in range(5):
            step.clock.step = place
            step([make_batch(2 * place, device), make_batch(2 * place + 1, device)])
        states.append({key: value.cpu() for key, value in model.state_dict().items()})
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-5, atol=1e-6, msg=lambda t, key=key: f"{key}: {t}")


class StopAt(Callback):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_begin(self, run):
        self.run = run

    def on_step_end(self, report):
        if self.run.clock.step == self.step:
            self.control.request_stop("test")


@pytest.mark.parametrize("name", ["gradnorm", "famo", "uncertainty", "pcgrad"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_resume_is_byte_identical_with_deterministic_kernels(tmp_path, name, precision):
    def trainer(folder, callbacks=()):
        model = make_model(name, dropout=0.2)
        config = {"epochs": 2, "device": "cuda", "deterministic": True, "precision": precision, "log_interval": 2}
        batches = [make_batch(seed, "cpu") for seed in range(4)]
        return Trainer(
            model,
            batches,
            batches[:2],
            config=config,
            task=make_task(model.weighting),
            callbacks=callbacks,
            output_dir=folder,
            progress=False,
        )

    try:
        trainer(tmp_path / "straight").train()
        expected = (tmp_path / "straight" / "checkpoints" / "last" / "model.safetensors").read_bytes()
        for stop in (1, 3, 4, 6):
            folder = tmp_path / str(stop)
            trainer(folder, [StopAt(stop)]).train()
            torch.rand(3, device="cuda")
            second = trainer(folder)
            second.load_checkpoint(folder)
            second.train()
            assert (folder / "checkpoints" / "last" / "model.safetensors").read_bytes() == expected, stop
    finally:
        torch.use_deterministic_algorithms(False)


def test_validation_gives_the_metrics_of_the_cpu():
    results = []
    for device in ("cpu", "cuda"):
        model = make_model(None).double()
        config = {"device": device, "precision": "fp32", "save_checkpoints": False}
        batches = [make_batch(seed, "cpu", samples=5) for seed in range(3)]
        trainer = Trainer(model, batches, batches, config=config, task=make_task(None), progress=False)
        results.append(trainer.evaluate())
    assert {"tags/f1", "quality/f1", "code/perplexity", "loss"} <= results[0].keys()
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_a_plain_loss_of_torch_is_a_task_as_well(no_waiting):
    model = make_model(None).cuda()
    task = MultiTask(
        {
            "tags": TaskSpec("tags", nn.CrossEntropyLoss(), labels="tags"),
            "quality": TaskSpec("quality", nn.MSELoss(), labels="score", weight=0.1),
        }
    )
    step = make_step(model, task, "bf16")
    batches = [make_batch(seed, score=torch.randn(6, 4, device="cuda")) for seed in range(2)]
    step(batches)
    no_waiting(True)
    step(batches)
