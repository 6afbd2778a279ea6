"""`etude train --dry-run`: its numbers are those of a real run, for any number of processes."""

import math
import time
from itertools import product

import pytest
import torch
import yaml
from torch import nn

from etude import DataSplits, TensorData, register
from etude.core import ConfigError
from etude.experiment import load_config
from etude.experiment.build import build_trainer
from etude.experiment.dry_run import MOST_WORLD, dry_run, share_sizes


@register("data", "dry_data")
def data(samples: int = 50) -> DataSplits:
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(0))
    return DataSplits(TensorData(x, (x[:, 0] > 0).long()), num_classes=2)


@register("model", "dry_model")
def model(width: int = 8, frozen: bool = False) -> nn.Module:
    made = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 2))
    made[0].requires_grad_(not frozen)
    return made


@register("model", "dry_reader")
class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x):
        return self.layer(x) * (1 if float(x.sum()) > 0 else 2)


@pytest.fixture
def load(tmp_path):
    def load(**sections):
        training = {"epochs": 3, "batch_size": 12, "device": "cpu", **sections.pop("training", {})}
        config = {
            "data": "dry_data",
            "model": "dry_model",
            "scheduler": None,
            "training": training,
            **sections,
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        return load_config(tmp_path / "config.yaml")

    return load


def size(tensors):
    return sum(one.numel() * one.element_size() for one in tensors if isinstance(one, torch.Tensor))


OPTIMIZERS = [
    {"name": "sgd", "lr": 0.1},
    {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    {"name": "adamw", "lr": 0.1, "amsgrad": True},
    {"name": "adagrad", "lr": 0.1},
    {"name": "lion", "lr": 0.1},
    {"name": "sam", "optimizer": {"name": "adamw", "lr": 0.1}},
]


HIDDEN = [  # these need the hidden matrices
    {"name": "muon", "lr": 0.1},
    {"name": "lookahead", "optimizer": {"name": "muon", "lr": 0.1, "normuon": True}},
]


@pytest.mark.parametrize(
    ("optimizer", "frozen"),
    [*product(OPTIMIZERS, (False, True)), *product(HIDDEN, (False,))],
    ids=lambda one: "-".join(map(str, one.values())) if isinstance(one, dict) else str(one),
)
def test_memory_is_that_of_a_trained_run(load, optimizer, frozen):
    config = load(optimizer=optimizer, model={"name": "dry_model", "frozen": frozen}, training={"max_steps": 1})
    found = dry_run(config)
    trainer = build_trainer(config, progress=False)
    trainer.train()
    model, made = trainer.model, trainer.optimizer
    assert found.parameters == sum(one.numel() for one in model.parameters())
    assert found.weights == size(model.state_dict().values())
    trained = [one for one in model.parameters() if one.requires_grad]
    assert found.gradients == size(trained)
    assert found.optimizer == size(one for state in made.state.values() for one in state.values())
    assert (found.steps_per_epoch, found.total_steps) == (5, 1)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_frozen_weights_have_no_gradients_and_an_average_has_memory_of_its_own(load, parallel):
    config = load(optimizer={"name": "adamw", "lr": 0.1}, training={"max_steps": 1, "freeze": "0", "ema": 0.9})
    plain = dry_run(load(optimizer={"name": "adamw", "lr": 0.1}))
    trainer = build_trainer(config, progress=False)
    trainer.train()
    trained = [one for one in trainer.model.parameters() if one.requires_grad]
    states = [one for state in trainer.optimizer.state.values() for one in state.values()]
    found = dry_run(config)
    assert found.gradients == found.average == size(trained)
    assert found.optimizer == size(states)
    assert found.memory == found.weights + 2 * size(trained) + size(states) + found.activations
    assert found.checkpoint == found.weights + size(trained) + size(states)
    assert found.activations < plain.activations  # the input of the first layer is not needed
    halves = dry_run(
        load(optimizer={"name": "adamw", "lr": 0.1}, training={"freeze": "0", "ema": 0.9}, parallel=parallel), 2
    )
    assert halves.trained == found.trained
    assert halves.average == halves.gradients == size(trained) // (1 if parallel == "ddp" else 2)


def test_activations_are_what_a_forward_pass_keeps(load):
    found = dry_run(load())
    x, kept = torch.randn(12, 6), {}
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    own = {one.data_ptr() for one in model.state_dict().values()}

    def keep(tensor):
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        output = model(x)
    assert output.requires_grad
    assert found.micro_batch == 12
    assert found.activations == size(kept.values())


@pytest.mark.parametrize(
    ("training", "world", "samples"),
    [
        ({"batch_size": 12, "micro_batch_size": 4}, 1, 4),
        ({"batch_size": 12, "micro_batch_size": 8}, 2, 3),
        ({"batch_size": 12, "micro_batch_size": 1}, 4, 1),
        ({"batch_size": 64}, 2, 25),  # of 50 samples
    ],
    ids=lambda one: "-".join(map(str, one.values())) if isinstance(one, dict) else str(one),
)
def test_activations_are_those_of_the_samples_that_a_process_runs_at_once(load, training, world, samples):
    found = dry_run(load(model="dry_divided", training=training), world)
    assert found.micro_batch == samples
    assert found.activations == 4 * samples * (6 + 8)


@register("model", "dry_divided")
def divided(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2))


@pytest.mark.parametrize(("tensor", "groups"), [(1, 4), (2, 2), (4, 1)])
def test_activations_of_layers_that_processes_divide_are_those_of_a_part(load, tensor, groups):
    plan = {"0": "colwise", "2": "rowwise"}
    parallel = {"tensor": tensor, "tensor_plan": plan} if tensor > 1 else "ddp"
    found = dry_run(load(model="dry_divided", parallel=parallel), world=4)
    samples = 12 // groups
    assert found.micro_batch == samples
    assert found.activations == 4 * samples * (6 + 8 // tensor)  # the input, and the output of tanh


def test_a_model_that_reads_its_input_has_unknown_activations(load):
    found = dry_run(load(model="dry_reader"))
    assert found.activations is None
    assert found.memory is None
    assert any("activations       unknown: " in line for line in found.lines())


@pytest.mark.parametrize(
    ("batch_size", "world", "shares", "words"),
    [
        (12, 4, {3: 4}, ""),
        (12, 5, {2: 3, 3: 2}, "no multiple of 5 processes"),
        (64, 40, {1: 30, 2: 10}, "more than the 50 samples of an epoch, so a step has 50"),
        (100, 80, {0: 30, 1: 50}, "30 of 80 processes have none"),
    ],
)
def test_shares_of_the_batch(load, batch_size, world, shares, words):
    found = dry_run(load(training={"batch_size": batch_size}), world)
    assert dict(found.shares) == shares
    assert found.micro_batch == max(shares)
    assert (found.steps_per_epoch, found.total_steps) == ((5, 15) if batch_size == 12 else (1, 3))
    assert (len(found.warnings) == 1 and words in found.warnings[0]) if words else not found.warnings


@pytest.mark.parametrize(("world", "sizes"), [(13, {}), (4096, {}), (26, {"shard": 13})])
def test_a_batch_with_too_few_samples_for_the_processes_is_refused_as_by_training(load, world, sizes):
    with pytest.raises(ConfigError, match=f"batch_size 12 .* {world} processes"):
        dry_run(load(parallel=sizes or "ddp"), world)


def test_a_schedule_of_batch_sizes_is_refused_as_by_training(load):
    with pytest.raises(ConfigError, match=r"batch_size 3 .* 4 processes"):
        dry_run(load(training={"batch_size": {0: 8, 2: 3}}), 4)
    assert "give a number" in dry_run(load(training={"batch_size": {0: 8, 2: 4}}), 4).warnings[0]


def test_captured_steps_of_several_processes_are_refused_as_by_training(load):
    config = load(training={"capture": "on"})
    dry_run(config)
    with pytest.raises(ConfigError, match="there are 2 processes"):
        dry_run(config, 2)


def test_thousands_of_ranks_take_a_moment(load):
    config = load(data={"name": "dry_data", "samples": 1_000_003}, training={"batch_size": 100_000})
    dry_run(config)  # imports
    spent = -time.process_time()
    found = dry_run(config, 4096)
    assert sum(size * count for size, count in found.shares.items()) == 100_000
    assert spent + time.process_time() < 2  # 0.2 s where it was measured
    assert share_sizes(7, 4096).sum() == 7


def test_a_missing_gpu_is_no_mistake_but_others_are(load):
    assert dry_run(load(training={"device": "cuda:7"})).parameters == 90
    with pytest.raises(ConfigError, match=f"{MOST_WORLD:,}"):
        dry_run(load(), MOST_WORLD + 1)
    with pytest.raises(ConfigError, match="width"):
        dry_run(load(model={"name": "dry_model", "width": "many"}))


@pytest.mark.parametrize("shard", [2, 4])
def test_a_process_holds_its_shard(load, shard):
    """Torch divides rows: the first process has the most."""
    found = dry_run(load(parallel={"shard": shard}, optimizer={"name": "adamw", "lr": 0.1}), 8)
    shapes = [(8, 6), (8,), (8,), (8,), (2, 8), (2,)]
    shares = [-(-rows // shard) * math.prod(rest) for rows, *rest in shapes]
    buffers = 8 * 4 + 8 * 4 + 8
    assert (found.sizes.data, found.sizes.shard) == (8 // shard, shard)
    assert found.weights == 4 * sum(shares) + buffers
    assert found.gradients == 4 * sum(shares)
    assert found.optimizer == 4 * (2 * sum(shares) + len(shapes))  # two averages and a counter
    assert found.checkpoint == 4 * (3 * 90 + len(shapes)) + buffers
    assert found.buckets == 0
    assert dict(found.shares) == {1: 4, 2: 4}


def test_states_that_every_process_has_are_counted_whole(load):
    found = dry_run(load(optimizer={"name": "muon", "lr": 0.1, "normuon": True}, parallel="fsdp"), 2)
    matrix, others = 8 * 6, [8, 8, 8, 2 * 8, 2]
    numbers = matrix // 2 + 8 + 2 * sum(others) // 2 + len(others)  # a momentum and rows; two averages and a counter
    assert found.optimizer == 4 * numbers


def test_sizes_that_do_not_fit_the_world_are_refused(load):
    with pytest.raises(ConfigError, match="4096"):
        dry_run(load(parallel={"shard": 3}), 4096)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"optimizer": {"name": "adafactor", "lr": 0.1}}, "needs whole matrices"),
        ({"callbacks": ["gradient_monitor"]}, "GradientMonitor"),
        ({"training": {"batch_size": "auto"}}, "batch_size is auto"),
        ({"training": {"on_out_of_memory": "split"}}, "on_out_of_memory is split"),
    ],
    ids=lambda one: "-".join(one) if isinstance(one, dict) else "",
)
def test_what_a_divided_model_does_not_support_is_refused_as_by_training(load, sections, words):
    dry_run(load(**sections), 2)
    with pytest.raises(ConfigError, match=words):
        dry_run(load(**sections, parallel="fsdp"), 2)
