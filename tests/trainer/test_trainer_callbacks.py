"""Every callback of the package at every door: it acts, or it is refused with the reason."""

import io
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import etude.callbacks
import etude.multitask
from etude import (
    BasicTrainingLoop,
    CSVLogger,
    DataLoader,
    EarlyStopping,
    EpochResult,
    GradientMonitor,
    LRSchedule,
    ModelCheckpoint,
    Trainer,
    TrainingLoop,
    TrainingMetrics,
    ValidationLoop,
)
from etude.callbacks import (
    EMA,
    Callback,
    DeviceStats,
    EventCallback,
    Freeze,
    LearningRateMonitor,
    MLflowLogger,
    NaNDebugger,
    OpenTelemetryLogger,
    Profiler,
    ProgressDisplay,
    PrometheusExporter,
    RunRecorder,
    SinkCallback,
    Telemetry,
    TensorBoardLogger,
    TextSamples,
    TrackioLogger,
    WandbLogger,
)
from etude.core import ConfigError
from etude.lazy import _homes
from etude.losses import ClassificationLoss
from etude.monitor import EpochEnded, RunFolder
from etude.multitask import (
    CurriculumCallback,
    LinearHead,
    MultiTask,
    MultiTaskModel,
    TaskGradientMonitor,
    TaskGradientWatcher,
    TaskSpec,
)
from etude.multitask.curriculum import Curriculum, Phase, Start
from etude.optim import SGD
from sink_stand_ins import curves, install, provide

EPOCHS = 4


class Trunk(nn.Module):
    """Turns a batch into features."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x):
        return self.layer(x).tanh()


class Case:
    """A model, its data and a place to write; training a little is enough to make a loss rise and fall."""

    def __init__(self, folder):
        torch.manual_seed(0)
        self.folder = Path(folder)
        self.model = nn.Sequential(Trunk(), nn.Linear(8, 2))
        self.optimizer = SGD(self.model.parameters(), lr=0.5)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(48, 4, generator=generator)
        self.data = (x, (x.sum(1) > 0).long())
        self.stream = io.StringIO()

    def loader(self):
        return DataLoader(*self.data, 8)


# --- what each callback has to show for itself


def stops(case):
    callback = EarlyStopping("val_loss", patience=0, min_delta=100.0)
    return callback, lambda door: door["epochs"] == 2


def keeps_the_best(case):
    file = case.folder / "best.safetensors"
    return ModelCheckpoint(file, "val_loss"), lambda door: file.exists() and file.stat().st_size > 100


def writes_rows(case):
    file = case.folder / "log.csv"
    return CSVLogger(str(file)), lambda door: len(file.read_text().splitlines()) == EPOCHS + 1


def shows(case):
    callback = ProgressDisplay(stream=case.stream)
    return (
        callback,
        lambda door: (
            all(word in case.stream.getvalue() for word in ("loss", "finished"))
            and ("step 0" not in case.stream.getvalue())
        ),
    )


def looks_at_gradients(case):
    callback = GradientMonitor(every=1)
    return callback, lambda door: callback.report is not None


def lowers_the_rate(case):
    scheduler = torch.optim.lr_scheduler.StepLR(case.optimizer, 1, 0.5)
    return LRSchedule(scheduler), lambda door: case.optimizer.get_lr() == 0.5 / 2**EPOCHS


def records(case):
    folder = RunFolder.ensure(case.folder / "run")
    return RunRecorder(folder), lambda door: folder.read_metrics() != []


def samples(case):
    from tokenizers import Tokenizer, models

    path = case.folder / "tokenizer.json"
    case.folder.mkdir(parents=True, exist_ok=True)
    Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="a")).save(str(path))
    callback = TextSamples(tokenizer=str(path))
    asked = []
    callback.sample = lambda model: asked.append(model) or ["text"]
    return callback, lambda door: len(asked) == 1


def names_what_is_not_finite(case):
    case.data[0][3] = float("nan")
    callback = NaNDebugger()
    said = []
    callback.notify = lambda message, **facts: said.append(message)
    return callback, lambda door: said != []


def times_steps(case):
    callback = Profiler(start=2, steps=3)
    return callback, lambda door: callback.profile is not None and callback.profile.parts["backward"] > 0


def adds_numbers(kind, name):
    def make(case):
        callback = kind()
        return callback, lambda door: name in callback.numbers()  # the loop asks at log points

    return make


def compares_tasks(case):
    return TaskGradientMonitor(every_steps=1), None  # one task: refused everywhere


def switches_tasks(case):
    return CurriculumCallback([Phase("only", 1, ["a"])]), None  # one task: refused everywhere


def freezes(case):
    before = case.model[1].weight.detach().clone()
    return Freeze("1.weight"), lambda door: torch.equal(case.model[1].weight, before)


def averages(case):
    callback = EMA(0.5)
    return callback, lambda door: int(callback.average.count) == EPOCHS * 6 and callback.is_swapped


def passes_events_on(case):
    events = []
    return Telemetry(events.append), lambda door: any(isinstance(one, EpochEnded) for one in events)


def writes_curves(case):
    pytest.importorskip("tensorboard")
    return TensorBoardLogger(
        str(case.folder / "tb")
    ), lambda door: len(curves(case.folder / "tb")["val/loss"]) == EPOCHS


def serves_metrics(case):
    callback = PrometheusExporter(port=0)
    return callback, lambda door: "val" in callback._metrics


def sends_spans(case):
    pytest.importorskip("opentelemetry.sdk")
    _, exporter = provide(case.monkeypatch)
    is_validation = lambda span: span.name == "etude.validation"
    return OpenTelemetryLogger(), lambda door: sum(map(is_validation, exporter.get_finished_spans())) == EPOCHS


def logs_to(tool):
    def make(case):
        runs = install(case.monkeypatch)[tool]
        kind = {"wandb": WandbLogger, "trackio": TrackioLogger, "mlflow": MLflowLogger}[tool]
        return kind(), lambda door: len(runs) == 1 and len(runs[0].curve("val/loss")) == EPOCHS

    return make


CALLBACKS = {
    TensorBoardLogger: writes_curves,
    PrometheusExporter: serves_metrics,
    OpenTelemetryLogger: sends_spans,
    WandbLogger: logs_to("wandb"),
    TrackioLogger: logs_to("trackio"),
    MLflowLogger: logs_to("mlflow"),
    Telemetry: passes_events_on,
    EMA: averages,
    Freeze: freezes,
    EarlyStopping: stops,
    ModelCheckpoint: keeps_the_best,
    CSVLogger: writes_rows,
    ProgressDisplay: shows,
    GradientMonitor: looks_at_gradients,
    LRSchedule: lowers_the_rate,
    RunRecorder: records,
    TextSamples: samples,
    NaNDebugger: names_what_is_not_finite,
    Profiler: times_steps,
    LearningRateMonitor: adds_numbers(LearningRateMonitor, "weight_decay"),
    DeviceStats: adds_numbers(DeviceStats, "cpu/cores"),
    TaskGradientMonitor: compares_tasks,
    CurriculumCallback: switches_tasks,
}


# --- the doors: each trains (or measures) a few epochs and says how many


def by_trainer(case, callback):
    config = {"epochs": EPOCHS, "batch_size": 8, "log_interval": 2}
    trainer = Trainer(
        case.model,
        case.data,
        case.data,
        config=config,
        optimizer=case.optimizer,
        callbacks=[callback],
        progress=False,
    )
    trainer.train()
    return trainer.state.clock.epoch


def by_fit(case, callback):
    loop = BasicTrainingLoop(
        case.model, case.optimizer, callbacks=[callback], config={"batch_size": 8}, progress=False
    )
    loop.fit(case.data, case.data, epochs=EPOCHS)
    return loop.trainer.state.clock.epoch


def by_epochs(case, callback):
    with TrainingLoop(log_interval=2, callbacks=[callback]) as loop:
        for epoch in range(EPOCHS):
            loop.train_epoch(case.model, case.loader(), case.optimizer, epoch=epoch, val_dataloader=case.loader())
            if loop.should_stop:
                break
    return epoch + 1


def by_functions(case, callback):
    metrics = TrainingMetrics()
    loop = TrainingLoop(log_interval=2, callbacks=[callback])
    functions = (case.model.forward, F.cross_entropy, case.optimizer.step, case.optimizer.zero_grad)
    loop.run(*functions, case.loader(), EPOCHS, metrics, case.loader())
    return metrics.current_epoch + 1


def by_bare_functions(case, callback):
    """Functions of which nobody knows the module or the optimizer."""
    model, optimizer, metrics = case.model, case.optimizer, TrainingMetrics()
    loop = TrainingLoop(log_interval=2, callbacks=[callback])
    functions = (lambda x: model(x), F.cross_entropy, lambda: optimizer.step(), lambda: optimizer.zero_grad())
    loop.run(*functions, case.loader(), EPOCHS, metrics, case.loader())
    return metrics.current_epoch + 1


def by_validation(case, callback):
    with ValidationLoop(callbacks=[callback]) as loop:
        for epoch in range(EPOCHS):
            loop.validate_epoch(case.model, case.loader(), epoch)
            if loop.should_stop:
                break
    return epoch + 1


DOORS = {
    "Trainer": by_trainer,
    "fit": by_fit,
    "train_epoch": by_epochs,
    "run": by_functions,
    "bare functions": by_bare_functions,
    "validate_epoch": by_validation,
}

REFUSED = {
    ("bare functions", ModelCheckpoint),
    ("bare functions", GradientMonitor),
    ("bare functions", TextSamples),
    ("bare functions", EMA),
    ("bare functions", Freeze),
    ("validate_epoch", EMA),
    ("validate_epoch", Freeze),
    ("bare functions", NaNDebugger),
    ("validate_epoch", GradientMonitor),
    ("validate_epoch", NaNDebugger),
    ("validate_epoch", Profiler),
    ("validate_epoch", LearningRateMonitor),
    ("validate_epoch", DeviceStats),
    ("bare functions", LearningRateMonitor),
}


def test_all_callbacks_of_the_package_are_here():
    rooms = (etude.callbacks, etude.multitask)
    found = {getattr(room, name) for room in rooms for name in _homes(room.__file__)}
    kinds = {one for one in found if isinstance(one, type) and issubclass(one, Callback) and one is not Callback}
    assert kinds - {TaskGradientWatcher, EventCallback, SinkCallback} == set(CALLBACKS)  # base classes


class Misspelt(Callback):
    def on_epoch_ends(self, epoch, logs):
        raise AssertionError


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_misspelt_hook_is_refused_before_training(door, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = Case(tmp_path)
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"Misspelt\.on_epoch_ends .*'on_epoch_end'"):
        door(case, Misspelt())
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("kind", CALLBACKS, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_a_callback_acts_or_is_refused(kind, door, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = Case(tmp_path)
    case.monkeypatch = monkeypatch
    callback, shows_it = CALLBACKS[kind](case)
    name = next(name for name, one in DOORS.items() if one is door)
    if shows_it is None or (name, kind) in REFUSED:
        with pytest.raises(ConfigError, match=kind.__name__) as refused:
            door(case, callback)
        assert "\n" not in str(refused.value)
        return
    epochs = door(case, callback)
    assert shows_it({"epochs": epochs})


def test_several_tasks_in_a_loop_have_their_watchers_and_their_numbers():
    """The loops take a `MultiTask`: callbacks that look at tasks act, and results have the numbers of each task."""

    class Shared(Trunk):
        feature_dim = 8

        def features(self, x):
            return self(x)

    torch.manual_seed(0)
    x = torch.randn(32, 4)
    batches = [{"x": part, "a": (part[:, 0] > 0).long(), "b": (part[:, 1] > 0).long()} for part in x.split(8)]
    specs = {name: TaskSpec(name, ClassificationLoss(), labels=name) for name in ("a", "b")}
    task, monitor = MultiTask(specs), TaskGradientMonitor(every_steps=1)
    model = MultiTaskModel(Shared(), {name: LinearHead(2, in_features=8) for name in specs})
    curriculum = CurriculumCallback(
        Curriculum([Phase("first", Start(epoch=1), ["a"]), Phase("both", Start(epoch=2), ["a", "b"])])
    )
    loop = TrainingLoop(task=task, callbacks=[curriculum, monitor])
    optimizer = SGD(model.parameters(), lr=0.1)
    first, second = (loop.train_epoch(model, batches, optimizer, epoch=epoch) for epoch in range(2))
    assert set(first.tasks) == {"a"}
    assert set(second.tasks) == {"a", "b"}
    assert second.loss == pytest.approx(second.tasks["a"]["loss"] + second.tasks["b"]["loss"])
    assert set(monitor.report.norms) == {"a", "b"}
    measured = ValidationLoop(task=task).validate_epoch(model, batches)
    assert measured.loss == pytest.approx(measured.parts["a/loss"] + measured.parts["b/loss"])
    assert EpochResult.from_dict(json.loads(json.dumps(second.to_dict()))) == second
    assert hash(second) == hash(EpochResult.from_dict(second.to_dict()))


@pytest.mark.parametrize("monitor", ["val_loss", "val_accuracy"])
@pytest.mark.parametrize("make", [EarlyStopping, lambda **k: ModelCheckpoint("best.safetensors", **k)])
def test_waiting_for_a_validation_that_never_comes_is_refused(monitor, make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case, mode = Case(tmp_path), "max" if "acc" in monitor else "min"
    with pytest.raises(ConfigError, match=monitor):
        TrainingLoop(callbacks=[make(monitor=monitor, mode=mode)]).train_epoch(
            case.model, case.loader(), case.optimizer
        )


def test_two_that_set_the_rate_are_refused(tmp_path):
    case = Case(tmp_path)
    callback, _ = lowers_the_rate(case)
    for settings in ({"scheduler": lambda step: 1.0}, {"config": {"warmup_steps": 2}}):
        with pytest.raises(ConfigError, match="LRSchedule"):
            Trainer(case.model, case.data, optimizer=case.optimizer, callbacks=[callback], progress=False, **settings)
    with pytest.raises(ConfigError, match="LRSchedule"):
        TrainingLoop(callbacks=[callback]).train_epoch(case.model, case.loader(), case.optimizer, lambda step: 1.0)
