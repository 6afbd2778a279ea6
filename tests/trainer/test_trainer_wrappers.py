"""Lookahead and SAM in a run: every door, exact resuming after any step, schedules, several tasks, what is refused."""

import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etude import (
    BasicTrainingLoop,
    Callback,
    LeNet5,
    Trainer,
    TrainerConfig,
    TrainingLoop,
    TrainingMetrics,
    training_step,
)
from etude.config.registry import lookup
from etude.core import CheckpointError, ConfigError, TrainingError
from etude.data import TensorData
from etude.losses import ClassificationLoss
from etude.multitask import LinearHead, MultiTask, MultiTaskModel, TaskGradientWatcher, TaskSpec
from etude.optim import SAM, SGD, AdamW, Lookahead, ScheduleFreeAdamW, cosine
from etude.trainer.recipe import rebuild, recipe_of

DATA = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3


def net(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3), *more)


SECTIONS = {
    "lookahead": {"name": "lookahead", "k": 3, "optimizer": {"name": "adamw", "lr": 0.01}},
    "sam": {"name": "sam", "rho": 0.1, "optimizer": {"name": "sgd", "lr": 0.1}},
    "asam": {"name": "sam", "rho": 1.0, "adaptive": True, "optimizer": {"name": "rmsprop"}},
    "both": {
        "name": "lookahead",
        "k": 2,
        "optimizer": {"name": "sam", "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
    },
    "several": {
        "name": "sam",
        "optimizer": {
            "name": "several",
            "patterns": ["0.*", "*"],
            "optimizers": [
                {"name": "lookahead", "k": 2, "optimizer": {"name": "sgd", "lr": 0.1}},
                {"name": "adamw", "lr": 0.01},
            ],
        },
    },
}
STEPS = 6


def run(section, folder=None, *, resume=False, **settings):
    config = {"epochs": 2, "max_steps": STEPS, "batch_size": 8, "seed": 3, "log_interval": 1, "device": "cpu"}
    made = SECTIONS[section] if isinstance(section, str) else section
    parts = {"scheduler": settings.pop("scheduler", cosine(15)), "callbacks": settings.pop("callbacks", ())}
    return Trainer(
        net(),
        DATA,
        config=config | settings,
        optimizer=made,
        progress=False,
        output_dir=folder,
        resume=resume,
        **parts,
    )


def assert_same(one, other):
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name
    first, second = (each.optimizer.state_dict()["state"] for each in (one, other))
    assert {key: set(values) for key, values in first.items()} == {key: set(values) for key, values in second.items()}
    assert all(torch.equal(first[key][name], second[key][name]) for key in first for name in first[key])


@pytest.mark.parametrize("section", SECTIONS)
def test_resumed_after_any_step_a_run_is_the_uninterrupted_one(section, tmp_path):
    whole = run(section)
    whole.train()
    for stop in range(1, STEPS):
        run(section, tmp_path / str(stop), max_steps=stop).train()
        resumed = run(section, tmp_path / str(stop), resume=True)
        resumed.train()
        assert_same(whole, resumed)


@pytest.mark.parametrize("section", SECTIONS)
def test_fp16_with_accumulation_is_resumed(section, tmp_path):
    settings = {"precision": "fp16", "grad_accum_steps": 2, "gradient_clip_norm": 0.5, "max_steps": 5}
    whole = run(section, **settings)
    whole.train()
    run(section, tmp_path, **settings | {"max_steps": 2}).train()
    resumed = run(section, tmp_path, resume=True, **settings)
    resumed.train()
    assert_same(whole, resumed)


class Records(Callback):
    def __init__(self):
        super().__init__()
        self.rates = []

    def on_log(self, record):
        self.rates.append((record["lr"], record.get("lr/1")))


def test_schedules_and_logged_rates_are_those_of_the_wrapped_optimizers():
    records = Records()
    run("several", callbacks=[records]).train()
    factors = [cosine(15)(step) for step in range(STEPS)]
    expected = [(0.1 * factor, 0.01 * factor) for factor in factors]
    assert records.rates == [pytest.approx(one) for one in expected]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_torch_scheduler_may_belong_to_any_level(level):
    model = net()
    inner = SGD(model.parameters(), lr=0.5)
    sam = SAM(inner)
    levels = [Lookahead(sam), sam, inner]
    scheduler = torch.optim.lr_scheduler.StepLR(levels[level], step_size=1, gamma=0.5)
    config = {"max_steps": 2, "batch_size": 8, "device": "cpu"}
    Trainer(model, DATA, config=config, optimizer=levels[0], scheduler=scheduler, progress=False).train()
    assert inner.param_groups[0]["lr"] == 0.125


# ------------------------------------------------------------------------------------------------ doors


def smooth():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def weights(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def wrapped(model):
    return Lookahead(SAM(SGD(model.parameters(), lr=0.2), rho=0.3), k=2)


def expected_after(epochs):
    """One batch per epoch, in plain torch."""
    model, (x, y) = smooth(), DATA
    params, slow = list(model.parameters()), [param.detach().clone() for param in model.parameters()]
    for epoch in range(1, epochs + 1):
        grads = torch.autograd.grad(F.cross_entropy(model(x), y), params)
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        before = [param.detach().clone() for param in params]
        with torch.no_grad():
            for param, grad in zip(params, grads, strict=True):
                param += 0.3 * grad / norm
        grads = torch.autograd.grad(F.cross_entropy(model(x), y), params)
        with torch.no_grad():
            for param, grad, start, old in zip(params, grads, before, slow, strict=True):
                param.copy_(start - 0.2 * grad)
                if epoch % 2 == 0:
                    old += 0.5 * (param - old)
                    param.copy_(old)
    return weights(model)


def by_trainer(model, optimizer):
    settings = {"epochs": 3, "batch_size": 40, "device": "cpu", "gradient_clip_norm": None}
    Trainer(model, DATA, loss="cross_entropy", optimizer=optimizer, config=settings, progress=False).train()


def by_epochs(model, optimizer):
    loop = TrainingLoop(loss_strategy=ClassificationLoss(), progress=False)
    for epoch in range(3):
        loop.train_epoch(model, [DATA], optimizer, epoch=epoch)


def by_fit(model, optimizer):
    BasicTrainingLoop(model, optimizer, loss="cross_entropy", progress=False).fit([DATA], epochs=3)


def by_functions(model, optimizer):
    metrics = TrainingMetrics()
    TrainingLoop().run(model.forward, F.cross_entropy, optimizer.step, optimizer.zero_grad, [DATA], 3, metrics)
    assert metrics.current_batch == 1


def by_steps(model, optimizer):
    for _ in range(3):
        training_step(model.forward, F.cross_entropy, optimizer.step, optimizer.zero_grad, *DATA)


def by_steps_that_zero_nothing(model, optimizer):
    for _ in range(3):
        optimizer.zero_grad()
        training_step(model.forward, F.cross_entropy, optimizer.step, lambda: None, *DATA)


DOORS = [by_trainer, by_epochs, by_fit, by_functions, by_steps, by_steps_that_zero_nothing]


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_every_door_takes_the_steps_of_a_hand_written_loop(door, scheduled):
    model = smooth()
    optimizer = wrapped(model)
    if scheduled:  # torch's schedulers replace `optimizer.step`
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    door(model, optimizer)
    torch.testing.assert_close(weights(model), expected_after(3), rtol=1e-5, atol=1e-6)


def test_a_function_that_steps_by_itself_is_refused():
    model = smooth()
    optimizer = wrapped(model)
    with pytest.raises(TrainingError, match="second gradient"):
        training_step(model.forward, F.cross_entropy, lambda: optimizer.step(), optimizer.zero_grad, *DATA)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: SGD(smooth()), "none of the model's parameters"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "needs a closure"),
        (lambda model: Lookahead(torch.optim.LBFGS(model.parameters())), "LBFGS needs a closure"),
        (lambda model: SAM(Lookahead(torch.optim.LBFGS(model.parameters()))), "LBFGS needs a closure"),
    ],
)
def test_an_optimizer_that_cannot_train_the_functions_is_refused(make, words):
    model = smooth()
    optimizer = make(model)
    with pytest.raises((ConfigError, TrainingError), match=words):
        training_step(model.forward, F.cross_entropy, optimizer.step, optimizer.zero_grad, *DATA)


# ------------------------------------------------------------------------------------------------ several tasks


class Watching(TaskGradientWatcher):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def on_task_gradients(self, gradients):
        self.seen += 1


def two_tasks(weighting, **arguments):
    torch.manual_seed(0)
    model = MultiTaskModel(nn.Linear(5, 6), {name: LinearHead(3, in_features=6) for name in ("a", "b")})
    x = torch.randn(24, 5)
    data = TensorData({"input": x, "a": x[:, :3].argmax(1), "b": x[:, 1:4].argmax(1)})
    rule = None if weighting is None else lookup("weighting", weighting).factory(tasks=("a", "b"))
    task = MultiTask({name: TaskSpec(name, ClassificationLoss(), labels=name) for name in ("a", "b")}, rule)
    config = {"epochs": 3, "batch_size": 8, "device": "cpu", **arguments.pop("config", {})}
    return Trainer(model, data, task=task, optimizer=SECTIONS["both"], config=config, progress=False, **arguments)


@pytest.mark.parametrize("weighting", [None, "static", "uncertainty", "dwa", "imtl_l"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_several_tasks_and_what_reads_their_gradients(weighting, accumulate):
    watching = Watching()
    trainer = two_tasks(weighting, callbacks=[watching], config={"grad_accum_steps": accumulate})
    before = weights(trainer.model)
    trainer.train()
    assert watching.seen == 9 // accumulate
    assert not torch.equal(weights(trainer.model), before)


@pytest.mark.parametrize("weighting", ["pcgrad", "gradnorm", "famo", "mgda"])
def test_weightings_that_need_more_than_one_gradient_are_refused_by_name(weighting):
    name = type(lookup("weighting", weighting).factory(tasks=("a", "b"))).__name__
    with pytest.raises(ConfigError, match=f"twice.*{name}") as error:
        two_tasks(weighting)
    assert len(str(error.value).splitlines()) == 1


# ------------------------------------------------------------------------------------------------ other things


@pytest.mark.parametrize(("saved", "loaded"), [*itertools.permutations(["lookahead", "sam", "adamw"], 2)])
def test_a_checkpoint_of_another_wrapper_is_refused(saved, loaded, tmp_path):
    sections = {name: SECTIONS.get(name, {"name": name}) for name in (saved, loaded)}
    run(sections[saved], tmp_path, max_steps=2, scheduler=None).train()
    with pytest.raises(CheckpointError, match="holds the state of"):
        run(sections[loaded], tmp_path, resume=True, scheduler=None).train()


def test_a_wrapper_made_in_python_is_recorded_and_made_again():
    model = LeNet5()
    made = Lookahead(SAM(AdamW(model.parameters(), lr=0.5), rho=0.3), k=7)
    recipe = recipe_of(model, TrainerConfig(), {"optimizer": made})
    found = rebuild(json.loads(json.dumps(recipe)), ["model", "optimizer"])["optimizer"]
    assert (found.k, found.optimizer.rho, found.param_groups[0]["lr"]) == (7, 0.3, 0.5)


@pytest.mark.parametrize("kernel", ["auto", "loop"])
def test_an_optimizer_is_made_again_with_its_kernel(kernel):
    """Another one rounds differently, and a resumed run would not be exact."""
    model = LeNet5()
    recipe = recipe_of(model, TrainerConfig(), {"optimizer": AdamW(model.parameters(), kernel=kernel)})
    found = rebuild(json.loads(json.dumps(recipe)), ["model", "optimizer"])["optimizer"]
    assert found.param_groups[0]["fused"] == (kernel == "auto")


class OutOfMemory(nn.Linear):
    """Has memory for a few samples."""

    most = 40

    def forward(self, x):
        if self.training and len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


def test_both_passes_of_sam_are_divided_if_memory_runs_out():
    found = []
    for most in (40, 5):
        torch.manual_seed(0)
        model = OutOfMemory(6, 3)
        model.most = most
        config = {"epochs": 2, "batch_size": 20, "device": "cpu", "on_out_of_memory": "split"}
        optimizer = SAM(SGD(model.parameters(), lr=0.1), rho=0.1)
        Trainer(model, DATA, optimizer=optimizer, config=config, progress=False).train()
        found.append(model.weight.detach())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_lookahead_of_an_optimizer_that_sets_the_weights_itself_is_refused():
    with pytest.raises(ConfigError, match="ScheduleFreeAdamW"):
        Lookahead(ScheduleFreeAdamW(net(), lr=0.01))
