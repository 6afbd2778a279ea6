"""On a CUDA device: captured steps have the bytes of uncaptured ones, and give way where a model forbids them."""

import gc
import json

import pytest
import torch
from captured_runs import assert_same, captured, data, net, trained
from torch import nn

from etude import BasicTrainingLoop, Callback, DataLoader, Trainer
from etude.core import TrainingError
from etude.engine.capture import WARM_UP_STEPS
from etude.engine.recorder import CudaRecorder
from etude.metrics import F1, LossTracker
from etude.multitask import LinearHead, MultiTask, MultiTaskModel, TaskSpec
from etude.multitask.weighting import DynamicWeightAverage, UncertaintyWeighting
from etude.optim import SGD, Adam, AdamW, RMSprop

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("undo_determinism")]

OPTIMIZERS = {
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "adam": lambda p: Adam(p, lr=1e-2),
    "sgd": lambda p: SGD(p, lr=0.05),
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "rmsprop": lambda p: RMSprop(p, lr=1e-3),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


def train(model, capture, folder=None, *, optimizer="adamw", callbacks=(), tensors=None, resume=False, **config):
    return trained(
        model,
        tensors or data(),
        capture=capture,
        config={"epochs": 2, "log_interval": 10, **config},
        optimizer=OPTIMIZERS[optimizer],
        callbacks=callbacks,
        output_dir=folder,
        resume=resume,
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_captured_run_has_the_bytes_of_an_uncaptured_one(optimizer):
    mine, theirs = train(net(), "on", optimizer=optimizer), train(net(), "off", optimizer=optimizer)
    assert captured(mine)
    assert_same(mine, theirs)


@pytest.mark.parametrize(
    "config",
    [
        {"precision": "fp16", "loss_scale": 2.0**10},
        {"precision": "bf16", "grad_accum_steps": 3},
        {"precision": "fp32", "warmup_steps": 20},
        {"gradient_clip_norm": None},
        {"gradient_clip_value": 0.01},
        {"train_metrics": False},
    ],
    ids=str,
)
def test_precision_accumulation_and_schedules_are_part_of_the_graph(config):
    mine, theirs = train(net(), "on", **config), train(net(), "off", **config)
    assert captured(mine)
    assert_same(mine, theirs)


def test_steps_in_which_weight_decay_changes_are_eager_and_the_others_captured():
    rise = [{"name": "linear", "start": 0.1, "end": 1.0}, "constant"]
    decay = {"name": "sequence", "schedules": rise, "milestones": [9]}
    scheduler = {"name": "by_setting", "lr": "cosine", "weight_decay": decay}
    optimizer, config = OPTIMIZERS["adamw"], {"max_steps": 40}
    mine, theirs = (
        trained(net(), data(), capture=mode, config=config, optimizer=optimizer, scheduler=scheduler)
        for mode in ("auto", "off")
    )
    assert captured(mine)
    assert_same(mine, theirs)
    with pytest.raises(TrainingError, match="a schedule changes weight_decay"):
        trained(net(), data(), capture="on", config=config, optimizer=optimizer, scheduler=scheduler)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(64, 64), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.dropout(torch.relu(self.layer(x)))


def deep():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Sequential(Block(), Block(), Block()), nn.Linear(64, 10))


def test_activation_checkpointing_is_captured():
    mine = train(deep(), "auto", activation_checkpointing=True)
    print("activation checkpointing:", captured(mine), mine.step.capture.refused)
    assert_same(mine, train(deep(), "off", activation_checkpointing=True))


class Stop(Callback):
    def __init__(self, step):
        super().__init__()
        self.step, self.count = step, 0

    def on_step_end(self, report):
        self.count += 1
        self.control.stop = self.count == self.step


@pytest.mark.parametrize("step", [2, 3, 4, 70, 75])
def test_a_captured_run_that_is_stopped_and_resumed_is_the_run_that_never_stopped(tmp_path, step):
    straight = train(net(), "on", tmp_path / "straight", warmup_steps=30)
    train(net(), "auto", tmp_path / "run", callbacks=[Stop(step)], warmup_steps=30)
    resumed = train(net(), "on", tmp_path / "run", resume=True, warmup_steps=30)
    assert_same(straight, resumed)

    def losses(folder):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["loss"] for line in lines if "step" in line and "loss" in line}

    first, second = losses(tmp_path / "straight"), losses(tmp_path / "run")
    assert first == second


def test_nan_in_a_captured_step_skips_it_on_the_device():
    tensors = data(bad=333)
    mine, theirs = (train(net(), mode, tensors=tensors) for mode in ("on", "off"))
    assert captured(mine)
    assert_same(mine, theirs)
    assert all(value.isfinite().all() for value in mine.model.state_dict().values())


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x):
        output = self.inner(x)
        return output * 2 if output.sum().item() > 0 else output


class Notices(Callback):
    shows_notices = True

    def __init__(self):
        super().__init__()
        self.said = []

    def on_notice(self, message, facts):
        self.said.append(message)


def test_a_module_that_reads_the_device_falls_back_with_one_sentence():
    torch.manual_seed(0)
    notices = Notices()
    mine, theirs = train(Reads(), "auto", callbacks=[notices]), train(Reads(), "off")
    assert_same(mine, theirs)
    (said,) = [message for message in notices.said if "CUDA graph" in message]
    print(said)
    assert "test_gpu_capture.py" in said
    with pytest.raises(TrainingError, match="capture"):
        train(Reads(), "on")
    after = train(net(), "on")  # the device is in order
    assert_same(after, train(net(), "off"))


class Looks(Callback):
    def __init__(self):
        super().__init__()
        self.norms = []

    def on_gradients(self, gradients):
        self.norms.append(gradients.params[0].grad.norm())


def test_a_callback_that_wants_gradients_gets_those_of_every_step():
    looks = Looks()
    trainer = train(net(), "auto", callbacks=[looks])
    assert len(looks.norms) == trainer.state.clock.step
    assert not captured(trainer)


class Freeze(Callback):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def on_step_begin(self, step):
        if step == 40:
            self.model[0].weight.requires_grad_(False)
        if step == 60:
            self.model[1].eval()


def test_layers_that_are_frozen_on_the_way_stay_frozen():
    mine, theirs = net(), net()
    first, second = train(mine, "on", callbacks=[Freeze(mine)]), train(theirs, "off", callbacks=[Freeze(theirs)])
    assert_same(first, second)


NAMES = ("a", "b")


def tasks(weighting):
    torch.manual_seed(0)
    rule = None if weighting is None else weighting(NAMES)
    heads = {name: LinearHead(4, in_features=32) for name in NAMES}
    model = MultiTaskModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU()), heads)
    specs = {name: TaskSpec(name, nn.CrossEntropyLoss(), labels=name, weight=0.5 + i) for i, name in enumerate(NAMES)}
    return model, MultiTask(specs, rule)


class Ramp(Callback):
    def __init__(self, task):
        super().__init__()
        self.task = task

    def on_step_begin(self, step):
        if step >= 20:
            self.task.activate({"a": 1.0, "b": min(1.0, (step - 20) / 50)})


@pytest.mark.parametrize("ramp", [False, True])
@pytest.mark.parametrize("weighting", [None, UncertaintyWeighting, DynamicWeightAverage])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_several_tasks_are_captured(weighting, ramp, accumulated):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 1, 8, 8, generator=generator)
    labels = {name: torch.randint(4, (1000,), generator=generator) for name in NAMES}
    runs = []
    for mode in ("on", "off"):
        model, task = tasks(weighting)
        loader = DataLoader({"input": x, **labels}, batch_size=32, shuffle=True, seed=3)
        config = {"epochs": 4, "deterministic": True, "capture": mode, "grad_accum_steps": accumulated}
        runs.append(
            Trainer(model, loader, task=task, config=config, progress=False, callbacks=[Ramp(task)] if ramp else [])
        )
        runs[-1].train()
    assert captured(runs[0])
    assert_same(*runs)
    assert runs[0].task.samples == runs[1].task.samples


def test_ten_phases_take_little_memory():
    model, task = tasks(None)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3200, 1, 8, 8, generator=generator)
    labels = {name: torch.randint(4, (3200,), generator=generator) for name in NAMES}

    class Phases(Callback):
        def __init__(self):
            super().__init__()
            self.reserved = []

        def on_step_begin(self, step):
            if step % 10 == 0:
                task.activate({"a": 1.0} if step % 20 else {"a": 1.0, "b": 1.0})
                self.reserved.append(torch.cuda.memory_reserved())

    loader = DataLoader({"input": x, **labels}, batch_size=32, shuffle=True, seed=3)
    Trainer(
        model,
        loader,
        task=task,
        config={"epochs": 1, "capture": "on"},
        callbacks=[phases := Phases()],
        progress=False,
    ).train()
    print("reserved MiB by phase", [one >> 20 for one in phases.reserved])
    assert phases.reserved[-1] - phases.reserved[3] < 64 << 20


class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, predictions, labels):
        self.calls += 1
        return nn.functional.cross_entropy(predictions, labels) * min(1.0, self.calls / 1000)


class SetsNumbers(Callback):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def on_step_begin(self, step):
        if step % 40 == 0:
            self.model[4].p = 0.1 + step / 1000
            self.model[1].momentum = 0.1 + step / 1000


def test_a_loss_that_counts_and_numbers_that_a_callback_sets_are_those_of_every_step():
    weights = []
    for mode in ("auto", "off"):
        config = {"epochs": 2, "batch_size": 16, "deterministic": True, "capture": mode}
        trainer = Trainer(net(), data(), config=config, loss=Annealed(), progress=False)
        trainer.train()
        weights.append(trainer)
    assert_same(*weights)
    mine, theirs = net(), net()
    first = train(mine, "on", callbacks=[SetsNumbers(mine)])
    assert captured(first)
    assert_same(first, train(theirs, "off", callbacks=[SetsNumbers(theirs)]))


def test_metric_objects_see_every_batch():
    found = []
    for mode in ("auto", "off"):
        metrics = [LossTracker(), F1(10)]
        config = {"batch_size": 16, "deterministic": True, "capture": mode}
        loop = BasicTrainingLoop(
            model := net(), AdamW(model.parameters(), lr=1e-2), metrics=metrics, config=config, progress=False
        )
        loop.fit(data(), epochs=2)
        found.append([metrics[0].count, *[metric.compute() for metric in metrics]])
    assert found[0] == found[1]


@pytest.mark.parametrize("step", [3, 70])
def test_a_compiled_and_captured_run_that_is_stopped_and_resumed_is_the_run_that_never_stopped(tmp_path, step):
    straight = train(net(), "on", tmp_path / "straight", compile="step")
    assert captured(straight)
    train(net(), "on", tmp_path / "run", callbacks=[Stop(step)], compile="step")
    assert_same(straight, train(net(), "on", tmp_path / "run", resume=True, compile="step"))


class Skips(Callback):
    def __init__(self):
        super().__init__()
        self.steps = []

    def on_step_end(self, report):
        self.steps.append(float(report.skipped))


def test_fp16_whose_first_updates_are_skipped_is_captured_after_them():
    config = {"precision": "fp16", "loss_scale": 2.0**24}
    skips = Skips(), Skips()
    mine, theirs = (
        train(net(), mode, callbacks=[one], **config) for mode, one in zip(("on", "off"), skips, strict=True)
    )
    assert captured(mine)
    assert skips[0].steps == skips[1].steps
    assert skips[0].steps.index(0.0) > WARM_UP_STEPS  # no state of the optimizer is there to record with before
    assert_same(mine, theirs)


def test_graphs_of_a_dead_run_do_not_spoil_a_recording():
    class Ring:
        def __init__(self):
            self.ring = self
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                torch.ones(3, device="cuda")

    threshold = gc.get_threshold()
    gc.set_threshold(100)
    try:
        Ring()
        result, replay = CudaRecorder(torch.device("cuda", 0)).record(
            lambda: torch.ones(3, device="cuda") * make(10_000)
        )
    finally:
        gc.set_threshold(*threshold)
    replay()
    assert result.tolist() == [10_000.0] * 3


def make(count):
    """Make so many objects that Python collects garbage by itself."""
    return len([[] for _ in range(count)])


def test_a_recording_may_follow_graphs_that_are_gone_while_their_memory_is_used():
    recorder = CudaRecorder(torch.device("cuda"))
    one = torch.ones(3, device="cuda")
    kept, replay = recorder.record(lambda: one * 2)
    replay()
    del replay
    other, replay = recorder.record(lambda: one * 3)
    replay()
    assert (kept.tolist(), other.tolist()) == ([2.0] * 3, [3.0] * 3)


def test_a_step_that_keeps_the_device_busy_is_captured_and_takes_no_more_memory():
    generator = torch.Generator().manual_seed(1)
    tensors = (torch.randn(8 * 4096, 64, generator=generator), torch.randint(10, (8 * 4096,), generator=generator))
    peaks, kept = {}, {}
    for capture in ("off", "auto"):
        torch.manual_seed(0)
        inner = [layer for _ in range(12) for layer in (nn.Linear(2048, 2048), nn.Tanh())]
        model = nn.Sequential(nn.Linear(64, 2048), *inner, nn.Linear(2048, 10))
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer = train(model, capture, tensors=tensors, batch_size=4096, precision="fp32", deterministic=False)
        peaks[capture] = torch.cuda.max_memory_allocated() - before
        kept[capture] = torch.cuda.memory_reserved()
        assert captured(trainer) == (capture == "auto")
        del model, trainer
    assert peaks["auto"] <= 1.02 * peaks["off"]
    assert kept["auto"] <= 1.3 * kept["off"]
