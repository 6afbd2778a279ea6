"""Steps in which all tasks have weight 0, at the start of a ramp for one: nothing is learned, and the run goes on."""

import pytest
import torch
from torch import nn

from etude import Trainer
from etude.config.registry import lookup
from etude.data import StreamLoader, TensorData
from etude.losses import ClassificationLoss, LanguageModelingLoss
from etude.multitask import LinearHead, MultiTask, MultiTaskModel, TaskGradientWatcher, TaskSpec
from etude.multitask.curriculum import Phase, Ramp
from etude.multitask.heads import LanguageModelHead, SequenceClassifier

TASKS = ("kind", "size")


class Diary(TaskGradientWatcher):
    """Sees the tasks' gradients of every step, as is the default, and keeps the head of the second task."""

    def __init__(self, model):
        super().__init__()
        self.model, self.heads, self.streams = model, [], []

    def on_task_gradients(self, gradients):
        self.streams.append(gradients.tasks)

    def on_step_end(self, report):
        self.heads.append(self.model.heads["size"].layer.weight.detach().clone())


def run(name, accumulate, ramp):
    torch.manual_seed(0)
    weighting = None if name == "none" else lookup("weighting", name).factory(TASKS)
    heads = {"kind": LinearHead(3, in_features=6), "size": LinearHead(2, in_features=6)}
    model = MultiTaskModel(nn.Linear(5, 6), heads)
    x = torch.randn(24, 5)
    tasks = {
        "kind": TaskSpec("kind", ClassificationLoss(), stream="a", labels="kind"),
        "size": TaskSpec("size", nn.MSELoss(), stream="b", labels="size"),
    }
    loader = StreamLoader(
        {"a": TensorData({"input": x, "kind": x[:, :3].argmax(1)}), "b": TensorData({"input": x, "size": x[:, :2]})},
        6, weights={"a": 1, "b": 1}, epoch_samples=24,
    )  # fmt: skip
    diary = Diary(model)
    logs = Trainer(
        model, loader, task=MultiTask(tasks, weighting), callbacks=[diary], progress=False,
        curriculum=[Phase("one", 1, ["kind"]), Phase("two", 2, "all", ramp)],
        config={"epochs": 3, "grad_accum_steps": accumulate, "device": "cpu", "weight_decay": 0.0},
    ).train()  # fmt: skip
    return diary, logs


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["none", "famo", "uncertainty", "gradnorm", "pcgrad", "dwa"])
def test_a_ramp_may_start_at_0_where_every_batch_is_of_one_task(name, accumulate):
    diary, logs = run(name, accumulate, Ramp(0.0, epochs=2))
    epoch = 4 // accumulate
    heads = diary.heads
    assert diary.streams
    assert all(head.equal(heads[0]) for head in heads[: 2 * epoch])  # the second epoch is the first of the ramp
    assert not heads[-1].equal(heads[0])
    assert logs["size/loss"] > 0


def test_a_stream_that_no_task_reads_is_left_out(caplog):
    torch.manual_seed(0)
    model = MultiTaskModel(nn.Linear(5, 6), {"kind": LinearHead(3, in_features=6)})
    x = torch.randn(12, 5)
    task = MultiTask({"kind": TaskSpec("kind", ClassificationLoss(), stream="a", labels="kind")})
    part = TensorData({"input": x, "kind": x[:, :3].argmax(1)})
    Trainer(model, StreamLoader({"a": part, "b": part}, 6), task=task, progress=False).train()
    assert "'b'" in caplog.text


def watching(weighting, mode, callbacks=()):
    """Train with a task of weight 0; return the weights before and after, the logs, and whether code was compiled."""
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    heads = {"kind": LinearHead(3, in_features=6), "size": LinearHead(2, in_features=6)}
    model = MultiTaskModel(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6)), heads)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(24, 5)
    tasks = {
        "kind": TaskSpec("kind", ClassificationLoss(), labels="kind"),
        "size": TaskSpec("size", nn.MSELoss(), labels="size", weight=0.0),
    }
    counters.clear()
    config = {"epochs": 2, "batch_size": 6, "device": "cpu", "compile": mode, "weight_decay": 0.5}
    data = TensorData({"input": x, "kind": x[:, :3].argmax(1), "size": x[:, :2]})
    task = MultiTask(tasks, None if weighting == "none" else lookup("weighting", weighting).factory(TASKS))
    logs = Trainer(model, data, task=task, config=config, callbacks=callbacks, progress=False).train()
    torch.compiler.reset()
    return before, model.state_dict(), logs, bool(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("mode", ["off", "model", "step"])
@pytest.mark.parametrize("weighting", ["none", "uncertainty", "pcgrad"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # read by the compiler
def test_the_head_of_a_task_of_weight_0_stays_as_it_is(weighting, mode):
    """Gradients of zero, which compiled code and tensors of a weighting give, would let weight decay shrink it."""
    before, after, logs, is_compiled = watching(weighting, mode)
    assert is_compiled == (mode != "off")
    assert "size/loss" in logs
    for name, value in before.items():
        assert value.equal(after[name]) == name.startswith("heads.size"), name


class Speaker(nn.Module):
    """A trunk with an output layer of its own, which only the head of a language model uses."""

    feature_dim = 6

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.out = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9)

    def features(self, input_ids):
        return self.mix(self.embed(input_ids)).tanh()

    def forward(self, input_ids):
        return self.out(self.features(input_ids))

    def get_output_embeddings(self):
        return self.out


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_the_output_layer_of_a_trunk_belongs_to_the_task_that_uses_it(watched):
    torch.manual_seed(0)
    model = MultiTaskModel(Speaker(), {"kind": SequenceClassifier(3, in_features=6), "words": LanguageModelHead()})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.randint(9, (12, 5))
    tasks = {
        "kind": TaskSpec("kind", ClassificationLoss(), labels="kind", weight=float(watched)),
        "words": TaskSpec("words", LanguageModelingLoss(), labels="labels", weight=float(not watched)),
    }
    config = {"epochs": 1, "batch_size": 6, "device": "cpu", "compile": "step", "weight_decay": 0.5}
    data = TensorData({"input_ids": ids, "kind": ids[:, 0] % 3, "labels": ids})
    Trainer(model, data, task=MultiTask(tasks), config=config, progress=False).train()
    torch.compiler.reset()
    resting = "trunk.out" if watched else "heads.kind"
    for name, value in model.state_dict().items():
        assert value.equal(before[name]) == name.startswith(resting), name


class Late(TaskGradientWatcher):
    """Reads the gradients of tasks once the model is compiled."""

    def __init__(self):
        super().__init__()
        self.products = []

    def wants_task_gradients(self, step):
        return step == 3

    def on_task_gradients(self, gradients):
        self.products.append(gradients.products)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_gradients_of_tasks_are_read_from_a_model_that_is_compiled_already():
    from torch._functorch import config

    plain, compiled = Late(), Late()
    watching("none", "off", [plain])
    with config.patch(donated_buffer=True):  # torch's default: one backward pass of compiled code at most
        assert watching("none", "model", [compiled])[-1]
    torch.testing.assert_close(compiled.products, plain.products)
