"""Steps with a second gradient: equal to a hand-written SAM, exact under accumulation, once in everything else."""

import copy
import shutil
import warnings

import pytest
import torch
import torch.nn.functional as F
from captured_steps import batches as other_batches
from torch import nn

from etude import Callback, Trainer
from etude.core import ConfigError, LossTerm, Task
from etude.engine.capture import Capture
from etude.engine.objective import Objective
from etude.engine.precision import LossScaler, MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import ClassificationLoss, SupervisedTask
from etude.optim import SAM, SGD, AdamW, Lookahead, RMSprop
from stub_recorder import RunAgain

OPTIMIZERS = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "rmsprop": lambda p: RMSprop(p, lr=1e-3),
    "adamw_loop": lambda p: AdamW(p, lr=1e-2, kernel="loop"),
}


def net(dtype=torch.float64, *more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *more, nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def make_step(model, optimizer, *, precision=None, task=None, metrics=False, **clip):
    precision = precision or MixedPrecision("fp32")
    updater = Updater(optimizer, precision=precision, **clip)
    return Step(model, task or SupervisedTask(ClassificationLoss()), updater, precision, metrics=metrics)


def batches(count, size=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=generator, dtype=dtype), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


def by_hand(model, optimizer, x, y, rho, clip_norm=None, clip_value=None):
    """One step of SAM in plain torch; returns the loss at the weights that are trained."""
    params = list(model.parameters())
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    norm = torch.cat([param.grad.flatten() for param in params]).norm()
    before = [param.detach().clone() for param in params]
    with torch.no_grad():
        for param in params:
            param += rho * param.grad / norm
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for param, old in zip(params, before, strict=True):
            param.copy_(old)
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(params, clip_norm)
    if clip_value is not None:
        nn.utils.clip_grad_value_(params, clip_value)
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.1}, {"clip_value": 0.01}], ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_is_that_of_a_hand_written_loop(make, clip):
    model, reference = net(), net()
    step, optimizer = make_step(model, SAM(make(model.parameters()), rho=0.5), **clip), make(reference.parameters())
    for x, y in batches(6):
        report = step([(x, y)])
        assert report.sums["loss"].item() / 8 == pytest.approx(by_hand(reference, optimizer, x, y, 0.5, **clip))
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # clip_grad_norm_ adds 1e-6 to the norm


@pytest.mark.parametrize("wrap", [SAM, lambda inner: Lookahead(SAM(inner), k=2)], ids=["sam", "both"])
def test_micro_batches_are_one_large_batch(wrap):
    one, two = net(), net()
    ignoring = SupervisedTask(ClassificationLoss(ignore_index=-100))
    whole, parts = (make_step(model, wrap(SGD(model.parameters())), task=ignoring) for model in (one, two))
    for x, y in batches(4, size=32):
        y[:5] = -100  # parts with different counts
        whole([(x, y)])
        parts([(x[start : start + 8], y[start : start + 8]) for start in range(0, 32, 8)])
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


class Masks(nn.Module):
    """Drops inputs at random and keeps what it has drawn."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def forward(self, x):
        mask = torch.rand_like(x)
        self.drawn.append(mask)
        return x * (mask > 0.3)


def test_both_passes_draw_the_same_random_numbers_and_the_generator_advances_once():
    masks = Masks()
    model = net(torch.float32, masks)
    step = make_step(model, SAM(SGD(model.parameters())))
    torch.manual_seed(3)
    step(batches(2, dtype=torch.float32))
    after = torch.rand(1)
    first, second, again, also = masks.drawn
    assert torch.equal(first, again)
    assert torch.equal(second, also)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    torch.rand_like(first), torch.rand_like(second)
    assert torch.equal(torch.rand(1), after)


def test_running_statistics_count_a_batch_once():
    model, plain = net(torch.float32, nn.BatchNorm1d(8)), net(torch.float32, nn.BatchNorm1d(8))
    ((x, y),) = batches(1, dtype=torch.float32)
    make_step(model, SAM(SGD(model.parameters()), rho=1.0))([(x, y)])
    plain(x)
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), name


class Counted(Task):
    """Counts what it is asked for."""

    def __init__(self):
        self.calls, self.observed = 0, 0

    def __call__(self, model, batch, *, metrics):
        self.calls += 1
        return {"loss": LossTerm(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))}

    def observe(self, batch):
        self.observed += 1


def test_a_micro_batch_runs_twice_and_is_measured_once():
    model, task = net(), Counted()
    step = make_step(model, SAM(SGD(model.parameters())), task=task)
    watcher, seen = Callback(), []
    watcher.on_gradients = seen.append
    step.watchers = [watcher]
    report = step(batches(3))
    assert (task.calls, task.observed, len(seen)) == (6, 3, 1)
    assert report.counts["loss"] == 24
    for _ in range(2):  # a plain step runs once
        make_step(model, SGD(model.parameters()), task=task)(batches(1))
    assert task.calls == 8


class SpoilPass(nn.Module):
    """Makes the gradients of one forward pass not finite, without changing its output."""

    def __init__(self, bad_pass):
        super().__init__()
        self.calls, self.bad_pass = 0, bad_pass

    def forward(self, x):
        self.calls += 1
        if self.calls == self.bad_pass:
            x = x.clone()
            x.register_hook(lambda grad: grad * float("inf"))
        return x


@pytest.mark.parametrize("wrap", [SAM, lambda inner: Lookahead(SAM(inner), k=2)], ids=["sam", "both"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("bad_pass", [1, 2, 5, 6])
def test_a_gradient_that_is_not_finite_in_either_pass_skips_the_step(bad_pass, make, wrap):
    model = net(torch.float32, nn.BatchNorm1d(8), SpoilPass(bad_pass))
    step = make_step(model, wrap(make(model.parameters())))
    kept, skipped = [], []
    for batch in batches(4, dtype=torch.float32):
        before = copy.deepcopy((model.state_dict(), step.updater.optimizer.state_dict()["state"]))
        skipped.append(float(step([batch]).skipped))
        if skipped[-1]:
            kept.append((before, copy.deepcopy((model.state_dict(), step.updater.optimizer.state_dict()["state"]))))
    assert skipped == [float(number == (bad_pass - 1) // 2) for number in range(4)]
    (((weights, state), (now, state_now)),) = kept
    assert all(torch.equal(weights[name], value) for name, value in now.items())
    assert {name: set(one) for name, one in state.items()} == {name: set(one) for name, one in state_now.items()}
    assert all(torch.equal(value, state_now[name][key]) for name, one in state.items() for key, value in one.items())


def test_a_loss_scale_that_overflows_the_first_gradients_is_halved():
    precision = MixedPrecision("fp32")
    precision.scaler = LossScaler(torch.device("cpu"), 2.0**1)
    model = net(torch.float32, SpoilPass(1))
    step = make_step(model, SAM(SGD(model.parameters())), precision=precision)
    reports = [step([batch]) for batch in batches(2, dtype=torch.float32)]
    assert [float(report.skipped) for report in reports] == [1.0, 0.0]
    assert precision.scaler.scale.item() == 1.0


def test_the_loss_scale_does_not_change_the_direction():
    models = []
    for scale in (1.0, 2.0**10):
        precision = MixedPrecision("fp32")
        precision.scaler = LossScaler(torch.device("cpu"), scale)
        model = net(torch.float32)
        step = make_step(model, SAM(SGD(model.parameters(), lr=0.5), rho=0.5), precision=precision)
        for batch in batches(3, dtype=torch.float32):
            step([batch])
        models.append(model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other)


def test_an_error_in_the_second_pass_leaves_the_weights_of_before():
    class Fails(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("out of something")
            return x

    model = net(torch.float32, Fails())
    before = copy.deepcopy(model.state_dict())
    step = make_step(model, SAM(SGD(model.parameters()), rho=0.5))
    ((x, y),) = batches(1, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="something"):
        step([(x, y)])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not step.objective.is_repeating
    step([(x, y)])
    assert not torch.equal(model[0].weight, before["0.weight"])


def captured_step(optimizer, *layers, needed=False):
    model = net(torch.float32, nn.BatchNorm1d(8), *layers)
    step = make_step(model, optimizer(model.parameters()), metrics=True)
    step.capture = Capture(step, RunAgain(step), needed=needed)
    notices = []
    step.notice = notices.append
    return step, notices


WRAPPED = {
    "lookahead": lambda p: Lookahead(AdamW(p, lr=1e-2), k=3),
    "sam": lambda p: SAM(AdamW(p, lr=1e-2)),
    "both": lambda p: Lookahead(SAM(RMSprop(p, lr=1e-2)), k=3),
}


@pytest.mark.parametrize("optimizer", WRAPPED.values(), ids=WRAPPED)
def test_recorded_steps_are_those_that_run_eagerly(optimizer):
    (step, notices), (eager, _) = (captured_step(optimizer) for _ in range(2))
    eager.capture = None
    for batch in other_batches(12):
        step([batch])
        eager([batch])
    assert notices == ["steps are captured as CUDA graphs"]
    assert step.capture.recorder.replayed > 5
    for (name, one), other in zip(step.model.state_dict().items(), eager.model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def test_an_objective_for_one_pass_only_is_refused():
    class Once(Counted):
        def objective(self, parts):
            made = Objective(self, parts)
            made.only_once = lambda: "a task that counts"
            return made

    model = net()
    with pytest.raises(ConfigError, match="a task that counts"):
        make_step(model, SAM(SGD(model.parameters())), task=Once())


def test_no_value_is_read_outside_the_cpu():
    """The paths for a device never ask for a value, which meta tensors do not have."""
    params = [nn.Parameter(torch.zeros(3, device="meta"))]
    params[0].grad = torch.zeros(3, device="meta")
    optimizer = Lookahead(SAM(torch.optim.SGD(params, lr=0.1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.optimizer.perturb()
        optimizer.optimizer.restore()
        optimizer.step()


class Stopped(Exception):
    """Ends a run as a kill does: nothing is saved."""


class Interrupted(nn.Module):
    def __init__(self, call=None):
        super().__init__()
        self.layers, self.call, self.calls = net(torch.float32, nn.BatchNorm1d(8), nn.Dropout(0.3)), call, 0

    def forward(self, x):
        self.calls += self.training
        if self.training and self.calls == self.call:
            raise Stopped
        return self.layers(x)


@pytest.mark.parametrize("call", [18, 19, 21, 24])  # of 8 per step: both passes of its third one
@pytest.mark.parametrize("wraps_sam", [False, True])
def test_a_run_that_ends_inside_a_pass_continues_with_the_same_bytes(tmp_path, call, wraps_sam):
    def run(model, *, resume=False):
        def make(params):
            inner = SAM(AdamW(params, lr=1e-2))
            return Lookahead(inner, k=2) if wraps_sam else inner

        config = {"epochs": 1, "batch_size": 4, "grad_accum_steps": 4, "save_every_steps": 1, "device": "cpu"}
        x, y = (torch.cat(one) for one in zip(*batches(8, dtype=torch.float32), strict=True))
        trainer = Trainer(model, (x, y), config=config, optimizer=make, output_dir=tmp_path / "run", progress=False)
        if resume:
            trainer.load_checkpoint(tmp_path / "run")
        trainer.train()
        return trainer.model.state_dict()

    with pytest.raises(Stopped):
        run(Interrupted(call))
    again = run(Interrupted(), resume=True)
    shutil.rmtree(tmp_path / "run")
    for name, value in run(Interrupted()).items():
        assert value.equal(again[name]), name
