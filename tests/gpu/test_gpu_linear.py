"""Linear layer and cross entropy in one on a CUDA device: exact, without waiting, in little memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import (
    LanguageModelingLoss,
    SupervisedTask,
    linear_autograd,
    linear_cross_entropy,
    linear_cross_entropy_terms,
)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def make(tokens, classes, width, dtype=torch.float32):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(classes, width, device="cuda", dtype=torch.float64).mul_(0.3).to(dtype).requires_grad_()
    bias = torch.randn(classes, device="cuda", dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(classes, (tokens,), device="cuda")
    labels[::5] = -100
    return hidden, weight, bias, labels


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("classes", [1, 513, 30_011])
@pytest.mark.parametrize("chunk", ["auto", 100])
@pytest.mark.parametrize(("smoothing", "softcap"), [(0.0, None), (0.1, 5.0)])
def test_values_and_gradients_against_float64(dtype, classes, chunk, smoothing, softcap):
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    hidden, weight, bias, labels = make(333, classes, 64, dtype)
    options = {"label_smoothing": smoothing, "softcap": softcap, "chunk_tokens": chunk}
    terms = linear_cross_entropy_terms(hidden, weight, labels, bias, metrics=True, **options)
    found = torch.autograd.grad(terms["loss"].sum, (hidden, weight, bias))
    exact = [one.detach().double().requires_grad_() for one in (hidden, weight, bias)]
    logits = F.linear(*exact)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    tolerance = TOLERANCES[dtype]
    assert terms["loss"].sum.item() == pytest.approx(loss.item(), rel=tolerance, abs=1e-3)
    assert int(terms["loss"].count) == int((labels != -100).sum())
    right = int((logits.argmax(-1) == labels).sum())
    assert int(terms["accuracy"].sum) == pytest.approx(right, abs=0 if dtype is torch.float64 else 2)
    for mine, theirs in zip(found, torch.autograd.grad(loss, exact), strict=True):
        # A gradient that is exactly 0 (one class, no choice) is found as a sum of one rounding error for each row.
        scale = max(theirs.abs().max().item(), 0.1) if theirs.any() else 0.02 * len(labels)
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=tolerance * scale)


def test_float16_keeps_the_small_probabilities_of_a_large_vocabulary():
    hidden, weight, bias, labels = make(64, 100_003, 32, torch.float16)
    weight.data.mul_(0.01)
    grad = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, bias).sum, bias)[0]
    exact = [one.detach().double().requires_grad_() for one in (hidden, weight, bias)]
    loss = F.cross_entropy(F.linear(*exact), labels, reduction="sum")
    expected = torch.autograd.grad(loss, exact[2])[0]
    rare = expected > 0  # no label: a sum of tiny probabilities
    error = (grad.double() - expected)[rare].abs() / expected[rare]
    assert error.median().item() < 2e-3


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_never_waits(no_waiting, precision, training):
    hidden, weight, bias, labels = make(512, 5003, 64)
    context = MixedPrecision(precision, torch.device("cuda")).autocast

    def once():
        with torch.set_grad_enabled(training):
            with context():
                terms = linear_cross_entropy_terms(
                    hidden, weight, labels, bias, label_smoothing=0.1, chunk_tokens=100, metrics=True
                )
            if training:
                terms["loss"].sum.backward()

    once()
    no_waiting(True)
    once()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1009, 32)
        self.head = nn.Linear(32, 1009)

    def forward(self, input_ids):
        return self.head(torch.tanh(self.embed(input_ids)))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_with_a_fused_head_never_waits_and_learns_the_same(no_waiting, precision):
    batch = {
        "input_ids": torch.randint(1009, (8, 65), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    }
    losses = []
    for fused in (False, "head"):
        torch.manual_seed(0)
        model = Model().cuda()
        chosen = MixedPrecision(precision, torch.device("cuda"), summands=512)
        updater = Updater(torch.optim.SGD(model.parameters(), lr=0.5), clip_norm=1.0, precision=chosen)
        step = Step(model, SupervisedTask(LanguageModelingLoss(fused_head=fused)), updater, chosen, metrics=True)
        while float(step([batch]).skipped):  # the first step compares both ways, and may look
            pass
        no_waiting(True)
        reports = [step([batch]) for _ in range(3)]
        no_waiting(False)
        losses.append([float(report.sums["loss"]) for report in reports])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if precision == "fp32" else 2e-3)


def test_deterministic_algorithms():
    hidden, weight, bias, labels = make(512, 5003, 64, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [
            torch.autograd.grad(
                linear_cross_entropy(hidden, weight, labels, bias, chunk_tokens=100).sum, (hidden, weight, bias)
            )
            for _ in range(2)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_above_inputs_and_gradients_is_at_least_8_times_less(dtype):
    tokens, classes, width = 32_768, 50_257, 256
    if torch.cuda.mem_get_info()[0] < 32e9:
        pytest.skip("the plain formula needs 30 GB")

    def extra(way):
        hidden, weight, _, labels = make(tokens, classes, width, dtype)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        way(hidden, weight, labels).backward()
        return torch.cuda.max_memory_allocated() - before - hidden.nbytes - weight.nbytes

    plain = extra(lambda h, w, y: F.cross_entropy(F.linear(h, w).float(), y, reduction="sum"))
    torch.cuda.empty_cache()
    chunked = extra(lambda h, w, y: linear_cross_entropy(h, w, y).sum)
    assert plain > 8 * chunked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_triton_kernel_is_used(dtype, monkeypatch):
    pytest.importorskip("triton")

    def refused(problem):
        raise AssertionError("the fallback was used")

    monkeypatch.setattr(linear_autograd, "chunked", refused)
    hidden, weight, bias, labels = make(64, 513, 32, dtype)
    linear_cross_entropy(hidden, weight, labels, bias).sum.backward()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_captured_call_replays_with_other_values(precision):
    hidden, weight, bias, labels = make(300, 5003, 64)
    context = MixedPrecision(precision, torch.device("cuda")).autocast
    inputs = (hidden, weight, bias)

    def once():
        with context():
            terms = linear_cross_entropy_terms(
                hidden, weight, labels, bias, label_smoothing=0.1, chunk_tokens=128, metrics=True
            )
        grads = torch.autograd.grad(terms["loss"].sum, inputs)
        return [terms["loss"].sum.detach(), terms["accuracy"].sum, *grads]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = once()
    with torch.no_grad():
        for one in inputs:
            one.copy_(torch.randn_like(one))
        labels.copy_(labels.roll(7))
    graph.replay()
    for mine, theirs in zip(captured, once(), strict=True):
        torch.testing.assert_close(mine, theirs)
