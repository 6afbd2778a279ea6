"""The meaningful loss as a strategy: its terms, counts and derived numbers for batches of every form, and its head."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etude.core import ConfigError, DataError, HeadOutput, TrainingError
from etude.losses import LanguageModelingLoss, SupervisedTask
from etude.losses.functional import mean_of
from etude.losses.fused_head import FusedHead
from etude.models import CausalTransformerLM
from etude.multimodal import build_vocab_spec
from etude.multimodal.loss import MeaningfulLoss

VOCAB = build_vocab_spec(v_image=6, v_scalar=5, modalities={"class": 3})
IMAGE = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))
SCALAR = torch.tensor([0.0, 0.5, 2.0, 3.0, 9.0])
BOOKS = {"image": IMAGE, "scalar": SCALAR}
WIDTH = 8


class Model(nn.Module):
    """Embedding and output layer; what comes next is guessed from the token alone."""

    def __init__(self, seed=0, dtype=torch.float64, names_head=True):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB.vocab_size, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, VOCAB.vocab_size, dtype=dtype)
        self.seen = []
        if names_head:
            self.get_output_embeddings = lambda: self.head

    def forward(self, tokens):
        return self.after(self.head(self.before(tokens)))

    def before(self, tokens):
        self.seen.append(tuple(tokens.shape))
        return torch.tanh(self.embedding(tokens))

    def after(self, logits):
        return logits


class Capped(Model):
    """Changes its logits after the output layer."""

    def after(self, logits):
        return 0.5 * logits


class FixedLength(Model):
    """Cannot run on a part of a batch."""

    def before(self, tokens):
        return super().before(tokens) + torch.zeros(20, WIDTH, dtype=torch.float64)


def tokens_of(shape=(4, 21), seed=0):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB.vocab_size, shape, generator=g)
    tokens[1, -6:] = VOCAB.pad_id
    tokens[2, :3] = VOCAB.miss_id
    return tokens


def batches():
    """(batch, inputs, next tokens with -100 where they do not count) for every form of a batch."""
    tokens = tokens_of()
    inputs, nexts = tokens[:, :-1], tokens[:, 1:].clone()
    nexts[nexts == VOCAB.pad_id] = -100
    types, mask = VOCAB.types(tokens), (tokens != VOCAB.pad_id).long()
    hidden = mask.clone()
    hidden[3, 10:] = 0  # also masks tokens that are not padding
    masked = nexts.masked_fill(hidden[:, 1:] == 0, -100)
    shifted = F.pad(nexts, (0, 1), value=-100)
    labels = tokens.masked_fill(tokens == VOCAB.pad_id, -100)
    return {
        "tokens": ({"tokens": tokens, "types": types, "attn_mask": mask}, inputs, nexts),
        "tokens, mask": ({"tokens": tokens, "types": types, "attn_mask": hidden}, inputs, masked),
        "tokens alone": ({"tokens": tokens}, inputs, nexts),
        "input_ids alone": ({"input_ids": tokens}, tokens, shifted),
        "input_ids, mask": (
            {"input_ids": tokens, "attention_mask": hidden},
            tokens,
            shifted.masked_fill(F.pad(hidden[:, 1:], (0, 1)) == 0, -100),
        ),
        "labels that repeat": ({"input_ids": tokens, "attention_mask": mask, "labels": labels}, tokens, shifted),
        "labels that are next": ({"input_ids": inputs, "labels": nexts}, inputs, nexts),
        "labels with PAD": ({"input_ids": inputs, "labels": tokens[:, 1:]}, inputs, nexts),
        "tuple of next": ((inputs, nexts), inputs, nexts),
        "tuple that repeats": ((tokens, tokens), tokens, shifted),
        "tensor": (tokens, tokens, shifted),
        "int32": ({"tokens": tokens.int()}, inputs, nexts),
    }


def by_hand(model, inputs, nexts, weights):
    """Sums and counts by name, from the formula."""
    logits = F.linear(torch.tanh(model.embedding(inputs)), model.head.weight, model.head.bias)
    counted = nexts != -100
    ce = F.cross_entropy(logits[counted], nexts[counted], reduction="sum")
    found = {"loss_ce": (ce, int(counted.sum()))}
    found["accuracy"] = ((logits.argmax(-1) == nexts).sum(), int(counted.sum()))
    for name, values in BOOKS.items():
        short = {"image": "img", "scalar": "sca"}[name]
        codes = VOCAB.decode(name, nexts)
        own = codes >= 0
        values = values.double().reshape(len(values), -1)
        probs = torch.softmax(logits[own][:, VOCAB.range_of(name).slice], 1)
        loss = (probs @ values - values[codes[own]]).square().mean(1).sum()
        found[f"loss_{short}"] = (loss, int(own.sum()))
    total = sum(weights[name] * found[name][0] / max(found[name][1], 1) for name in weights)
    return found, total


def run(loss, model, batch, metrics=True):
    return SupervisedTask(loss)(model, batch, metrics=metrics)


def objective(terms):
    return sum(term.weight * mean_of(term) for term in terms.values())


# ------------------------------------------------------------------------------------------ terms and counts


@pytest.mark.parametrize("fused", [None, True, False, "head"])
@pytest.mark.parametrize("form", batches())
def test_terms_of_every_form_of_batch(form, fused):
    batch, inputs, nexts = batches()[form]
    model = Model()
    loss = MeaningfulLoss(VOCAB, BOOKS, weights={"image": 0.3}, weight=0.2, sample_k=None, fused_head=fused)
    terms = run(loss, model, batch)
    weights = {"loss_ce": 1.0, "loss_img": 0.3, "loss_sca": 0.2}
    expected, total = by_hand(model, inputs, nexts, weights)
    assert set(terms) == set(expected)
    assert {name: term.weight for name, term in terms.items() if term.weight} == weights
    for name, (value, count) in expected.items():
        assert float(terms[name].sum.detach()) == pytest.approx(float(value.detach()), rel=1e-10), name
        assert float(terms[name].count) == count, name
        assert terms[name].sum.requires_grad == bool(terms[name].weight)
    counts = loss.counts(batch)
    assert {name: float(count) for name, count in counts.items()} == {name: expected[name][1] for name in weights}
    parameters = list(model.parameters())
    found = torch.autograd.grad(objective(terms), parameters)
    for mine, theirs in zip(found, torch.autograd.grad(total, parameters), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-13)
    assert set(run(loss, model, batch, metrics=False)) == set(weights)


def test_the_loss_of_a_batch_alone():
    batch, inputs, nexts = batches()["tokens"]
    model = Model()
    loss = MeaningfulLoss(VOCAB, BOOKS, sample_k=None)
    total = by_hand(model, inputs, nexts, {"loss_ce": 1.0, "loss_img": 0.1, "loss_sca": 0.1})[1]
    torch.testing.assert_close(loss.compute_loss(model(inputs), batch), total)


@pytest.mark.parametrize("fused", [False, "head"])
def test_micro_batches_add_up_to_one_batch(fused):
    """Each term is divided once by its count over all: whatever the modalities of each part."""
    tokens = tokens_of((6, 21), seed=3)
    tokens[4:] = VOCAB.miss_id  # a part without any value
    model = Model()
    loss = MeaningfulLoss(VOCAB, BOOKS, sample_k=None, fused_head=fused)

    def gradients(parts):
        terms = [run(loss, model, {"tokens": part}) for part in parts]
        names = [name for name in terms[0] if terms[0][name].weight]
        counts = {name: sum(float(one[name].count) for one in terms) for name in names}
        ahead = {name: sum(float(loss.counts({"tokens": part})[name]) for part in parts) for name in names}
        assert counts == ahead
        total = sum(one[name].weight * one[name].sum / counts[name] for one in terms for name in names)
        return [total, *torch.autograd.grad(total, model.parameters())]

    whole = gradients([tokens])
    for parts in (tokens.split(2), tokens.split(1), tokens.split([1, 5])):
        for mine, theirs in zip(gradients(parts), whole, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-14)


def test_an_attention_mask_of_another_shape_is_no_padding_mask():
    tokens = tokens_of()
    loss = MeaningfulLoss(VOCAB, BOOKS)
    usual = loss.counts({"tokens": tokens})
    found = loss.counts({"tokens": tokens, "attn_mask": torch.zeros(4, 1, 21, 21)})
    assert {name: int(count) for name, count in found.items()} == {name: int(count) for name, count in usual.items()}


def test_labels_to_ignore_may_be_others():
    batch, inputs, nexts = batches()["tuple of next"]
    model = Model()
    expected = run(MeaningfulLoss(VOCAB, BOOKS, sample_k=None, shift=False), model, batch)
    for ignored in (-1, VOCAB.pad_id):
        loss = MeaningfulLoss(VOCAB, BOOKS, sample_k=None, shift=False, ignore_index=ignored)
        found = run(loss, model, (inputs, nexts.masked_fill(nexts == -100, ignored)))
        for name, term in expected.items():
            torch.testing.assert_close(found[name].sum, term.sum)
            assert float(found[name].count) == float(term.count)


def test_label_smoothing_is_of_the_cross_entropy_alone():
    batch = batches()["tokens"][0]
    model = Model()
    plain = run(MeaningfulLoss(VOCAB, BOOKS, sample_k=None), model, batch)
    for fused in (False, True):
        loss = MeaningfulLoss(VOCAB, BOOKS, sample_k=None, label_smoothing=0.2, fused_head=fused)
        terms = run(loss, model, batch)
        assert float(terms["nll"].sum) == pytest.approx(float(plain["loss_ce"].sum.detach()), rel=1e-9)
        assert terms["nll"].weight == 0.0
        assert float(terms["loss_ce"].sum.detach()) > float(plain["loss_ce"].sum.detach())
        torch.testing.assert_close(terms["loss_img"].sum, plain["loss_img"].sum)


# ------------------------------------------------------------------------------------------ what is trained


def test_weights_of_0_are_measured_and_have_no_gradient():
    batch, inputs, nexts = batches()["tokens"]
    model = Model()
    for fused in (False, True):
        loss = MeaningfulLoss(VOCAB, BOOKS, weights={"image": 0.0}, sample_k=None, fused_head=fused)
        terms = run(loss, model, batch)
        expected, total = by_hand(model, inputs, nexts, {"loss_ce": 1.0, "loss_sca": 0.1})
        assert float(terms["loss_img"].sum) == pytest.approx(float(expected["loss_img"][0].detach()))
        assert (terms["loss_img"].weight, terms["loss_img"].sum.requires_grad) == (0.0, False)
        assert set(run(loss, model, batch, metrics=False)) == {"loss_ce", "loss_sca"} == set(loss.counts(batch))
        found = torch.autograd.grad(objective(terms), model.head.weight)[0]
        torch.testing.assert_close(found, torch.autograd.grad(total, model.head.weight)[0])


def test_without_cross_entropy_it_is_measured_in_evaluation():
    batch, inputs, nexts = batches()["tokens"]
    model = Model()
    loss = MeaningfulLoss(VOCAB, BOOKS, use_ce=False, sample_k=None)
    terms = run(loss, model, batch)
    assert set(terms) == {"loss_img", "loss_sca"}
    assert set(loss.counts(batch)) == {"loss_img", "loss_sca"}
    with torch.no_grad():
        terms = run(loss, model, batch)
    expected, _ = by_hand(model, inputs, nexts, {})
    assert set(terms) == set(expected)
    assert (terms["loss_ce"].weight, terms["accuracy"].weight) == (0.0, 0.0)
    assert float(terms["loss_ce"].sum) == pytest.approx(float(expected["loss_ce"][0].detach()))


def test_what_is_not_enabled_leaves_next_token_prediction():
    batch = batches()["tokens"][0]
    model = Model()
    plain = run(LanguageModelingLoss(), model, batch)
    for use_ce in (True, False):
        terms = run(MeaningfulLoss(VOCAB, BOOKS, enabled=False, use_ce=use_ce), model, batch)
        assert set(terms) == {"loss_ce", "accuracy"}
        assert terms["loss_ce"].weight == 1.0
        torch.testing.assert_close(terms["loss_ce"].sum, plain["loss"].sum)


def test_padding_does_not_count_and_missing_values_do():
    """PAD is learned by nothing; MISS is predicted like any token, and has no expected value."""
    model = Model()
    loss = MeaningfulLoss(VOCAB, BOOKS)
    for token, counted in ((VOCAB.pad_id, 0), (VOCAB.miss_id, 10)):
        terms = run(loss, model, {"tokens": torch.full((2, 6), token)})
        assert {name: float(term.count) for name, term in terms.items()} == {
            "loss_ce": counted,
            "accuracy": counted,
            "loss_img": 0,
            "loss_sca": 0,
        }
        grads = torch.autograd.grad(objective(terms), model.parameters())
        assert all(bool(grad.isfinite().all()) for grad in grads)
        assert any(bool(grad.any()) for grad in grads) == bool(counted)


@pytest.mark.parametrize("fused", [False, True])
def test_evaluation_looks_at_all_positions_and_draws_nothing(fused):
    batch, inputs, nexts = batches()["tokens"]
    model = Model()
    loss = MeaningfulLoss(VOCAB, BOOKS, sample_k=2, fused_head=fused)
    run(loss, model, batch)
    before = torch.get_rng_state()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            terms = run(loss, model, batch)
        for name, (value, count) in by_hand(model, inputs, nexts, {})[0].items():
            assert float(terms[name].sum) == pytest.approx(float(value.detach()), rel=1e-9)
            assert float(terms[name].count) == count
    assert torch.equal(torch.get_rng_state(), before)
    run(loss, model, batch)
    assert not torch.equal(torch.get_rng_state(), before)


def test_training_draws_k_positions_of_each_modality(monkeypatch):
    from etude.multimodal.loss import terms as combined

    seen = []
    usual = combined.choose_positions
    monkeypatch.setattr(combined, "choose_positions", lambda *arguments: seen.append(usual(*arguments)) or seen[-1])
    batch = batches()["tokens"][0]
    terms = run(MeaningfulLoss(VOCAB, BOOKS, sample_k=2), Model(), batch)
    assert [len(one.targets) for one in seen] == [2, 2]
    assert [float(terms[name].count) for name in ("loss_img", "loss_sca")] == [one.count for one in seen]
    assert min(one.count for one in seen) > 2


# ------------------------------------------------------------------------------------------ derived numbers


def test_derived_numbers():
    loss = MeaningfulLoss(VOCAB, BOOKS, weights={"image": 0.5}, weight=0.25, kind={"image": "huber", "scalar": "mse"})
    means = {"loss_ce": 2.0, "accuracy": 0.5, "loss_img": 3.0, "mse_img": 4.0, "loss_sca": 8.0}
    assert SupervisedTask(loss).summary(means) == {
        **means,
        "loss": 5.5,
        "loss_total": 5.5,
        "perplexity": pytest.approx(math.exp(2.0)),
        "rmse_img": 2.0,
        "rmse_sca": pytest.approx(8.0**0.5),
    }
    assert loss.derived({**means, "nll": 1.0})["perplexity"] == pytest.approx(math.e)
    assert loss.derived({"loss_ce": 2.0, "loss_sca": 8.0})["loss"] == 4.0
    assert loss.derived({**means, "mse_img": -1e-9})["rmse_img"] == 0.0
    alone = MeaningfulLoss(VOCAB, BOOKS, use_ce=False)
    assert alone.derived(means)["loss"] == pytest.approx(1.1)
    assert alone.derived(means)["perplexity"] == pytest.approx(math.exp(2.0))
    assert "perplexity" not in alone.derived({"loss_img": 3.0, "loss_sca": 8.0})
    assert "perplexity" not in MeaningfulLoss(VOCAB, BOOKS, label_smoothing=0.1).derived(means)


def test_metrics_judge_the_next_tokens():
    batch, inputs, nexts = batches()["tokens"]
    model = Model()
    loss = MeaningfulLoss(VOCAB, BOOKS)
    logits, labels = loss.judged(model(inputs), batch)
    assert torch.equal(logits, model(inputs))
    assert torch.equal(labels, nexts)


# ------------------------------------------------------------------------------------------ the output layer


def heads_applied(model):
    """How often the output layer is run in full."""
    runs = []
    model.head.register_forward_hook(lambda module, inputs, output: runs.append(output.shape[-1] == VOCAB.vocab_size))
    return runs


def test_a_model_that_names_its_head_is_run_without_it():
    batch = batches()["tokens"][0]
    model = Model()
    loss = MeaningfulLoss(VOCAB, BOOKS)
    call = SupervisedTask(loss)
    call(model, batch, metrics=False)
    runs = heads_applied(model)
    call(model, batch, metrics=False)
    assert runs == [False]
    runs.clear()
    run(MeaningfulLoss(VOCAB, BOOKS, fused_head=False), model, batch)
    assert runs == [True]


def test_a_model_that_does_not_name_its_head_is_run_as_it_is():
    batch, inputs, nexts = batches()["tokens"]
    model = Model(names_head=False)
    runs = heads_applied(model)
    terms = run(MeaningfulLoss(VOCAB, BOOKS, sample_k=None), model, batch)
    assert (runs, len(model.seen)) == ([True], 1)
    expected, _ = by_hand(model, inputs, nexts, {})
    assert float(terms["loss_img"].sum.detach()) == pytest.approx(float(expected["loss_img"][0].detach()))
    with pytest.raises(TrainingError, match="does not tell its output layer"):
        run(MeaningfulLoss(VOCAB, BOOKS, fused_head=True), model, batch)


@pytest.mark.parametrize("kind", [Capped, FixedLength])
def test_a_model_that_cannot_do_without_its_head_is_run_as_it_is(kind):
    """Where nobody asked for the fused head there is no error; who asks gets one."""
    batch, inputs, _ = batches()["tokens"]
    model = kind()
    loss = MeaningfulLoss(VOCAB, BOOKS, sample_k=None)
    terms = run(loss, model, batch)
    expected = loss.terms(model(inputs), batch, metrics=True)
    for name, term in expected.items():
        torch.testing.assert_close(terms[name].sum, term.sum)
    before = len(model.seen)
    SupervisedTask(loss)(model, batch, metrics=True)
    assert len(model.seen) == before + 1  # tried once
    with pytest.raises((TrainingError, RuntimeError)):
        run(MeaningfulLoss(VOCAB, BOOKS, fused_head=True), model, batch)


def test_models_in_turn():
    """A model that can, one that cannot, and the first again: each is run in its own way."""
    batch, inputs, _ = batches()["tokens"]
    loss = MeaningfulLoss(VOCAB, BOOKS, sample_k=None)
    task = SupervisedTask(loss)
    models = [Model(0), Capped(1), Model(2), Model(0, names_head=False)]
    for model in (*models, *models):
        terms = task(model, batch, metrics=True)
        expected = MeaningfulLoss(VOCAB, BOOKS, sample_k=None, fused_head=False).terms(
            model(inputs), batch, metrics=True
        )
        for name, term in expected.items():
            torch.testing.assert_close(terms[name].sum.double(), term.sum.double())
        torch.autograd.grad(objective(terms), model.head.weight)


def test_a_model_that_leaves_its_head_to_the_loss_and_other_outputs():
    batch, inputs, _ = batches()["tokens"]
    model = Model()
    hidden = torch.tanh(model.embedding(inputs))
    loss = MeaningfulLoss(VOCAB, BOOKS, sample_k=None)
    expected = loss.terms(model(inputs), batch, metrics=True)
    head = HeadOutput(hidden, model.head.weight, model.head.bias)
    for output in (head, {"logits": head}, (head,), {"logits": head.logits}, (head.logits, torch.tensor(1.0))):
        for name, term in loss.terms(output, batch, metrics=True).items():
            torch.testing.assert_close(term.sum.double(), expected[name].sum.double())


def test_the_check_of_the_head_leaves_no_trace():
    batch = batches()["tokens"][0]
    model = Model()
    model.train()
    before = torch.get_rng_state()
    run(MeaningfulLoss(VOCAB, BOOKS, sample_k=None), model, batch)
    assert model.training
    assert "forward" not in vars(model.head)
    assert torch.equal(torch.get_rng_state(), before)


def test_wrapped_models_are_the_same_model(monkeypatch):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self._orig_mod = module

        def forward(self, tokens):
            return self._orig_mod(tokens)

    checks = []
    usual = FusedHead.check
    monkeypatch.setattr(FusedHead, "check", lambda self, *arguments: checks.append(self) or usual(self, *arguments))
    batch = batches()["tokens"][0]
    model = Model()
    loss = MeaningfulLoss(VOCAB, BOOKS, sample_k=None)
    first = run(loss, model, batch)
    second = run(loss, Wrapper(model), batch)
    assert len(checks) == 1
    assert {name: float(term.sum.detach()) for name, term in first.items()} == {
        name: float(term.sum.detach()) for name, term in second.items()
    }


def test_the_transformer_over_tokens_and_types():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "n_layers": 1, "n_heads": 2, "max_len": 32}
    model = CausalTransformerLM(VOCAB.vocab_size, VOCAB.num_types, dropout=0.0, **sizes)
    batch = batches()["tokens, mask"][0]
    losses = {}
    for fused in (None, True, False):
        loss = MeaningfulLoss(VOCAB, BOOKS, sample_k=None, fused_head=fused)
        terms = run(loss, model, batch)
        losses[fused] = [objective(terms), *torch.autograd.grad(objective(terms), model.parameters())]
    for mine in (losses[None], losses[True]):
        for one, other in zip(mine, losses[False], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_strategy_can_be_copied():
    batch = batches()["tokens"][0]
    loss = MeaningfulLoss(VOCAB, BOOKS, sample_k=None, fused_head=False)
    model = Model()
    expected = run(loss, model, batch)
    found = run(copy.deepcopy(loss), model, batch)
    assert all(torch.equal(found[name].sum, term.sum) for name, term in expected.items())


# ------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": {"imag": 1.0}}, ConfigError, "a weight is given for the modality 'imag', .* mean 'image'"),
        ({"weights": {"image": -1.0}}, ConfigError, "weight of the modality 'image' is -1.0"),
        ({"weight": float("nan")}, ConfigError, "weight of the modality 'image' is nan"),
        ({"sample_k": 0}, ConfigError, "sample_k is 0"),
        ({"kind": "mae"}, ConfigError, "no kind of loss 'mae'"),
        ({"kind": {"spectrum": "mse"}}, ConfigError, "a kind of loss is given for the modality 'spectrum'"),
        ({"edges": {"spectrum": SCALAR}}, ConfigError, "edges is given for the modality 'spectrum'"),
        ({"kind": "hl_gauss", "edges": {"scalar": SCALAR}}, DataError, "'scalar' .* 5 bins have 6 edges"),
        ({"use_ce": False, "weight": 0.0}, TrainingError, "nothing to learn from"),
        ({"ignore_index": VOCAB.base_scalar + 2}, ConfigError, "ignore_index 14 is a token of the modality 'scalar'"),
    ],
)
def test_mistakes_are_told_in_one_line(options, error, message):
    with pytest.raises(error, match=message) as found:
        MeaningfulLoss(VOCAB, BOOKS, **options)
    assert "\n" not in str(found.value)


def test_codebooks_that_do_not_fit():
    with pytest.raises(ConfigError, match="a codebook is given for the modality 'spectrum'"):
        MeaningfulLoss(VOCAB, {"spectrum": SCALAR})
    with pytest.raises(DataError, match="'scalar' does not fit: there are 4 values for its 5 tokens"):
        MeaningfulLoss(VOCAB, {"scalar": SCALAR[:4]})
    with pytest.raises(TrainingError, match="nothing to learn from"):
        MeaningfulLoss(VOCAB, {}, use_ce=False)
    MeaningfulLoss(VOCAB, {"scalar": SCALAR[:4]}, enabled=False)  # not looked at


def test_outputs_that_do_not_fit():
    loss = MeaningfulLoss(VOCAB, BOOKS)
    tokens = tokens_of()
    with pytest.raises(TrainingError, match=r"found logits \(4, 21, 20\) and labels \(4, 20\)"):
        loss.terms(torch.zeros(4, 21, 20), {"tokens": tokens}, metrics=False)
    with pytest.raises(TrainingError, match=r"found logits \(4, 20\) and labels"):
        loss.terms(torch.zeros(4, 20), {"tokens": tokens}, metrics=False)
    with pytest.raises(
        TrainingError, match="vocabulary has 20 tokens, the model's output only 19; give the model vocab"
    ):
        loss.terms(torch.zeros(4, 20, 19), {"tokens": tokens}, metrics=False)
    with pytest.raises(TrainingError, match="needs integer labels"):
        loss.terms(torch.zeros(4, 20, 20), {"tokens": tokens.float()}, metrics=False)


def test_a_modality_without_positions_has_no_part_in_the_total():
    loss = MeaningfulLoss(VOCAB, BOOKS, weights={"image": 0.5, "scalar": 2.0})
    means = {"loss_ce": 1.0, "loss_img": float("nan"), "loss_sca": 0.25}
    numbers = loss.derived(means)
    assert numbers["loss"] == numbers["loss_total"] == 1.5
    assert numbers["rmse_img"] != numbers["rmse_img"]
    nothing = loss.derived(dict.fromkeys(means, float("nan")))
    assert nothing["loss"] != nothing["loss"]


def test_what_is_only_measured_computes_no_gradients_and_spoils_none(monkeypatch):
    from etude.multimodal.loss import fused

    wanted = []
    usual = fused.chunked_expectation
    monkeypatch.setattr(
        fused, "chunked_expectation", lambda problem: wanted.append(problem.want_weight) or usual(problem)
    )
    huge = {"image": BOOKS["image"].float() * 1e25, "scalar": BOOKS["scalar"]}
    loss = MeaningfulLoss(VOCAB, huge, weights={"image": 0.0, "scalar": 1.0}, fused_head=True)
    model = Model()
    terms = run(loss, model, batches()["tokens"][0], metrics=True)
    assert sorted(wanted) == [False, True]
    assert terms["loss_img"].weight == 0.0
    assert not terms["loss_img"].sum.requires_grad
    torch.stack([term.sum * term.weight for term in terms.values() if term.weight]).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


def test_a_weight_or_a_kind_needs_a_codebook(caplog):
    only = {"image": BOOKS["image"]}
    with pytest.raises(ConfigError, match="'scalar' has a weight and no codebook"):
        MeaningfulLoss(VOCAB, only, weights={"scalar": 0.5})
    with pytest.raises(ConfigError, match="'scalar' has a kind and no codebook"):
        MeaningfulLoss(VOCAB, only, kind={"scalar": "huber"})
    MeaningfulLoss(VOCAB, only, weights={"scalar": 0.0})
    MeaningfulLoss(VOCAB, only, weights={"scalar": 0.5}, enabled=False)
    assert not caplog.records
    MeaningfulLoss(VOCAB, {})
    assert "cross entropy alone" in caplog.text


def test_ids_beyond_the_vocabulary_are_told_though_the_output_has_room_for_them():
    batch = {"tokens": torch.full((2, 6), 3)}
    batch["tokens"][1, 4] = VOCAB.vocab_size
    wide = torch.zeros(2, 5, VOCAB.vocab_size + 50)
    with pytest.raises(
        DataError, match=f"token {VOCAB.vocab_size}, but the vocabulary has {VOCAB.vocab_size} tokens"
    ):
        MeaningfulLoss(VOCAB, BOOKS).terms(wide, batch, metrics=False)


class Meddles(Model):
    """A model that changes its logits in a way that small ones in eval mode do not show."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def after(self, logits):
        if self.way == "clamp":
            return logits.clamp(-1000, 1000)
        return logits / 4 if self.training else logits


@pytest.mark.parametrize("way", ["clamp", "training"])
def test_a_model_that_changes_its_logits_at_times_keeps_its_output_layer(way):
    torch.manual_seed(0)
    batch = batches()["tokens"][0]
    model = Meddles(way).train()
    with pytest.raises(TrainingError, match="it changes what its output layer returns"):
        run(MeaningfulLoss(VOCAB, BOOKS, fused_head=True), model, batch)
    loss = MeaningfulLoss(VOCAB, BOOKS)
    expected = run(MeaningfulLoss(VOCAB, BOOKS, fused_head=False), model, batch)["loss_ce"].sum
    assert torch.equal(run(loss, model, batch)["loss_ce"].sum, expected)
    assert loss.fused_head is False
    assert model.training


def test_looking_at_a_model_leaves_its_buffers_as_they_are():
    model = Model().train()
    model.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
    usual = model.before
    model.before = lambda tokens: model.norm(usual(tokens).transpose(1, 2)).transpose(1, 2)
    tokens = batches()["tokens"][0]["tokens"][:, :-1]
    before = copy.deepcopy(dict(model.named_buffers()))
    FusedHead(model).check(lambda one, batch: one(batch["tokens"]), {"tokens": tokens})
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
