"""`metrics=` through every door: the values of scikit-learn, in validation and in training, with any batches."""

import json
import math

import pytest
import sklearn.metrics as sk
import torch
import torch.nn.functional as F
import torchmetrics
import yaml
from torch import nn

from etude import (
    BasicTrainingLoop,
    Callback,
    DataLoader,
    LossTerm,
    MultiTask,
    MultiTaskModel,
    Task,
    TaskSpec,
    Trainer,
    TrainingLoop,
    TrainingMetrics,
    ValidationLoop,
    load_config,
    train_experiment,
)
from etude.core import ConfigError, TrainingError
from etude.losses import ClassificationLoss, SupervisedTask
from etude.losses.binary import BinaryLoss
from etude.metrics import AUROC, F1
from etude.multitask import LinearHead
from run_files import records, weights

SETTINGS = {"batch_size": 8, "epochs": 2, "device": "cpu"}


def data(count=44):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 4, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def expected(net, prefix="val_"):
    """Return F1 and AUROC of scikit-learn."""
    x, y = data()
    logits = net(x).detach()
    area = sk.roc_auc_score(y, logits.double().softmax(1), multi_class="ovr")
    return {f"{prefix}f1": sk.f1_score(y, logits.argmax(1), average="macro"), f"{prefix}auroc": area}


def chosen(logs, prefix="val_"):
    return {name: logs[name] for name in (f"{prefix}f1", f"{prefix}auroc")}


def with_trainer(net, metrics, tmp_path):
    return Trainer(net, data(), data(), metrics=metrics, config=SETTINGS, progress=False).train()


def with_basic_loop(net, metrics, tmp_path):
    return BasicTrainingLoop(net, metrics=metrics, config={"batch_size": 8}, progress=False).fit(
        data(), data(), epochs=1
    )


def with_training_loop(net, metrics, tmp_path):
    loop = TrainingLoop(metrics=metrics, progress=False)
    return loop.train_epoch(net, data(), torch.optim.SGD(net.parameters(), lr=0.1), val_dataloader=data()).parts


def with_validation_loop(net, metrics, tmp_path):
    parts = ValidationLoop(metrics=metrics, progress=False).validate_epoch(net, DataLoader(*data(), 7)).parts
    return {f"val_{name}": value for name, value in parts.items()}


def with_functions(net, metrics, tmp_path):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = {}

    class Watch(Callback):
        def on_validation_end(self, epoch, metrics):
            seen.update(metrics)

    loop = TrainingLoop(metrics=metrics, callbacks=[Watch()], progress=False)
    functions = net, F.cross_entropy, optimizer.step, optimizer.zero_grad
    loop.run(*functions, DataLoader(*data(), 8), 1, TrainingMetrics(), DataLoader(*data(), 7))
    return seen


def with_own_task(net, metrics, tmp_path):
    class Own(Task):
        def __call__(self, model, batch, *, metrics):
            logits = model(batch.data)
            self.judged = logits.detach(), batch.labels
            return {"loss": LossTerm(F.cross_entropy(logits, batch.labels, reduction="sum"), len(batch.labels))}

    return Trainer(net, data(), data(), task=Own(), metrics=metrics, config=SETTINGS, progress=False).train()


def with_another_loss(net, metrics, tmp_path):
    losses = {"loss": nn.CrossEntropyLoss(label_smoothing=0.1), "val_loss": nn.CrossEntropyLoss()}
    return Trainer(net, data(), data(), **losses, metrics=metrics, config=SETTINGS, progress=False).train()


DOORS = [
    with_another_loss,
    with_trainer,
    with_basic_loop,
    with_training_loop,
    with_validation_loop,
    with_functions,
    with_own_task,
]


@pytest.mark.parametrize("metrics", [["f1", "auroc"], [F1(3), AUROC(num_classes=3)]], ids=["names", "objects"])
@pytest.mark.parametrize("door", DOORS)
def test_every_door_gives_the_values_of_scikit_learn(door, metrics, tmp_path):
    net = model()
    logs = door(net, [one if isinstance(one, str) else type(one)(num_classes=3) for one in metrics], tmp_path)
    assert chosen(logs) == pytest.approx(expected(net))


def test_an_experiment_file_names_its_metrics(tmp_path):
    x, y = data()
    (tmp_path / "own.py").write_text(
        "import torch\nfrom etude import DataSplits, TensorData, register\n"
        f"x, y = torch.tensor({x.tolist()}), torch.tensor({y.tolist()})\n"
        "@register('data', 'points')\ndef points():\n"
        "    return DataSplits(TensorData(x, y), TensorData(x, y), num_classes=3, input_shape=(4,))\n"
    )
    config = {
        "imports": ["own.py"],
        "data": "points",
        "model": {"name": "mlp", "hidden": [8]},
        "metrics": ["f1", {"name": "accuracy", "k": 2}, {"name": "f1", "average": "none"}, "confusion_matrix"],
        "training": {"epochs": 1, "batch_size": 8, "device": "cpu", "train_metrics": ["f1"]},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    outcome = train_experiment(load_config(path), run_dir=tmp_path / "run", progress=False)
    matrix = torch.tensor(json.loads((tmp_path / "run/metrics/confusion_matrix.json").read_text())["matrix"])
    right, true, predicted = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
    assert outcome.metrics["val_accuracy"] == pytest.approx((right.sum() / matrix.sum()).item())
    each = [2 * float(r) / float(t + p) for r, t, p in zip(right, true, predicted, strict=True)]
    assert [outcome.metrics[f"val_f1_class{k}"] for k in range(3)] == pytest.approx(each)
    assert outcome.metrics["val_f1"] == pytest.approx(sum(each) / 3)
    assert outcome.metrics["val_accuracy_top2"] >= outcome.metrics["val_accuracy"]
    assert {"f1"} == {name for name in outcome.metrics if "f1" in name and not name.startswith("val_")}
    assert (tmp_path / "run/metrics/confusion_matrix.svg").exists()


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (["f2"], r"metrics\.0.*f2.*f1"),
        ([{"name": "f1", "averge": "macro"}], r"metrics\.0\.averge"),
        ([{"name": "f1", "average": "mean"}], r"metrics\.0\.average"),
        ([{"name": "accuracy", "k": 0}], r"metrics\.0\.k"),
        ("f1", "metrics.*list"),
    ],
)
def test_a_wrong_metric_in_a_file_is_one_line_with_its_place(metrics, words, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"model": "lenet5", "metrics": metrics}))
    with pytest.raises(ConfigError, match=words):
        load_config(path)


# ------------------------------------------------------------------ in training


def still(net):
    return torch.optim.SGD(net.parameters(), lr=0.0)  # so that the values can be computed after the epoch


@pytest.mark.parametrize(
    "more", [{}, {"grad_accum_steps": 3}, {"compile": "step"}], ids=["plain", "accumulated", "compiled"]
)
def test_training_metrics_are_those_of_all_batches_of_the_epoch(more, monkeypatch):
    if "compile" in more:
        monkeypatch.setattr("etude.engine.compiled.torch.compile", compiled_by_running)
    net = model()
    config = {**SETTINGS, "train_metrics": True, **more}
    trainer = Trainer(
        net, data(), data(), optimizer=still(net), metrics=["f1", "auroc"], config=config, progress=False
    )
    logs = trainer.train()
    assert chosen(logs, "") == pytest.approx(expected(net, ""))
    assert chosen(logs) == pytest.approx(expected(net))


def compiled_by_running(function, **_):
    return function


def test_without_validation_data_metrics_are_measured_in_training():
    net = model()
    logs = Trainer(
        net, data(), optimizer=still(net), metrics=["f1", "auroc"], config=SETTINGS, progress=False
    ).train()
    assert chosen(logs, "") == pytest.approx(expected(net, ""))
    quiet = Trainer(model(), data(), metrics=["f1"], config={**SETTINGS, "train_metrics": False}, progress=False)
    assert "f1" not in quiet.train()
    assert quiet.evaluate(data())["f1"] == pytest.approx(expected(quiet.model)["val_f1"])


EVERY = ["accuracy", "f1", "auroc", "confusion_matrix", "perplexity"]


@pytest.mark.parametrize("stop", [1, 3, 6, 8])
def test_a_resumed_epoch_counts_what_was_counted_before(stop, tmp_path):
    class StopAt(Callback):
        def on_step_end(self, report):
            if self.owner.state.clock.step + 1 == stop and not self.done:
                self.done = True
                self.control.request_stop("test")

        done = False

    def trainer(folder, *callbacks, **more):
        metrics = [*EVERY, torchmetrics.F1Score("multiclass", num_classes=3, average="macro")]
        return Trainer(
            model(),
            data(),
            data(),
            metrics=metrics,
            callbacks=callbacks,
            config={**SETTINGS, "train_metrics": True},
            output_dir=folder,
            progress=False,
            **more,
        )

    straight = trainer(tmp_path / "straight")
    straight.train()
    stopping = StopAt()
    stopped = trainer(tmp_path / "stopped", stopping)
    stopping.owner = stopped
    stopped.train()
    resumed = trainer(tmp_path / "stopped", resume=True)
    logs = resumed.train()
    assert weights(tmp_path / "stopped") == weights(tmp_path / "straight")
    names = [name for name in logs if name.split("_")[-1] in EVERY or "f1" in name]
    assert len(names) >= 10
    one, other = (records(tmp_path / name)[-1] for name in ("stopped", "straight"))
    assert {name: one[name] for name in names} == {name: other[name] for name in names}


def test_a_loop_continues_its_metrics_from_a_state_dict():
    def loop(net):
        return BasicTrainingLoop(
            net, still(net), metrics=["f1"], config={"batch_size": 8, "max_steps": 3}, progress=False
        )

    net = model()
    first = loop(net)
    first.fit(data(), epochs=1)
    state = first.state_dict()
    second = BasicTrainingLoop(net, still(net), metrics=["f1"], config={"batch_size": 8}, progress=False)
    second.load_state_dict(state)
    assert second.fit(data(), epochs=1)["f1"] == pytest.approx(expected(net)["val_f1"])


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), ClassificationLoss()])
def test_probabilities_count_as_their_likeliest_class(loss):
    x, y = data()
    net, soft = model(), 0.8 * F.one_hot(y, 3) + 0.2 / 3
    loop = ValidationLoop(loss, metrics=["f1", "auroc"], progress=False)
    assert chosen(loop.validate_epoch(net, (x, soft)).parts, "") == pytest.approx(expected(net, ""))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(ignore_index=7), ClassificationLoss(ignore_index=7)])
def test_labels_that_the_loss_ignores_do_not_count(loss):
    x, y = data()
    net, there = model(), torch.arange(len(y)) % 3 > 0
    loop = ValidationLoop(loss, metrics=["f1"], progress=False)
    found = loop.validate_epoch(net, (x, y.masked_fill(~there, 7))).parts["f1"]
    assert found == pytest.approx(sk.f1_score(y[there], net(x).argmax(1)[there], average="macro"))


def test_binary_labels_that_the_loss_ignores_do_not_count():
    x, y = data()
    net, there, true = nn.Linear(4, 1), torch.arange(len(y)) % 3 > 0, (y > 0).long()
    loop = ValidationLoop(BinaryLoss(ignore_index=-1), metrics=["f1", "auroc"], progress=False)
    found = loop.validate_epoch(net, (x, true.masked_fill(~there, -1))).parts
    logits = net(x).detach()[there, 0]
    assert found["f1"] == pytest.approx(sk.f1_score(true[there], logits > 0))
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(true[there], logits))


def test_metrics_do_not_keep_the_graph_of_a_step():
    kept = []

    class Keeping(torchmetrics.Metric):
        def update(self, predictions, targets):
            kept.append(predictions)

        def compute(self):
            return torch.tensor(0.0)

    config = {**SETTINGS, "train_metrics": True}
    Trainer(model(), data(), metrics=[Keeping()], config=config, progress=False).train()
    assert kept
    assert not any(one.requires_grad for one in kept)


def test_a_task_forgets_the_metrics_of_an_earlier_trainer():
    task = SupervisedTask()
    Trainer(model(), data(), data(), task=task, metrics=["f1"], config=SETTINGS, progress=False).train()
    assert "val_f1" not in Trainer(model(), data(), data(), task=task, config=SETTINGS, progress=False).train()


# ------------------------------------------------------------------ what is refused


def test_a_task_that_judges_nothing_is_refused_at_once():
    def task(model, batch, *, metrics):
        return {"loss": LossTerm(model(batch.data).sum(), len(batch.labels))}

    for config in ({}, {"train_metrics": True, "sanity_val_batches": 0}):
        with pytest.raises(TrainingError, match=r"self\.judged"):
            Trainer(
                model(), data(), data(), task=task, metrics=["f1"], config=SETTINGS | config, progress=False
            ).train()


def test_several_tasks_have_their_own_metrics():
    task = MultiTask({"one": TaskSpec("one")})
    net = MultiTaskModel(nn.Linear(4, 8), {"one": LinearHead(8, 3)})
    with pytest.raises(ConfigError, match="TaskSpec"):
        Trainer(net, data(), task=task, metrics=["f1"], progress=False)


@pytest.mark.parametrize(("config", "words"), [({"train_metrics": ["f2"]}, "f2"), ({"train_metrics": ["f1"]}, "f1")])
def test_training_metrics_must_be_among_the_metrics(config, words):
    metrics = ["f1"] if words == "f2" else []
    with pytest.raises(ConfigError, match=words):
        Trainer(model(), data(), metrics=metrics, config=config, progress=False)


def test_a_basic_loop_measures_all_metrics_in_training():
    with pytest.raises(ConfigError, match="train_metrics"):
        BasicTrainingLoop(model(), metrics=["f1"], config={"train_metrics": ["f1"]}, progress=False).fit(data())


def test_a_loop_by_hand_refuses_metrics():
    x, y = data()
    with pytest.raises(ConfigError, match="metrics"):
        TrainingLoop(metrics=["f1"]).run_epoch_manual(x, y, 8, lambda a, b: 0.0, 0, 1)


def test_a_nan_in_validation_is_a_number_and_does_not_end_the_run():
    net = model()
    with torch.no_grad():
        net[2].bias[0] = math.nan
    task = SupervisedTask()
    loop = ValidationLoop(task=task, metrics=[*EVERY, "calibration_error", "average_precision"], progress=False)
    result = loop.validate_epoch(net, data())
    assert result.parts["f1"] == 0
    assert math.isnan(result.perplexity)
    assert all(math.isnan(result.parts[name]) for name in ("auroc", "calibration_error", "average_precision"))


# ------------------------------------------------------------------ files


def matrix_of(folder):
    return json.loads((folder / "metrics/confusion_matrix.json").read_text())["matrix"]


def test_a_matrix_is_there_with_the_checkpoint_and_a_resume_leaves_it(tmp_path):
    seen = []

    class Reads(Callback):
        def on_checkpoint(self, path):
            seen.append(matrix_of(tmp_path))

    settings = {"metrics": ["confusion_matrix"], "config": SETTINGS, "output_dir": tmp_path, "progress": False}
    trainer = Trainer(model(), data(), data(), callbacks=Reads(), **settings)
    trainer.train()
    x, y = data()
    expected = sk.confusion_matrix(y, trainer.model(x).argmax(1)).tolist()
    assert seen[-1] == expected  # a run that is killed here has nothing left to validate
    (tmp_path / "result.json").unlink()
    Trainer(model(), data(), data(), resume=True, **settings).train()
    assert matrix_of(tmp_path) == expected


def test_without_validation_a_matrix_is_that_of_training(tmp_path):
    net = model()
    trainer = Trainer(
        net,
        data(),
        metrics=["confusion_matrix"],
        config=SETTINGS,
        optimizer=still(net),
        output_dir=tmp_path,
        progress=False,
    )
    trainer.train()
    x, y = data()
    assert matrix_of(tmp_path) == sk.confusion_matrix(y, net(x).argmax(1)).tolist()
