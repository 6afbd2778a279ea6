"""The step: equal to a hand-written loop, exact under accumulation, silent towards the host, safe with NaN."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from etude.core import LossTerm, Task, TrainingError
from etude.engine.meter import measure
from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import ClassificationLoss, LanguageModelingLoss, SupervisedTask
from etude.optim import SGD, Adam, AdamW, RMSprop

OPTIMIZERS = {
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "adam": lambda p: Adam(p, lr=1e-2),
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
    "sgd_nesterov": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: RMSprop(p, lr=1e-3, momentum=0.5),
    "adamw_loop": lambda p: AdamW(p, lr=1e-2, kernel="loop"),
    "torch_adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def small_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)).to(dtype)


def make_step(model, optimizer, task=None, *, clip_norm=None, clip_value=None, precision=None, metrics=False):
    precision = precision or MixedPrecision("fp32")
    updater = Updater(optimizer, clip_norm=clip_norm, clip_value=clip_value, precision=precision)
    return Step(model, task or SupervisedTask(ClassificationLoss()), updater, precision, metrics=metrics)


def batches(count, size=8, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield (
            torch.randn(size, 12, generator=generator, dtype=dtype),
            torch.randint(5, (size,), generator=generator),
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_step_equals_hand_written_float64_loop(name, clip_norm):
    model = small_model(dtype=torch.float64)
    reference = copy.deepcopy(model)
    step = make_step(model, OPTIMIZERS[name](model.parameters()), clip_norm=clip_norm)
    optimizer = OPTIMIZERS[name](reference.parameters())
    for x, y in batches(20, dtype=torch.float64):
        report = step([(x, y)])
        optimizer.zero_grad()
        loss = F.cross_entropy(reference(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), clip_norm or float("inf"))
        optimizer.step()
        torch.testing.assert_close(report.sums["loss"] / report.counts["loss"], loss.detach())
        torch.testing.assert_close(report.grad_norm.double(), norm)
    # torch clips to max/(norm + 1e-6); the step clips to max/norm: a relative difference of 1e-6 at most
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_clip_value_equals_torch():
    model = small_model()
    reference = copy.deepcopy(model)
    step = make_step(model, SGD(model.parameters(), lr=0.1), clip_value=0.01)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for x, y in batches(5):
        step([(x, y)])
        optimizer.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        nn.utils.clip_grad_value_(reference.parameters(), 0.01)
        optimizer.step()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


class TinyLanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(23, 16)
        self.mix = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 23)

    def forward(self, input_ids):
        return self.head(self.mix(self.embed(input_ids))[0])


def ragged_batch(generator):
    ids = torch.randint(23, (64, 11), generator=generator)
    lengths = torch.randint(2, 12, (64,), generator=generator)
    lengths[16:32] = 2  # one micro-batch with far fewer tokens than the others: a mean of means would show
    return {"input_ids": ids, "attention_mask": (torch.arange(11) < lengths[:, None]).long()}


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("knows_counts", [True, False])
def test_accumulating_4x16_equals_1x64_with_ragged_masks(clip_norm, knows_counts):
    torch.manual_seed(0)
    model = TinyLanguageModel()
    twin = copy.deepcopy(model)

    class Task(SupervisedTask):
        def counts(self, batch):
            return super().counts(batch) if knows_counts else None

    whole = make_step(model, AdamW(model.parameters(), lr=1e-3), Task(LanguageModelingLoss()), clip_norm=clip_norm)
    parts = make_step(twin, AdamW(twin.parameters(), lr=1e-3), Task(LanguageModelingLoss()), clip_norm=clip_norm)
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        batch = ragged_batch(generator)
        one = whole([batch])
        four = parts([{key: value[i : i + 16] for key, value in batch.items()} for i in range(0, 64, 16)])
        assert float(one.counts["loss"]) == float(four.counts["loss"])
    weights = torch.cat([p.flatten() for p in model.parameters()])
    other = torch.cat([p.flatten() for p in twin.parameters()])
    # Rounding differs between one sum of 64 and four sums of 16; a mean of means would be off by percents.
    assert (weights - other).norm() / weights.norm() < 1e-6


def test_tokens_are_counted_in_whole_numbers():
    batch = ragged_batch(torch.Generator().manual_seed(0))
    plain = {"input_ids": batch["input_ids"]}
    masked = measure([batch, batch]).tokens
    assert masked.dtype == torch.int64  # float32 would lose tokens of steps beyond 2**24
    assert masked == 2 * batch["attention_mask"].sum()
    assert measure([plain, plain]) == (2 * 64, 2 * 64 * 11, 0)


class CountHostReads(TorchDispatchMode):
    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("num_micro", [1, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd_nesterov", "adam"])
def test_step_reads_nothing_but_the_norm(precision, num_micro, optimizer):
    model = small_model()
    chosen = MixedPrecision(precision)
    step = make_step(model, OPTIMIZERS[optimizer](model.parameters()), clip_norm=1.0, precision=chosen, metrics=True)
    data = list(batches(num_micro))
    while float(step(data).skipped):  # up to the first update that counts, the step may look
        pass
    with CountHostReads() as counter:
        step(data)
    assert counter.reads == 2  # the norm, and whether it is finite: on the CPU that does not wait
    with CountHostReads() as counter:  # the counter does count
        float(step(data).sums["loss"])
    assert counter.reads == 3


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad_step", [0, 3])
def test_non_finite_update_is_skipped_and_leaves_no_trace(name, bad_step):
    clean, dirty = small_model(), small_model()
    clean_step = make_step(clean, OPTIMIZERS[name](clean.parameters()), clip_norm=1.0)
    dirty_step = make_step(dirty, OPTIMIZERS[name](dirty.parameters()), clip_norm=1.0)
    skipped = []
    for place, (x, y) in enumerate(batches(6)):
        if place == bad_step:
            poisoned = x.clone()
            poisoned[0, 0] = float("nan")
            skipped.append(float(dirty_step([(poisoned, y)]).skipped))
        clean_step([(x, y)])
        skipped.append(float(dirty_step([(x, y)]).skipped))
    assert skipped == [1.0 if place == bad_step else 0.0 for place in range(7)]
    for mine, theirs in zip(dirty.parameters(), clean.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_fp16_scale_shrinks_on_overflow_and_training_goes_on():
    model = small_model()
    precision = MixedPrecision("fp16", loss_scale=2.0**60, summands=8)
    step = make_step(model, AdamW(model.parameters(), lr=1e-2), precision=precision)
    before = copy.deepcopy(model.state_dict())
    x, y = next(iter(batches(1)))
    first = step([(x, y)])
    assert float(first.skipped) == 1.0
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert float(precision.scaler.scale) == 2.0**59
    losses = [float(step([(x, y)]).sums["loss"]) for _ in range(80)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0, 65536.0])
@pytest.mark.parametrize("summands", [1, 8])
def test_reported_gradient_norms_hold_no_loss_scale(loss_scale, summands):
    model = small_model()
    reference = copy.deepcopy(model).double()
    precision = MixedPrecision("fp16", loss_scale=loss_scale, summands=summands)
    step = make_step(model, SGD(model.parameters(), lr=1e-12), precision=precision)
    for x, y in batches(3):
        report = step([(x, y)])
        F.cross_entropy(reference(x.double()), y).backward()
        norm = nn.utils.get_total_norm([param.grad for param in reference.parameters()])
        reference.zero_grad()
        if not report.skipped:  # too large a scale overflows, and is halved
            torch.testing.assert_close(report.grad_norm.double(), norm, rtol=1e-2, atol=0)


def test_fp16_and_bf16_follow_float32():
    results = {}
    for name in ("fp32", "bf16", "fp16"):
        model = small_model()
        precision = MixedPrecision(name, summands=8)
        step = make_step(model, AdamW(model.parameters(), lr=1e-2), clip_norm=1.0, precision=precision)
        for batch in batches(30):
            report = step([batch])
        results[name] = float(report.sums["loss"])
    assert results["bf16"] == pytest.approx(results["fp32"], rel=0.05)
    assert results["fp16"] == pytest.approx(results["fp32"], rel=0.02)


class TwoTerms:
    """Two terms with their own counts; `ahead` says whether counts are known before the model runs."""

    def __call__(self, model, batch, *, metrics):
        x, y = batch
        out = model(x)
        keep = y < 3
        return {
            "classes": LossTerm(F.cross_entropy(out, y, reduction="sum"), float(len(y)), weight=0.7),
            "rare": LossTerm(out[keep].square().sum(), keep.sum(), weight=torch.tensor(2.0)),
        }


class TwoTermsAhead(TwoTerms, Task):
    def counts(self, batch):
        return {"classes": float(len(batch[1])), "rare": (batch[1] < 3).sum()}


def test_several_terms_are_each_divided_by_their_own_count():
    model = small_model(dtype=torch.float64)
    twin, reference = copy.deepcopy(model), copy.deepcopy(model)
    whole = make_step(model, SGD(model.parameters(), lr=0.1), TwoTerms())
    parts = make_step(twin, SGD(twin.parameters(), lr=0.1), TwoTermsAhead())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for x, y in batches(10, size=12, dtype=torch.float64):
        whole([(x, y)])
        parts([(x[:3], y[:3]), (x[3:4], y[3:4]), (x[4:], y[4:])])
        optimizer.zero_grad()
        out = reference(x)
        keep = y < 3
        (0.7 * F.cross_entropy(out, y) + 2.0 * out[keep].square().sum() / keep.sum()).backward()
        optimizer.step()
    for first, second, third in zip(model.parameters(), twin.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(first, third, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(second, third, rtol=1e-6, atol=1e-9)


def test_several_terms_without_counts_cannot_accumulate():
    model = small_model()
    step = make_step(model, SGD(model.parameters(), lr=0.1), TwoTerms())
    with pytest.raises(TrainingError, match=r"several terms \(classes, rare\).*grad_accum_steps to 1"):
        step(list(batches(2)))


def test_batch_in_which_nothing_counts_changes_nothing():
    torch.manual_seed(0)
    model = TinyLanguageModel()
    before = copy.deepcopy(model.state_dict())
    step = make_step(model, SGD(model.parameters(), lr=1.0), SupervisedTask(LanguageModelingLoss()), clip_norm=1.0)
    report = step([{"input_ids": torch.zeros(2, 5, dtype=torch.long), "attention_mask": torch.zeros(2, 5).long()}])
    assert float(report.counts["loss"]) == 0
    assert float(report.skipped) == 0
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_loss_without_weighted_terms_is_an_error():
    model = small_model()

    def task(model, batch, *, metrics):
        return {"accuracy": LossTerm(model(batch[0]).sum(), 1.0, weight=0.0)}

    with pytest.raises(TrainingError, match="weight other than 0"):
        make_step(model, SGD(model.parameters(), lr=0.1), task)(list(batches(1)))


@pytest.mark.parametrize("name", ["rmsprop", "adamw_loop", "sgd_loop", "torch_adamw"])
def test_a_parameter_whose_first_gradient_is_bad_keeps_no_trace_of_it(name):
    """The head of a task that comes in later; as on a device that must not wait, where a bad update is undone."""
    make = {
        "rmsprop": lambda p: RMSprop(p, lr=0.1),
        "adamw_loop": lambda p: AdamW(p, lr=0.1, kernel="loop"),
        "sgd_loop": lambda p: SGD(p, lr=0.1, momentum=0.9, kernel="loop"),
        "torch_adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    }[name]
    trunk, head, alone = (nn.Parameter(torch.ones(3)) for _ in range(3))
    updater, reference = Updater(make([trunk, head])), Updater(make([alone]))
    good, bad = torch.full((3,), 2.0), torch.full((3,), float("nan"))
    for first in (None, None, bad, good, good):
        updater.zero_grad()
        trunk.grad, head.grad = good.clone(), None if first is None else first.clone()
        if first is None:
            updater.apply(1.0)
        else:
            grads = [trunk.grad, head.grad]
            updater._guarded_step(grads, 1.0, torch.tensor(float(first is bad)))
    for _ in range(2):
        alone.grad = good.clone()
        reference.apply(1.0)
    assert head.equal(alone)


@pytest.mark.parametrize("place", [0, 1])
def test_a_group_without_parameters_is_no_matter(place):
    layer = nn.Linear(2, 1)
    groups = [{"params": list(layer.parameters())}]
    groups.insert(place, {"params": [], "weight_decay": 0.0})
    updater = Updater(torch.optim.SGD(groups, lr=0.5))
    updater.send_rates()
    layer(torch.ones(1, 2)).sum().backward()
    before = layer.bias.item()
    updater.apply(1.0)
    assert layer.bias.item() == pytest.approx(before - 0.5)


@pytest.mark.parametrize("divisor", [3.0, 2**24 + 1])
@pytest.mark.parametrize("clip_norm", [None, 0.7])
def test_float64_gradients_are_divided_in_float64(divisor, clip_norm):
    """The fused kernels of torch take a divisor in float32."""
    weight = nn.Parameter(torch.linspace(-1, 1, 7, dtype=torch.float64))
    before, weight.grad = weight.detach().clone(), torch.linspace(1, 3, 7, dtype=torch.float64) * divisor
    expected = weight.grad / divisor
    if clip_norm is not None:
        expected *= clip_norm / expected.norm()
    Updater(SGD([weight], lr=1.0), clip_norm=clip_norm).apply(divisor)
    torch.testing.assert_close(before - weight.detach(), expected, rtol=1e-14, atol=1e-15)


def test_numbers_of_an_update_differ_even_in_a_tensor_that_is_changed_in_place():
    layer, rate = nn.Linear(2, 1), torch.tensor(0.5)
    updater = Updater(torch.optim.SGD(layer.parameters(), lr=rate, fused=True), clip_norm=1.0)
    seen = [updater.constants()]
    rate.fill_(0.25)
    seen.append(updater.constants())
    updater.clip_norm = 2.0
    seen.append(updater.constants())
    assert len(set(seen)) == 3
    assert updater.constants() == seen[-1]


@pytest.mark.parametrize("make", [SGD, torch.optim.Adagrad, RMSprop])
def test_a_group_that_is_added_between_steps_is_trained_as_one_from_the_start(make):
    """Its gradients are divided, clipped and set to zero too."""
    model = small_model(dtype=torch.float64)
    reference = copy.deepcopy(model)
    optimizer = make(model[0].parameters(), lr=0.05)
    step = make_step(model, optimizer, clip_norm=0.3)
    theirs = make_step(reference, make(reference.parameters(), lr=0.05), clip_norm=0.3)
    reference[2].requires_grad_(False)
    model[2].requires_grad_(False)
    for number, batch in enumerate(batches(6, dtype=torch.float64)):
        if number == 2:
            optimizer.add_param_group({"params": list(model[2].parameters()), "name": "late"})
            model[2].requires_grad_(True)
            reference[2].requires_grad_(True)
        step([batch])
        theirs([batch])
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    assert step.updater.rates() == {"lr": 0.05, "lr/late": 0.05}
