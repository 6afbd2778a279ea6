"""The meaningful loss and the model's output layer: run without it where that is the same, as it is elsewhere."""

import copy

import pytest
import torch
from loss_strategy_parts import BOOKS, VOCAB, WIDTH, Model, batches, by_hand, objective, run
from torch import nn

from etude.core import HeadOutput, TrainingError
from etude.losses import SupervisedTask
from etude.losses.fused_head import FusedHead
from etude.models import CausalTransformerLM
from etude.multimodal.loss import MeaningfulLoss


class Capped(Model):
    """Changes its logits after the output layer."""

    def after(self, logits):
        return 0.5 * logits


class FixedLength(Model):
    """Cannot run on a part of a batch."""

    def before(self, tokens):
        return super().before(tokens) + torch.zeros(20, WIDTH, dtype=torch.float64)


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
    with pytest.raises(TrainingError, match="does not report its output layer"):
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
