"""Parameters of a weighting in a trainer: in whichever way the optimizer is made, they are trained and do not decay."""

import pytest
import torch
from torch import nn

from etude import Callback, DataLoader, Trainer, TrainingLoop
from etude.core import ConfigError
from etude.data import StreamLoader
from etude.losses import BinaryLoss, ClassificationLoss
from etude.multitask import LinearHead, MultiTask, MultiTaskModel, TaskSpec
from etude.multitask.weighting import FAMO, GradNorm, PCGrad, UncertaintyWeighting

TASKS = ("kind", "sign")


def parts(inside):
    """Return model and task; the weighting is in the model before there is a trainer, or not."""
    torch.manual_seed(0)
    weighting = UncertaintyWeighting(TASKS, initial={"kind": 1.0})
    heads = {task: LinearHead(size, in_features=6) for task, size in zip(TASKS, (3, 2), strict=True)}
    model = MultiTaskModel(nn.Linear(5, 6), heads)
    specs = {task: TaskSpec(task, ClassificationLoss(), labels=task) for task in TASKS}
    task = MultiTask(specs, weighting)
    if inside:
        task.join(model)
    return model, task


def trainer(model, task, optimizer, scheduler=None):
    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(1))
    data = {"input": x, "kind": x[:, :3].argmax(1), "sign": (x[:, 4] > 0).long()}
    config = {"epochs": 1, "weight_decay": 0.5, "learning_rate": 1e-2}
    return Trainer(
        model, DataLoader(data, batch_size=8), task=task, optimizer=optimizer, scheduler=scheduler, config=config,
        progress=False,
    )  # fmt: skip


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.5)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("way", ["default", "function", "groups", "parameters"])
def test_they_are_trained_without_decay(way, inside, caplog):
    model, task = parts(inside)
    made = {
        "default": lambda: None,
        "function": lambda: adamw,
        "groups": lambda: adamw(model.parameter_groups()),
        "parameters": lambda: adamw(model.parameters()),
    }
    run = trainer(model, task, made[way]())
    held = [
        group for group in run.optimizer.param_groups for p in group["params"] if p is task.weighting.log_variances
    ]
    chosen = (way, inside) == ("parameters", True)  # what somebody chose is left, with a warning
    assert ("decays the parameters of UncertaintyWeighting" in caplog.text) == chosen
    assert [group["weight_decay"] for group in held] == [0.5 if chosen else 0.0]
    before = task.weighting.log_variances.detach().clone()
    run.train()
    assert (task.weighting.log_variances != before).all()


@pytest.mark.parametrize("inside", [True, False])
def test_a_loop_of_ones_own_trains_them_too(inside):
    model, task = parts(inside)
    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(1))
    data = {"input": x, "kind": x[:, :3].argmax(1), "sign": (x[:, 4] > 0).long()}
    optimizer = adamw(model.parameters())
    before = task.weighting.log_variances.detach().clone()
    loop = TrainingLoop(task=task, progress=False)
    for epoch in range(2):
        loop.train_epoch(model, DataLoader(data, batch_size=8), optimizer, epoch=epoch)
    assert (task.weighting.log_variances != before).all()
    assert model.weighting is task.weighting  # and the model saves them


@pytest.mark.parametrize("name", ["LambdaLR", "OneCycleLR", "CosineAnnealingLR"])
def test_a_torch_scheduler_that_does_not_know_them_is_an_error_in_one_line(name):
    arguments = {"LambdaLR": (lambda step: 0.9**step,), "OneCycleLR": (1e-2, 10), "CosineAnnealingLR": (10,)}[name]
    model, task = parts(inside=False)
    optimizer = adamw(model.parameters())
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, *arguments)
    with pytest.raises(ConfigError, match=r"torch scheduler .*parameter_groups\(\)$"):
        trainer(model, task, optimizer, scheduler)
    model, task = parts(inside=True)
    optimizer = adamw(model.parameter_groups())
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, *arguments)
    run = trainer(model, task, optimizer, scheduler)
    run.train()
    assert len({group["lr"] for group in run.optimizer.param_groups}) == 1


@pytest.mark.parametrize(
    ("draw", "steps", "warned"), [("alternate", 1, True), ("alternate", 2, False), ("together", 1, False)]
)
def test_a_weighting_that_compares_tasks_which_never_meet_is_warned_of(caplog, draw, steps, warned):
    streams = {name: {"input": torch.randn(8, 4), f"y_{name}": torch.zeros(8)} for name in ("a", "b")}
    heads = {name: LinearHead(1, in_features=4) for name in streams}
    specs = {name: TaskSpec(name, BinaryLoss(), stream=name, labels=f"y_{name}") for name in streams}
    model, task = MultiTaskModel(nn.Linear(4, 4), heads), MultiTask(specs, PCGrad(list(streams)))
    loader = StreamLoader(streams, 4, draw=draw)
    Trainer(model, loader, task=task, config={"grad_accum_steps": steps}, progress=False)
    assert ("set data.draw to together" in caplog.text) == warned


class Net(nn.Module):
    """Convolutions in a sequence and a layer after them, which is defined first."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.spare = nn.Linear(6, 6)
        self.convs = nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.Dropout(0.3), nn.Conv1d(1, 1, 3, padding=1))

    def forward(self, input):
        return self.fc(self.convs(input[:, None])[:, 0]).tanh()


class Notices(Callback):
    def __init__(self):
        super().__init__()
        self.layers = []

    def on_notice(self, message, facts):
        self.layers.append(facts["layer"])
        assert facts["layer"] in message


class Unlucky(nn.Linear):
    """Runs out of memory in some of its calls."""

    fails: tuple[int, ...] = ()
    calls = 0

    def forward(self, x):
        self.calls += self.training
        if self.training and self.calls in self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x).tanh()


@pytest.mark.parametrize("rule", [UncertaintyWeighting, GradNorm, PCGrad, FAMO])
def test_a_step_done_again_in_parts_is_the_whole_step_in_double_precision(rule):
    def weights(fails):
        torch.manual_seed(0)
        trunk = Unlucky(5, 6)
        trunk.fails = fails
        heads = {task: LinearHead(size, in_features=6) for task, size in zip(TASKS, (3, 2), strict=True)}
        model = MultiTaskModel(trunk, heads).double()
        specs = {task: TaskSpec(task, ClassificationLoss(), labels=task) for task in TASKS}
        x = torch.randn(16, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        data = {"input": x, "kind": x[:, :3].argmax(1), "sign": (x[:, 4] > 0).long()}
        config = {"epochs": 2, "on_out_of_memory": "split", "device": "cpu"}
        run = Trainer(
            model, DataLoader(data, batch_size=8), task=MultiTask(specs, rule(TASKS)), config=config, progress=False
        )
        run.train()
        return [param.detach() for param in model.parameters()]

    torch.testing.assert_close(weights((1, 3, 4)), weights(()), rtol=1e-5, atol=1e-7)


def gradnorm_run(layer, **options):
    torch.manual_seed(0)
    weighting = GradNorm(TASKS, layer=layer)
    heads = {task: LinearHead(size, in_features=6) for task, size in zip(TASKS, (3, 2), strict=True)}
    model = MultiTaskModel(Net(), heads)
    specs = {task: TaskSpec(task, ClassificationLoss(), labels=task) for task in TASKS}
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    data = {"input": x, "kind": x[:, :3].argmax(1), "sign": (x[:, 4] > 0).long()}
    notices = Notices()
    run = Trainer(
        model, DataLoader(data, batch_size=8), task=MultiTask(specs, weighting), callbacks=[notices], progress=False,
        config={"epochs": 2, "device": "cpu", **options.pop("config", {})}, **options,
    )  # fmt: skip
    return run, notices


def test_gradnorm_takes_the_layer_that_is_used_last_and_says_so():
    chosen, notices = gradnorm_run(None)
    chosen.train()
    named, notice = gradnorm_run("fc")
    named.train()
    assert notices.layers == ["trunk.fc"]
    assert notice.layers == ["fc"]
    others, notice = gradnorm_run("trunk.convs.2")
    others.train()
    assert notice.layers == ["trunk.convs.2"]
    weights = [run.task.weighting.weights for run in (chosen, named, others)]
    assert torch.equal(weights[0], weights[1])  # the look at the first batch has left no trace
    assert not torch.equal(weights[0], weights[2])
    assert all(torch.equal(*pair) for pair in zip(chosen.model.parameters(), named.model.parameters(), strict=True))


def test_a_resumed_run_takes_the_same_layer(tmp_path):
    whole, _ = gradnorm_run(None)
    whole.train()
    first, _ = gradnorm_run(None, config={"max_steps": 3}, output_dir=tmp_path / "run")
    first.train()
    again, notices = gradnorm_run(None)
    again.load_checkpoint(tmp_path / "run/checkpoints/last")
    again.train()
    assert notices.layers == ["trunk.fc"]
    assert all(torch.equal(*pair) for pair in zip(whole.model.parameters(), again.model.parameters(), strict=True))
    assert torch.equal(whole.task.weighting.weights, again.task.weighting.weights)


def test_a_layer_that_the_features_are_not_made_with_is_found_in_the_first_step():
    run, _ = gradnorm_run("spare")
    with pytest.raises(ConfigError, match="'spare'"):
        run.train()
    assert run.state.clock.step == 0


def test_a_layer_that_is_not_there_is_found_out_at_the_start():
    with pytest.raises(ConfigError, match=r"'fcc' .*did you mean 'fc'"):
        gradnorm_run("fcc")
