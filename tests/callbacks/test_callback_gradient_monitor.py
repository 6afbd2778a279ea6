"""The gradient monitor: its numbers are those of the plain formula, through every door."""

import json
import logging
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from monitored_models import Fragile, backward, data, dense, poisoned, sick, tokens_net, trainer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from etude import (
    Callback,
    DataLoader,
    GradientAccumulator,
    GradientMonitor,
    Trainer,
    TrainingLoop,
    TrainingMetrics,
)
from etude.callbacks.gradient_health import Judge
from etude.core import ConfigError, TrainingError
from etude.engine.callback import Gradients
from etude.engine.precision import MixedPrecision

# --- numbers


def test_numbers_are_those_of_the_plain_formula():
    model = tokens_net().double()
    ids = torch.randint(30, (4, 8), generator=torch.Generator().manual_seed(2))
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    health = GradientMonitor().check(model, divisor=4.0)
    modules = dict(model.named_modules())
    assert set(health.layers) == {name for name, one in modules.items() if list(one.parameters(recurse=False))}
    for name, norm in health.layers.items():
        own = list(modules[name].parameters(recurse=False))
        flat = torch.cat([param.grad.flatten() for param in own]) / 4
        assert norm == pytest.approx(float(flat.square().sum().sqrt()), rel=1e-12)
    for name, param in model.named_parameters():
        assert health.parameters[name] == pytest.approx(float(param.grad.norm()) / 4, rel=1e-12)
    json.dumps(health.to_dict(), allow_nan=False)
    assert health.healthy
    assert "are healthy" in str(health)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_norms_are_summed_in_float32(dtype):
    model = nn.Linear(300, 300, bias=False).to(dtype)
    model.weight.grad = torch.full_like(model.weight, 250.0)
    health = GradientMonitor(exploding=1e9).check(model)
    assert health.layers["weight"] == pytest.approx(250.0 * 300, rel=1e-4)  # more than float16 can hold


def test_parameters_of_several_dtypes_and_without_gradient_stay_apart():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2).double(), "c": nn.Linear(2, 2)})
    model["c"].requires_grad_(False)
    for value, param in enumerate(model.parameters(), start=1):
        param.grad = torch.full_like(param, float(value))
    model["b"].bias.grad = None
    health = GradientMonitor().check(model)
    assert health.parameters == {
        "a.weight": pytest.approx(1 * 2.0),
        "a.bias": pytest.approx(2 * 2**0.5),
        "b.weight": pytest.approx(3 * 2.0),
        "b.bias": None,
    }
    assert list(health.layers) == ["a", "b"]


@pytest.mark.parametrize(
    ("config", "clip"), [({}, 1e-3), ({"grad_accum_steps": 4, "batch_size": 8}, None), ({"precision": "fp16"}, 1e-3)]
)
def test_in_a_run_they_are_those_of_the_averaged_loss_before_clipping(config, clip):
    x, y = data(32)
    model, reference = dense(8, 16, 4), dense(8, 16, 4)
    backward(reference, x, y)
    monitor = GradientMonitor()
    batches = DataLoader(x, y, config.get("batch_size", 32), shuffle=False)
    trainer(model, monitor, batches, max_steps=1, gradient_clip_norm=clip, **config).train()
    for name, param in reference.named_parameters():
        rel = 2e-2 if config.get("precision") == "fp16" else 1e-5
        assert monitor.report.parameters[name] == pytest.approx(float(param.grad.norm()), rel=rel)


def test_looks_at_the_first_step_and_every_nth_and_records_layers():
    seen = []

    class Keep(Callback):
        def on_log(self, record):
            seen.append({name: value for name, value in record.items() if name.startswith("grad_norm/")})

    monitor = GradientMonitor(every=3, log_layers=True)
    steps = []
    original = monitor._judge.judge
    monitor._judge.judge = lambda step, *args, **kwargs: steps.append(step) or original(step, *args, **kwargs)
    config = {"epochs": 2, "batch_size": 32, "log_interval": 4, "device": "cpu"}
    Trainer(dense(8, 16, 4), data(), config=config, callbacks=[monitor, Keep()], progress=False).train()
    assert steps == [1, 4, 7, 10, 13, 16]
    assert len(seen) == 4
    assert all(set(record) == {"grad_norm/0", "grad_norm/2"} for record in seen)
    assert seen[-1]["grad_norm/0"] == monitor.report.layers["0"]


class CountReads(TorchDispatchMode):
    """Counts what `.item()` and `float()` come to."""

    reads = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.reads += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_a_look_reads_nothing():
    from etude.callbacks.gradient_monitor import measure

    model = tokens_net()
    model(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()
    with CountReads() as counter:
        measure(Gradients(model, (), 1.0, MixedPrecision("fp32")), torch.tensor(3.0), 1)
    assert counter.reads == 0


# --- doors


def test_training_loop_takes_one(caplog):
    model = sick()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loop = TrainingLoop(
        gradient_accumulator=GradientAccumulator(optimizer, accumulation_steps=2),
        gradient_monitor=GradientMonitor(),
        use_amp=True,
        device="cpu",
    )
    with caplog.at_level(logging.WARNING, "etude"):
        for epoch in range(2):
            loop.train_epoch(model, DataLoader(*data(), 32), optimizer, epoch=epoch)
    assert [record.getMessage()[:7] for record in caplog.records] == ["layer 2"]
    assert loop.gradient_monitor.report.step == 1


def test_training_loop_from_functions_takes_one(caplog):
    model = sick()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = TrainingLoop(log_interval=2, gradient_monitor=GradientMonitor(every=2))
    arguments = (F.cross_entropy, optimizer.step, optimizer.zero_grad, DataLoader(*data(), 32), TrainingMetrics())
    with caplog.at_level(logging.WARNING, "etude"):
        loop.run_epoch(model, *arguments)
    assert [record.getMessage()[:7] for record in caplog.records] == ["layer 2"]
    with pytest.raises(ConfigError, match="layers"):
        loop.run_epoch(lambda x: model(x), *arguments)


@pytest.mark.parametrize("door", ["train_epoch", "run_epoch"])
def test_training_loop_error_names_the_layer(door):
    model = Fragile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = TrainingLoop(log_interval=30, gradient_monitor=GradientMonitor())
    batches = poisoned(30, range(5, 31))
    functions = (F.cross_entropy, optimizer.step, optimizer.zero_grad, batches, TrainingMetrics())
    arguments = (batches, optimizer) if door == "train_epoch" else functions
    with pytest.raises(TrainingError) as raised:
        getattr(loop, door)(model, *arguments)
    assert raised.value.__notes__[0].startswith("layer second")


def test_from_a_config(tmp_path):
    from etude.config import build_selection
    from etude.experiment import load_config

    path = tmp_path / "one.yaml"
    path.write_text("model: {name: lenet5}\ncallbacks: [{name: gradient_monitor, every: 7}, gradient_monitor]\n")
    config = load_config(path)
    built = [build_selection(one, path="callbacks", document=config.document) for one in config.sections["callbacks"]]
    assert [monitor.every for monitor in built] == [7, 100]
    path.write_text("callbacks: [{name: gradient_monitor, every: 0}]\n")
    with pytest.raises(ConfigError, match=r"callbacks\.0\.every"):
        load_config(path)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"patience": 0}, {"vanishing": 2e3}, {"vanishing": -1.0}])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(ConfigError, match="GradientMonitor"):
        GradientMonitor(**wrong)


@given(
    st.lists(
        st.lists(
            st.one_of(st.none(), st.floats(0, 1e6), st.just(math.nan), st.just(math.inf)), min_size=3, max_size=3
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 11),
)
def test_judging_goes_on_the_same_from_its_state(looks, cut):
    def numbers(norms):
        return {f"l{i}.weight": norm for i, norm in enumerate(norms)}

    def judge():
        return Judge(vanishing=1e-7, exploding=1e3, patience=2)

    whole = judge()
    expected = [whole.judge(step, numbers(norms)) for step, norms in enumerate(looks)]
    first, second = judge(), judge()
    found = [first.judge(step, numbers(norms)) for step, norms in enumerate(looks[:cut])]
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    found += [second.judge(step, numbers(norms)) for step, norms in enumerate(looks[cut:], start=len(found))]
    assert [str(health) for health in found] == [str(health) for health in expected]
    assert [health.warnings for health in found] == [health.warnings for health in expected]
    for norms, health in zip(looks, found, strict=True):
        is_bad = any(norm is not None and not math.isfinite(norm) for norm in norms)
        assert is_bad == any(finding.kind == "non-finite" for finding in health.findings)
