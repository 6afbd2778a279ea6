"""The range test: it suggests rates that train, says why it cannot, and leaves no trace."""

import math
from shutil import copytree

import numpy as np
import pytest
import torch
from torch import nn

from etude import Callback, LossTerm, MultiTask, MultiTaskModel, Phase, TaskSpec, Trainer
from etude.core import ConfigError, TrainingError
from etude.multitask.heads import LinearHead
from etude.trainer.find_lr import RateSearch

STEPS = 40


def data(samples=256, noise=0.0):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 3.0]) + noise * torch.randn(samples, generator=generator)
    return x, y[:, None]


class Net(nn.Module):
    """With batch norm, dropout, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)
        )
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        return self.layers(x)


def linear(outputs=1):
    torch.manual_seed(0)
    return nn.Linear(4, outputs)


def make(model=None, source=None, callbacks=(), **options):
    config = {"epochs": 2, "batch_size": 32, "device": "cpu", **options.pop("config", {})}
    model, source = Net() if model is None else model, data() if source is None else source
    return Trainer(model, source, config=config, callbacks=list(callbacks), progress=False, **options)


def everything(trainer):
    """All state of a run as bytes and values."""
    model, rest = trainer.state.capture()
    caches = dict(trainer.model.named_buffers())
    modes = [module.training for module in trainer.model.modules()]
    return flat({"model": model, "caches": caches, "rest": rest, "modes": modes})


def flat(tree, path=""):
    if isinstance(tree, torch.Tensor):
        return {path: (tree.dtype, tree.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())}
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in flat(value, f"{path}.{key}").items()}
    if isinstance(tree, (list, tuple)):
        return {k: v for key, value in enumerate(tree) for k, v in flat(value, f"{path}.{key}").items()}
    return {path: tree}


def test_it_suggests_a_rate_that_trains():
    found = make(linear(), config={"batch_size": 128}).find_lr(steps=STEPS)
    assert found.diverged
    assert 1e-4 < found.suggestion < 1
    assert found.suggestion == min(found.steepest, found.tenth)
    assert f"{found.steepest:.2g}" in found.explanation()

    def loss(rate):
        return make(linear(), config={"learning_rate": rate, "epochs": 4}).train()["loss"]

    assert loss(found.suggestion) < loss(found.suggestion / 100)


def test_rates_rise_exponentially_and_groups_keep_their_ratio():
    rates = []

    def optimizer(params):
        first, *others = params
        made = torch.optim.SGD([{"params": [first]}, {"params": others, "lr": 0.03}], lr=0.01)
        step = made.step

        def stepped(*args, **kwargs):
            rates.append([group["lr"] for group in made.param_groups])
            return step(*args, **kwargs)

        made.step = stepped
        return made

    found = make(optimizer=optimizer).find_lr(1e-5, 1e-2, STEPS)
    assert found.rates == pytest.approx(list(np.geomspace(1e-5, 1e-2, STEPS)))
    assert [first for first, _ in rates] == pytest.approx(found.rates)
    assert all(second == pytest.approx(3 * first) for first, second in rates)
    assert found.base == 0.01


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", {"name": "sgd", "momentum": 0.9}])
def test_it_leaves_no_trace(optimizer, precision):
    trainer = make(optimizer=optimizer, config={"precision": precision})
    before = everything(trainer)
    torch.manual_seed(3)
    outside = torch.get_rng_state()
    trainer.find_lr(steps=STEPS)
    assert torch.equal(torch.get_rng_state(), outside)
    after = everything(trainer)
    assert {key for key in before if before[key] != after.get(key)} == set()
    assert before.keys() == after.keys()


def test_a_run_that_was_tested_in_its_middle_has_the_same_bytes(tmp_path):
    """Before the first step, and from a checkpoint inside an epoch: weights, optimizer and data go on as before."""

    class Stop(Callback):
        def on_step_end(self, report):
            self.control.request_stop("enough")

    def run(folder, tested):
        first = make(callbacks=[Stop()], output_dir=folder, metrics="r2")
        if tested:
            first.find_lr(steps=STEPS)
        first.train()
        again = make(output_dir=folder, metrics="r2", resume=True)
        assert again.state.clock.position == 32
        if tested:
            again.find_lr(steps=STEPS)
        result = again.train()
        return (folder / "checkpoints/last/model.safetensors").read_bytes(), result["loss"], result["r2"]

    assert run(tmp_path / "one", False) == run(tmp_path / "two", True)


def test_a_split_within_the_test_is_undone():
    class Limited(nn.Linear):
        def forward(self, x):
            if self.training and len(x) > 20:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(x)

    trainer = make(Limited(4, 1), config={"on_out_of_memory": "split"})
    assert len(trainer.find_lr(1e-6, 1e-5, steps=STEPS).losses) == STEPS
    assert trainer.step.splitter.size is None


def sgd_of(rates):
    def make_it(params):
        return torch.optim.SGD(
            [{"params": [one], "lr": rate} for one, rate in zip(params, rates, strict=True)], lr=0.01
        )

    return make_it


@pytest.mark.parametrize(("rates", "moves"), [((0.0, 0.03), [1]), ((0.03, 0.0), [0]), ((0.0, 0.0), [0, 1])])
def test_a_group_with_a_rate_of_0_stays_as_it_is(rates, moves):
    """It is frozen on purpose, unless all are: a scheduler may begin at 0."""

    class Watched(nn.Linear):
        def forward(self, x):
            self.seen.append((self.weight.sum().item(), self.bias.sum().item()))
            return super().forward(x)

    model = Watched(4, 1)
    model.seen = []
    found = make(model, optimizer=sgd_of(rates)).find_lr(1e-3, 1e-1, STEPS)
    steps = [[*one] for one in zip(*model.seen[-STEPS:], strict=True)]
    assert [place for place, values in enumerate(steps) if len(set(values)) > 1] == moves
    assert found.base == (0.03 if any(rates) else 1.0)


def test_a_warm_up_of_the_optimizer_does_not_raise_the_suggestion():
    """After it, training would have a rate at which the test had never been."""
    rates, free = [], {"name": "schedule_free_adamw"}
    for warmup in (0, 1000):
        trainer = make(linear(), config={"batch_size": 128}, optimizer={**free, "warmup_steps": warmup})
        before = everything(trainer)
        rates.append(trainer.find_lr(steps=STEPS).suggestion)
        after = everything(trainer)
        assert {key for key in before if before[key] != after.get(key)} == set()
    assert rates[0] == rates[1] is not None


@pytest.mark.parametrize("options", [{"optimizer": "schedule_free_adamw"}, {"config": {"ema": 0.9}}])
def test_after_training_the_weights_that_are_trained_are_tested(options, tmp_path):
    trainer = make(linear(), output_dir=tmp_path / "run", **options)
    trainer.train()
    before = everything(trainer)
    found = trainer.find_lr(1e-7, 1e-6, steps=STEPS)
    after = everything(trainer)
    assert {key for key in before if before[key] != after.get(key)} == set()
    again = make(linear(), output_dir=tmp_path / "run", resume=True, **options)
    assert again.find_lr(1e-7, 1e-6, steps=STEPS).losses == found.losses
    untested = make(linear(), output_dir=copytree(tmp_path / "run", tmp_path / "copy"), resume=True, **options)
    for one in (again, untested):
        one.train(3)
    assert torch.equal(again.model.weight, untested.model.weight)


def test_nothing_is_written_and_callbacks_are_not_called(tmp_path):
    class Watch(Callback):
        def on_step_end(self, report):
            raise AssertionError

    trainer = make(callbacks=[Watch()], output_dir=tmp_path / "run")
    trainer.find_lr(steps=STEPS)
    assert {path.name for path in (tmp_path / "run").rglob("*") if path.is_file()} <= {".lock"}


def test_several_tasks():
    x, y = data()
    model = MultiTaskModel(linear(8), {name: LinearHead(1, in_features=8) for name in "ab"})
    task = MultiTask({"a": TaskSpec("a", nn.MSELoss(), labels="a"), "b": TaskSpec("b", nn.MSELoss(), labels="b")})
    batches = [{"input": x[i::2], "a": y[i::2], "b": -y[i::2]} for i in range(2)]
    found = make(model, batches, task=task).find_lr(steps=STEPS)
    assert found.suggestion is not None
    assert found.losses[0] > float(y.square().mean())  # the sum of both
    assert task.samples == {"a": 0, "b": 0}


def two_tasks(labels_b):
    x, y = data()
    model = MultiTaskModel(linear(8), {name: LinearHead(1, in_features=8) for name in "ab"})
    task = MultiTask({"a": TaskSpec("a", nn.MSELoss(), labels="a"), "b": TaskSpec("b", nn.MSELoss(), labels="b")})
    return model, task, x, {"a": y, "b": labels_b(y)}


def plain_loss(model, x, y, head):
    with torch.no_grad():
        return float(nn.functional.mse_loss(model({"input": x}, [head])[head], y))


def test_a_curriculum_is_tested_in_its_phase():
    model, task, x, labels = two_tasks(lambda y: 100 * y)
    phases = [Phase("first", 1, ["a"]), Phase("second", 2, ["a", "b"])]
    trainer = make(model, [{"input": x, **labels}], task=task, curriculum=phases)
    found = trainer.find_lr(1e-7, 1e-6, steps=STEPS)
    assert found.losses[0] == pytest.approx(plain_loss(model, x, labels["a"], "a"), rel=1e-4)
    assert task.weights == {"a": 1.0, "b": 1.0}  # as before


def test_steps_with_different_tasks_have_one_curve():
    """The loss of the second batch is ten thousand times that of the first, which is no divergence."""
    model, task, x, labels = two_tasks(lambda y: 100 * y)
    found = make(model, [{"input": x, name: labels[name]} for name in "ab"], task=task).find_lr(steps=2 * STEPS)
    both = sum(plain_loss(model, x, labels[name], name) for name in "ab")
    assert found.losses[:4] == pytest.approx([both] * 4, rel=1e-2)
    assert len(found.losses) > STEPS
    assert found.suggestion is not None


def test_a_task_without_a_loss_to_compare():
    def task(model, batch, *, metrics):
        errors = (model(batch[0]) - batch[1]).square()
        return {"error": LossTerm(errors.sum(), errors.numel())}

    with pytest.raises(TrainingError, match="reports error"):
        make(linear(), task=task).find_lr(steps=STEPS)


def test_the_data_is_read_again_if_it_is_short():
    found = make(linear(), data(40)).find_lr(1e-6, 1e-5, steps=STEPS)
    assert len(found.losses) == STEPS


# ------------------------------------------------------------------------------------------------ no suggestion


def test_a_loss_that_never_falls():
    x, _ = data()
    found = make(linear(), (x, x[:, :1].flip(0))).find_lr(1e-9, 1e-7, steps=STEPS)
    assert found.suggestion is None
    assert "makes the loss fall" in found.explanation()


def test_a_dip_among_the_first_losses_is_noise():
    """Where all rates are tiny nothing can have fallen: the losses there are what later ones are compared with."""
    rates, weights = np.geomspace(1e-7, 10.0, 40), 0.9 ** np.arange(40)
    for seed in range(400):
        losses = np.random.default_rng(seed).normal(1.0, 0.05, 40)
        sums = [float(losses[: end + 1] @ weights[end::-1]) / float(weights[: end + 1].sum()) for end in range(40)]
        found = RateSearch(list(rates), list(losses), sums, base=1e-3)
        assert found.suggestion is None or int(np.argmin(sums)) >= 8


def test_nan_at_once():
    x, y = data()
    with pytest.raises(TrainingError, match="not finite in the first step"):
        make(source=(x * math.nan, y)).find_lr()


def test_nan_later_ends_it():
    found = make(linear(), optimizer="sgd", config={"gradient_clip_norm": None}).find_lr(1e-5, 1e30, STEPS)
    assert found.diverged
    assert all(map(math.isfinite, found.losses))


@pytest.mark.parametrize(
    "limits",
    [{"steps": 5}, {"min_lr": 0.0}, {"min_lr": 1.0, "max_lr": 0.1}, {"max_lr": math.inf}, {"min_lr": math.nan}],
)
def test_impossible_limits(limits):
    with pytest.raises(ConfigError):
        make().find_lr(**limits)


def test_data_that_can_be_read_once():
    x, y = data()
    with pytest.raises(ConfigError, match="only once"):
        make(source=iter([(x, y)])).find_lr()


def test_no_data():
    with pytest.raises(ConfigError, match="no training data"):
        Trainer(Net(), progress=False).find_lr()


def test_known_curves():
    rates = list(np.geomspace(1e-6, 1, 61))
    losses = [1 - 0.9 / (1 + math.exp(-4 * (math.log10(rate) + 3))) + 5 * rate**2 for rate in rates]
    found = RateSearch(rates, losses, losses, 0.1)
    assert found.steepest == pytest.approx(1e-3, rel=0.5)  # where the logistic curve is steepest
    assert found.tenth == pytest.approx(rates[int(np.argmin(losses))] / 10, rel=0.06)
    rising = RateSearch(rates, losses[::-1], losses[::-1], 0.1)
    assert (rising.steepest, rising.tenth) != (found.steepest, found.tenth)
