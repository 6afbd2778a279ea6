"""Expected values from hidden states on a CUDA device: exact, without waiting, in little memory."""

import pytest
import torch
from torch import nn

from etude.core import HeadOutput
from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import SupervisedTask
from etude.multimodal import MeaningfulLoss, build_vocab_spec
from etude.multimodal.loss import combined_loss, make_reconstruction, meaningful_terms
from etude.multimodal.loss.terms import choose_positions

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]

KINDS = ["mse", "huber", "wasserstein", "hl_gauss"]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
VOCAB = build_vocab_spec(v_image=513, v_scalar=67, modalities={"one": 1})


def books(dtype=torch.float64, device="cpu"):
    g = torch.Generator().manual_seed(0)
    image = torch.randn(513, 16, generator=g, dtype=torch.float64)
    scalar = torch.randn(67, generator=g, dtype=torch.float64).sort().values
    found = {"image": image, "scalar": scalar, "one": torch.zeros(1, dtype=torch.float64)}
    return {name: values.to(device, dtype) for name, values in found.items()}


def make(tokens, width, dtype=torch.float32):
    g = torch.Generator().manual_seed(1)

    def draw(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=g, dtype=torch.float64)).to("cuda", dtype).requires_grad_()

    hidden, weight = draw(tokens, width), draw(VOCAB.vocab_size, width, scale=0.3)
    bias = draw(VOCAB.vocab_size)
    targets = torch.randint(VOCAB.vocab_size, (tokens,), generator=g)
    targets[::5] = -100
    targets[1::7] = VOCAB.miss_id
    return hidden, weight, bias, targets.cuda()


def terms_of(predictions, targets, kind, *, sample_k=None):
    recon = {name: make_reconstruction(kind, values) for name, values in books().items()}
    return meaningful_terms(
        predictions, targets, VOCAB, recon, dict.fromkeys(recon, 1.0), sample_k=sample_k, metrics=True
    )


def total_of(terms):
    return 0.5 * terms["loss_img"].sum + 2.0 * terms["loss_sca"].sum + terms["loss_one"].sum


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_against_float64_on_the_cpu(kind, dtype, softcap):
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    hidden, weight, bias, targets = make(333, 64, dtype)
    terms = terms_of(HeadOutput(hidden, weight, bias, softcap), targets, kind)
    found = torch.autograd.grad(total_of(terms), (hidden, weight, bias))
    exact = [one.detach().double().cpu().requires_grad_() for one in (hidden, weight, bias)]
    expected = terms_of(HeadOutput(*exact, softcap).logits, targets.cpu(), kind)
    tolerance = TOLERANCES[dtype]
    for name, term in expected.items():
        assert float(terms[name].count) == float(term.count)
        assert float(terms[name].sum.detach()) == pytest.approx(float(term.sum.detach()), rel=tolerance, abs=1e-3)
    for mine, theirs in zip(found, torch.autograd.grad(total_of(expected), exact), strict=True):
        scale = max(theirs.abs().max().item(), 0.1)
        torch.testing.assert_close(mine.double().cpu(), theirs, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("kind", KINDS)
def test_float16_beyond_its_range(kind):
    """Values of 1e5 and a loss scale of 65,536: products in float16, but nothing overflows on the way."""
    hidden, weight, bias, targets = make(256, 32, torch.float16)
    recon = {"scalar": make_reconstruction(kind, 1e5 * books()["scalar"])}

    def one_term(predictions, labels):
        return meaningful_terms(predictions, labels, VOCAB, recon, {"scalar": 1.0}, sample_k=None, metrics=False)

    exact = [one.detach().double().cpu().requires_grad_() for one in (hidden, weight, bias)]
    expected = one_term(HeadOutput(*exact).logits, targets.cpu())["loss_sca"].sum
    down = 1.0 / float(expected.detach().abs()) / 65536
    found = one_term(HeadOutput(hidden, weight, bias), targets)["loss_sca"].sum
    mine = torch.autograd.grad(65536.0 * (down * found), (hidden, weight, bias))
    for one, theirs in zip(mine, torch.autograd.grad(65536.0 * (down * expected), exact), strict=True):
        assert bool(one.isfinite().all())
        torch.testing.assert_close(one.double().cpu(), theirs, rtol=0, atol=1e-2 * theirs.abs().max().item())


@pytest.mark.parametrize("most", [1, 100, 5000])
def test_positions_are_drawn_on_the_device(no_waiting, most):
    targets = make(4096, 2)[3]
    modality = VOCAB.range_of("image")
    own = ((targets >= modality.base) & (targets < modality.stop)).cpu()
    choose_positions(targets, modality, most)
    no_waiting(True)
    chosen = choose_positions(targets, modality, most)
    no_waiting(False)
    assert int(chosen.count) == int(own.sum())
    counted = (chosen.row_weights != 0).cpu()
    rows = (torch.arange(4096) if chosen.rows is None else chosen.rows.cpu())[counted]
    assert bool(own[rows].all())
    assert len(rows.unique()) == len(rows) == min(most, int(own.sum()))
    assert float(chosen.row_weights.sum()) == pytest.approx(int(own.sum()), rel=1e-5)
    assert torch.equal(chosen.targets.cpu()[counted], targets.cpu()[rows] - modality.base)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("sample_k", [None, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_it_never_waits(no_waiting, kind, sample_k, precision):
    hidden, weight, bias, targets = make(1024, 64)
    context = MixedPrecision(precision, torch.device("cuda")).autocast
    recon = {name: make_reconstruction(kind, values) for name, values in books().items()}

    def once(as_head):
        with context():
            head = HeadOutput(hidden, weight, bias, 30.0)
            terms = meaningful_terms(
                head if as_head else head.logits,
                targets,
                VOCAB,
                recon,
                dict.fromkeys(recon, 1.0),
                sample_k=sample_k,
                metrics=True,
            )
        total_of(terms).backward()

    once(True)  # brings the codebooks to the device
    once(False)
    no_waiting(True)
    once(True)
    once(False)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB.vocab_size, 32)
        self.head = nn.Linear(32, VOCAB.vocab_size)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_never_waits_and_learns_the_same_with_and_without_a_fused_head(no_waiting, precision):
    g = torch.Generator("cuda").manual_seed(0)
    tokens = torch.randint(VOCAB.vocab_size, (8, 129), device="cuda", generator=g)
    losses = []
    for fused, sample_k in ((False, None), ("head", None), ("head", 64)):
        torch.manual_seed(0)
        model = Model().cuda()
        chosen = MixedPrecision(precision, torch.device("cuda"), summands=1024)
        updater = Updater(torch.optim.SGD(model.parameters(), lr=0.5), clip_norm=1.0, precision=chosen)
        loss = MeaningfulLoss(VOCAB, books(), weight=1.0, sample_k=sample_k, fused_head=fused)
        step = Step(model, SupervisedTask(loss), updater, chosen, metrics=True)
        while float(step([{"tokens": tokens}]).skipped):  # the first step compares both ways, and may look
            pass
        no_waiting(True)
        reports = [step([{"tokens": tokens}]) for _ in range(3)]
        no_waiting(False)
        losses.append([float(report.sums["loss_ce"]) for report in reports])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if precision == "fp32" else 2e-3)
    assert losses[2] == pytest.approx(losses[0], rel=5e-2)  # other gradients of the modalities, the same on average


def test_combined_loss_on_the_device():
    hidden, weight, _, targets = make(512, 32)
    output, labels = HeadOutput(hidden.reshape(4, 128, 32), weight), targets.reshape(4, 128)
    for device in ("cpu", "cuda"):
        found = books(torch.float32, device)
        loss, stats = combined_loss(output, labels, VOCAB, codebooks=found, config={"sample_k": None})
        assert {value.device.type for value in stats.values()} == {"cuda"}
        expected, _ = combined_loss(
            output.logits.double().cpu(), labels.cpu(), VOCAB, codebooks=books(), config={"sample_k": None}
        )
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)


def test_deterministic_algorithms():
    hidden, weight, bias, targets = make(1024, 64, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            torch.manual_seed(3)
            total = total_of(terms_of(HeadOutput(hidden, weight, bias), targets, "mse", sample_k=100))
            runs.append(torch.autograd.grad(total, (hidden, weight, bias)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_above_inputs_and_gradients_is_at_least_8_times_less(dtype):
    tokens, size, width = 65_536, 16_384, 256
    if torch.cuda.mem_get_info()[0] < 32e9:
        pytest.skip("the plain formula needs 20 GB")
    vocab = build_vocab_spec(v_image=size)
    recon = {"image": make_reconstruction("mse", torch.randn(size, 64))}
    targets = torch.randint(6, 6 + size, (tokens,), device="cuda")

    def extra(as_head):
        hidden = torch.randn(tokens, width, device="cuda", dtype=dtype, requires_grad=True)
        weight = torch.randn(6 + size, width, device="cuda", dtype=dtype, requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        head = HeadOutput(hidden, weight)
        terms = meaningful_terms(
            head if as_head else head.logits, targets, vocab, recon, {"image": 1.0}, sample_k=None, metrics=False
        )
        terms["loss_img"].sum.backward()
        return torch.cuda.max_memory_allocated() - before - hidden.nbytes - weight.nbytes

    plain = extra(False)
    torch.cuda.empty_cache()
    fused = extra(True)
    assert plain > 8 * fused
