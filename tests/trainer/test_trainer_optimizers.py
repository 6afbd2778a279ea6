"""Several optimizers and parameter groups in a run: rates in the logs, schedules, exact resuming, what is refused."""

import pytest
import torch
from torch import nn

from etude import Callback, LRSchedule, Trainer
from etude.core import CheckpointError, ConfigError
from etude.engine.capture import Capture
from etude.optim import SGD, AdamW, cosine
from stub_recorder import RunAgain

DATA = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3

COSINE = cosine(15)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def two(model):
    return [SGD(model[:2].parameters(), lr=0.1, momentum=0.9), AdamW(model[3].parameters(), lr=0.01)]


GROUPS = {"name": "adamw", "lr": 0.01, "groups": [{"params": "0.*", "lr": 0.001}], "decay_only_matrices": True}
WAYS = {"several": two, "groups": lambda _model: GROUPS}


class Records(Callback):
    def __init__(self):
        super().__init__()
        self.records, self.epochs = [], []

    def on_log(self, record):
        self.records.append(dict(record))

    def on_epoch_end(self, epoch, logs):
        self.epochs.append(dict(logs))


def run(way, epochs, folder=None, *, resume=False, scheduler=COSINE, **settings):
    model = net()
    config = {"epochs": epochs, "batch_size": 8, "seed": 3, "log_interval": 1, "device": "cpu", **settings}
    return Trainer(
        model,
        DATA,
        config=config,
        optimizer=WAYS[way](model),
        scheduler=scheduler,
        callbacks=[Records()],
        progress=False,
        output_dir=folder,
        resume=resume,
    )


@pytest.mark.parametrize("way", WAYS)
def test_resumed_run_is_the_uninterrupted_one(way, tmp_path):
    whole = run(way, 3)
    whole.train()
    run(way, 1, tmp_path).train()
    resumed = run(way, 3, tmp_path, resume=True)
    resumed.train()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    first, second = (one.optimizer.state_dict()["state"] for one in (whole, resumed))
    assert all(torch.equal(first[key][name], second[key][name]) for key in first for name in first[key])


@pytest.mark.parametrize(("way", "name", "bases"), [("several", "1", (0.1, 0.01)), ("groups", "0", (0.01, 0.001))])
def test_rates_of_all_groups_are_logged_and_follow_the_schedule(way, name, bases):
    trainer = run(way, 3)
    trainer.train()
    found = next(one for one in trainer.callbacks if isinstance(one, Records))
    for step, record in enumerate(found.records):
        assert (record["lr"], record[f"lr/{name}"]) == pytest.approx([base * COSINE(step) for base in bases])
    assert {"lr", f"lr/{name}"} <= found.epochs[-1].keys()


def test_recorded_steps_of_several_optimizers_are_the_usual_ones():
    usual, recorded = (run("several", 3, scheduler=None) for _ in range(2))  # a rate on the host is a constant
    recorded.step.capture = Capture(recorded.step, RunAgain(recorded.step))
    usual.train(), recorded.train()
    assert recorded.step.capture.recorder.replayed > 3
    for name, value in usual.model.state_dict().items():
        assert torch.equal(value, recorded.model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda m: [SGD(m.parameters()), AdamW(m[3].parameters())], r"3\.weight"),
        (lambda m: [SGD(m[0].parameters()), AdamW(m[3].parameters())], r"1\.weight"),
        (lambda m: [SGD(m.parameters()), "adamw"], "optimizer"),
        (lambda m: [torch.optim.LBFGS(m.parameters())], "LBFGS"),
        (lambda m: {"name": "adamw", "groups": [{"params": "4.*"}]}, r"'4\.\*'"),
    ],
)
def test_optimizers_that_do_not_fit_the_model_are_refused(make, word):
    model = net()
    with pytest.raises(ConfigError, match=word):
        Trainer(model, DATA, optimizer=make(model), progress=False)


@pytest.mark.parametrize(("freezes", "left"), [(False, ["3.weight", "3.bias"]), (True, [])])
def test_parameters_that_the_optimizer_lacks_are_one_warning(caplog, freezes, left):
    model = net()
    model[3].requires_grad_(not freezes)
    Trainer(model, DATA, optimizer=SGD(model[:2].parameters(), lr=0.1), config={"epochs": 1}, progress=False).train()
    said = [record.getMessage() for record in caplog.records if "requires_grad_(False)" in record.getMessage()]
    assert len(said) == bool(left)
    assert all(name in said[0] for name in left)
    assert not any("0.weight" in line for line in said)


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path):
    run("several", 1, tmp_path).train()
    with pytest.raises(CheckpointError, match=r"SGD \+ AdamW"):
        run("groups", 2, tmp_path, resume=True)


def test_torch_schedulers_of_single_optimizers():
    model = net()
    optimizers = two(model)
    schedules = [
        torch.optim.lr_scheduler.StepLR(one, 1, factor) for one, factor in zip(optimizers, (0.5, 0.1), strict=True)
    ]
    config = {"epochs": 2, "batch_size": 8, "device": "cpu"}
    Trainer(
        model,
        DATA,
        config=config,
        optimizer=optimizers,
        callbacks=[LRSchedule(one) for one in schedules],
        progress=False,
    ).train()
    assert [one.param_groups[0]["lr"] for one in optimizers] == pytest.approx([0.1 * 0.5**2, 0.01 * 0.1**2])


def test_groups_may_name_what_is_frozen():
    trainer = Trainer(net(), DATA, config={"freeze": "0.*", "device": "cpu"}, optimizer=GROUPS, progress=False)
    assert {group.get("name") for group in trainer.optimizer.param_groups} == {None}


def test_a_group_whose_parameters_another_optimizer_has_is_refused():
    section = {
        "name": "several",
        "patterns": ["0", "*"],
        "optimizers": [{"name": "lookahead", "optimizer": {"name": "sgd", "groups": [{"params": "2"}]}}, "adamw"],
    }
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(ConfigError, match=r"groups\.0\.params: .*2\.weight.* in another optimizer"):
        Trainer(model, (torch.zeros(4, 6), torch.zeros(4)), optimizer=section)


@pytest.mark.parametrize("settings", [{"lr": None}, {}])
@pytest.mark.parametrize("config", [{}, {"learning_rate": 0.1}])
def test_an_optimizer_without_a_rate_is_refused(settings, config):
    class Own(torch.optim.Optimizer):
        def step(self, closure=None):
            pass

    model = nn.Linear(6, 3)
    with pytest.raises(ConfigError, match=r"Own has None as the learning rate .* set lr"):
        Trainer(
            model, (torch.zeros(4, 6), torch.zeros(4)), optimizer=Own(model.parameters(), settings), config=config
        )


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf")])
def test_the_rate_of_a_group_is_a_finite_number_of_at_least_0(rate):
    """Torch checks that of the optimizer alone."""
    model = nn.Linear(6, 3)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": rate}]
    with pytest.raises(ConfigError, match=f"Adamax has {rate} as the learning rate of a parameter group"):
        Trainer(model, (torch.zeros(4, 6), torch.zeros(4)), optimizer=torch.optim.Adamax(groups))


def test_clipping_every_element_of_complex_gradients_is_refused():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6, 3, dtype=torch.complex64))

    with pytest.raises(ConfigError, match="gradient_clip_norm"):
        Trainer(Net(), (torch.zeros(4, 6), torch.zeros(4)), config={"gradient_clip_value": 0.1})
