"""Models that leave their output layer to the loss, by themselves or made to: the same numbers as with logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etude import Trainer
from etude.config.registry import lookup
from etude.core import HeadOutput
from etude.core.errors import TrainingError
from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import (
    ClassificationLoss,
    LanguageModelingLoss,
    MaskedLanguageModelingLoss,
    SupervisedTask,
    logits_of,
    mean_of,
)
from etude.losses.strategies import head_of, shape_of

V, D, B, L = 37, 8, 3, 20


class Model(nn.Module):
    """A small model that can do to its logits what real ones do."""

    def __init__(self, after=None, tied=False, dropout=0.0, own_head=False, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(V, D)
        self.mix = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Dropout(dropout), nn.LayerNorm(D))
        self.lm_head = nn.Linear(D, V, bias=bias)
        if tied:
            self.lm_head.weight = self.embed.weight
        self.after, self.own_head = after, own_head

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids):
        hidden = self.mix(self.embed(input_ids).cumsum(1))
        if self.own_head:
            return HeadOutput(hidden, self.lm_head.weight, self.lm_head.bias)
        logits = self.lm_head(hidden)
        return logits if self.after is None else self.after(logits)


def make_batch(seed=0):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(V, (B, L), generator=g)
    labels[torch.rand(B, L, generator=g) < 0.3] = -100
    return {"input_ids": torch.randint(V, (B, L), generator=g), "labels": labels}


def gradients(model, loss, batch, **options):
    terms = SupervisedTask(loss)(model, batch, metrics=True, **options)
    parameters = list(model.parameters())
    return terms, torch.autograd.grad(mean_of(terms["loss"]), parameters, allow_unused=True)


def assert_same(mine, theirs, **tolerance):
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def assert_equal_terms(mine, theirs, **tolerance):
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(float(mine[name].sum.detach()), float(theirs[name].sum.detach()), **tolerance)
        assert float(mine[name].count) == float(theirs[name].count)
        assert type(mine[name].count) is type(theirs[name].count)
        assert mine[name].weight == theirs[name].weight


CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture
def heads_seen(monkeypatch):
    """The heads that the loss was given; without any, a test of the fused path proves nothing."""
    seen = []
    original = LanguageModelingLoss._head_terms

    def note(self, head, targets, metrics):
        seen.append(head)
        return original(self, head, targets, metrics)

    monkeypatch.setattr(LanguageModelingLoss, "_head_terms", note)
    return seen


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("how", ["own head", "fused", "by name"])
@pytest.mark.parametrize("labels", ["given", "next token", "inputs", "tokens"])
def test_same_terms_and_gradients_as_with_logits(how, tied, smoothing, labels, heads_seen):
    batch = make_batch()
    shift = None
    if labels == "next token":
        shift = True
    elif labels == "inputs":
        del batch["labels"]
    elif labels == "tokens":
        batch = {"tokens": batch["input_ids"]}
    plain = Model(tied=tied)
    expected, theirs = gradients(plain, LanguageModelingLoss(shift, label_smoothing=smoothing), batch)
    assert not heads_seen
    fused_head = {"own head": False, "fused": True, "by name": "lm_head"}[how]
    loss = LanguageModelingLoss(shift, label_smoothing=smoothing, fused_head=fused_head)
    found, mine = gradients(Model(tied=tied, own_head=how == "own head"), loss, batch)
    assert len(heads_seen) == 1
    assert_equal_terms(found, expected, **CLOSE)
    assert ("nll" in found) == (smoothing > 0)
    assert_same(mine, theirs, **CLOSE)


def test_the_loss_without_smoothing_is_reported():
    batch, model = make_batch(), Model()
    smooth = SupervisedTask(LanguageModelingLoss(False, label_smoothing=0.3))(model, batch, metrics=True)
    plain = SupervisedTask(LanguageModelingLoss(False))(model, batch, metrics=True)
    torch.testing.assert_close(smooth["nll"].sum, plain["loss"].sum.detach())
    assert smooth["nll"].weight == 0
    assert not smooth["nll"].sum.requires_grad
    assert smooth["loss"].sum > smooth["nll"].sum
    without = SupervisedTask(LanguageModelingLoss(False, label_smoothing=0.3))(model, batch, metrics=False)
    assert set(without) == {"loss"}


def test_other_losses_read_the_logits_of_a_head():
    hidden, weight, bias = torch.randn(4, D), torch.randn(V, D), torch.randn(V)
    labels = torch.randint(V, (4,))
    output = HeadOutput(hidden, weight, bias, softcap=2.0)
    logits = 2.0 * torch.tanh((hidden @ weight.T + bias) / 2.0)
    torch.testing.assert_close(output.logits, logits)
    assert output.shape == logits.shape
    for form in (output, {"logits": output}, (output, torch.tensor(0.5)), (torch.tensor(0.5), output)):
        assert head_of(form) is output
        assert shape_of(form) == logits.shape
        torch.testing.assert_close(logits_of(form), logits)
    found = ClassificationLoss().terms(output, (hidden, labels), metrics=False)["loss"].sum
    torch.testing.assert_close(found, F.cross_entropy(logits, labels, reduction="sum"))
    assert head_of(logits) is None
    assert head_of({"logits": logits}) is None


def test_a_head_is_inferred_as_language_modelling_without_its_logits(heads_seen, monkeypatch):
    monkeypatch.setattr(HeadOutput, "logits", property(lambda _: pytest.fail("all logits were computed")))
    task = SupervisedTask()
    task(Model(own_head=True), make_batch(), metrics=True)
    assert isinstance(task.strategy.chosen, LanguageModelingLoss)
    assert len(heads_seen) == 1


def test_the_softcap_of_a_head_is_used():
    hidden, weight = torch.randn(B, L, D), 3 * torch.randn(V, D)
    batch = {"input_ids": torch.zeros(B, L, dtype=torch.int64), "labels": torch.randint(V, (B, L))}
    head = HeadOutput(hidden, weight, softcap=1.5)
    found = LanguageModelingLoss(False).compute_loss(head, batch)
    torch.testing.assert_close(found, LanguageModelingLoss(False).compute_loss(head.logits, batch))


def with_own_loss(logits):
    """As models do that are given labels: fails if there are fewer columns than classes."""
    F.cross_entropy(logits.flatten(0, 1), torch.full((logits.shape[:2].numel(),), V - 1))
    return logits


UNFIT = {
    "factor": (lambda logits: logits * 1.01, "changes what its output layer returns"),
    "soft cap": (lambda logits: 30 * torch.tanh(logits / 30), "changes what its output layer returns"),
    "positions": (lambda logits: logits[:, 1:], "changes what its output layer returns"),
    "vocabulary": (lambda logits: logits[..., : V - 2], "changes what its output layer returns"),
    "own loss": (with_own_loss, "fails with IndexError"),
}


@pytest.mark.parametrize("kind", UNFIT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_changes_its_logits_is_refused(kind, dtype):
    after, message = UNFIT[kind]
    model = Model(after)
    with (
        pytest.raises(TrainingError, match=rf"^fused_head cannot be used.* {message}.*set fused_head: false$"),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16),
    ):
        SupervisedTask(LanguageModelingLoss(fused_head=True))(model, make_batch(), metrics=False)
    assert model.lm_head(torch.zeros(1, D)).shape == (1, V)  # put back


def test_a_head_that_runs_twice_is_refused():
    class Twice(Model):
        def forward(self, input_ids):
            return super().forward(input_ids) + 0 * super().forward(input_ids)

    with pytest.raises(TrainingError, match="2 times"):
        SupervisedTask(LanguageModelingLoss(fused_head=True))(Twice(), make_batch(), metrics=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_model_that_makes_float32_of_its_logits_is_fine(dtype, heads_seen):
    plain, fused = (Model(lambda logits: logits.float()).to(dtype) for _ in range(2))
    batch = make_batch()
    expected, theirs = gradients(plain, LanguageModelingLoss(), batch)
    found, mine = gradients(fused, LanguageModelingLoss(fused_head=True), batch)
    assert heads_seen
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else CLOSE
    torch.testing.assert_close(found["loss"].sum.float(), expected["loss"].sum, **tolerance)
    assert_same(mine, theirs, **tolerance)


def test_hooks_that_change_the_head_are_noticed():
    model = Model()
    model.lm_head.register_forward_hook(lambda _, __, output: output * 2)
    with pytest.raises(TrainingError, match="changes what its output layer returns"):
        SupervisedTask(LanguageModelingLoss(fused_head=True))(model, make_batch(), metrics=False)


def test_a_head_with_another_forward_is_refused():
    model = Model()
    model.lm_head.forward = lambda hidden: 2 * F.linear(hidden, model.lm_head.weight)
    with pytest.raises(TrainingError, match="fused_head"):
        SupervisedTask(LanguageModelingLoss(fused_head="lm_head"))(model, make_batch(), metrics=False)


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        (
            nn.Sequential(nn.Embedding(V, D), nn.Linear(D, V)),
            True,
            "Sequential does not report .* linear layers are 1",
        ),
        (Model(), "head", "module 'head' of Model does not exist; .* are mix.0, lm_head"),
        (Model(), "embed", "module 'embed' of Model is a Embedding"),
        (nn.Embedding(V, V), True, "it has no linear layers"),
    ],
)
def test_a_head_that_is_not_found(model, name, message):
    with pytest.raises(TrainingError, match=message):
        SupervisedTask(LanguageModelingLoss(fused_head=name))(model, make_batch(), metrics=False)


def test_looking_at_the_first_batch_leaves_no_trace():
    """Neither in random numbers nor in modes, nor in what the model is outside of the step."""
    model, batch = Model(dropout=0.5), make_batch()
    model.mix[2].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    SupervisedTask(LanguageModelingLoss(fused_head=True))(model, batch, metrics=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert model(batch["input_ids"]).shape == (B, L, V)
    assert "forward" not in model.lm_head.__dict__
    assert all(param.grad is None for param in model.parameters())


def test_a_model_that_draws_random_numbers_in_any_mode_draws_them_once():
    states = []
    for fused in (False, True):
        torch.manual_seed(5)
        model = Model(lambda logits: logits if torch.rand(3).sum() > 0 else None)
        SupervisedTask(LanguageModelingLoss(fused_head=fused))(model, make_batch(), metrics=False)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_the_head_is_put_back_after_an_error():
    model = Model()
    task = SupervisedTask(LanguageModelingLoss(fused_head=True))
    task(model, make_batch(), metrics=False)
    model.after = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        task(model, make_batch(), metrics=False)
    model.after = None
    assert model(make_batch()["input_ids"]).shape == (B, L, V)


def run_steps(loss, *, precision="fp32", parts=1, compiled=False, steps=3, **options):
    model = Model(**options)
    if compiled:
        torch._dynamo.reset()
        model.compile(backend="eager")
    updater = Updater(torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=1.0)
    step = Step(model, SupervisedTask(loss), updater, MixedPrecision(precision), metrics=True)
    values = []
    for seed in range(steps):
        batch = make_batch(seed)
        batches = [{k: v[i::parts] for k, v in batch.items()} for i in range(parts)]
        report = step(batches)
        values.append(float(report.sums["loss"]))
    return model, values


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch.compile does it itself
@pytest.mark.parametrize("case", ["plain", "accumulated", "bf16", "compiled", "tied", "compiled own head"])
def test_steps_with_and_without(case, heads_seen):
    options = {
        "plain": {},
        "accumulated": {"parts": 3},
        "bf16": {"precision": "bf16"},
        "compiled": {"compiled": True},
        "tied": {"tied": True, "bias": False},
        "compiled own head": {"compiled": True},
    }[case]
    own = "own head" in case
    expected, theirs = run_steps(LanguageModelingLoss(), **options)
    assert not heads_seen
    found, mine = run_steps(LanguageModelingLoss(fused_head=not own), own_head=own, **options)
    assert len(heads_seen) == 3 * options.get("parts", 1)
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if case == "bf16" else CLOSE
    assert mine == pytest.approx(theirs, rel=tolerance["rtol"])
    assert_same(found.parameters(), expected.parameters(), **tolerance)
    if not own:
        assert found(make_batch()["input_ids"]).shape == (
            B,
            L,
            V,
        )  # a compiled model, too, is whole outside of a step


def test_the_trainer_trains_and_evaluates_with_it(heads_seen):
    batches = [make_batch(seed) for seed in range(4)]
    results = []
    for fused in (False, True):
        loss = LanguageModelingLoss(fused_head=fused, label_smoothing=0.1)
        config = {"epochs": 2, "learning_rate": 0.01, "device": "cpu"}
        trainer = Trainer(Model(), batches, batches, loss=loss, config=config, progress=False)
        trainer.train()
        results.append(trainer.evaluate())
        assert bool(heads_seen) == fused
    assert set(results[0]) >= {"loss", "accuracy", "nll"}
    assert results[1] == pytest.approx(results[0], rel=1e-4)


def test_masked_language_modelling_counts_masked_positions_alone():
    batch = make_batch()
    counted = batch["labels"] != -100
    for fused in (False, True):
        model = Model()
        terms = SupervisedTask(MaskedLanguageModelingLoss(fused_head=fused))(model, batch, metrics=True)
        logits = model(batch["input_ids"])[counted]
        expected = F.cross_entropy(logits, batch["labels"][counted], reduction="sum")
        torch.testing.assert_close(terms["loss"].sum, expected)
        assert int(terms["loss"].count) == int(terms["accuracy"].count) == int(counted.sum())
        assert int(terms["accuracy"].sum) == int((logits.argmax(-1) == batch["labels"][counted]).sum())


def test_masked_language_modelling_never_shifts_and_needs_labels():
    ids = torch.randint(V, (B, L))
    model = Model()
    terms = SupervisedTask(MaskedLanguageModelingLoss())(model, {"input_ids": ids, "labels": ids}, metrics=False)
    torch.testing.assert_close(
        terms["loss"].sum, F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="sum")
    )
    for batch in ({"input_ids": ids}, {"tokens": ids}):
        with pytest.raises(TrainingError, match="masked language modelling needs labels"):
            SupervisedTask(MaskedLanguageModelingLoss())(model, batch, metrics=False)


def test_names_in_a_config():
    assert lookup("loss", "masked_language_modeling").factory is MaskedLanguageModelingLoss


transformers = pytest.importorskip("transformers")
TINY = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def hugging_face(kind):
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=V, n_positions=32, n_embd=16, n_layer=1, n_head=2)
        return transformers.GPT2LMHeadModel(config)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, num_key_value_heads=2))
    if kind == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**TINY))
    if kind == "gemma2":
        config = transformers.Gemma2Config(**TINY, num_key_value_heads=2, head_dim=8, final_logit_softcapping=30.0)
        return transformers.Gemma2ForCausalLM(config)
    if kind == "cohere":
        return transformers.CohereForCausalLM(transformers.CohereConfig(**TINY, logit_scale=0.0625))
    config = transformers.T5Config(vocab_size=V, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_models_of_hugging_face_unchanged(kind, heads_seen):
    model, batch = hugging_face(kind).eval(), make_batch()
    batch["attention_mask"] = torch.ones(B, L, dtype=torch.int64)
    loss = {"fused_head": True, "shift": kind != "bert"}
    expected, theirs = gradients(model, LanguageModelingLoss(loss["shift"]), batch)
    found, mine = gradients(model, LanguageModelingLoss(**loss), batch)
    assert len(heads_seen) == 1
    assert_equal_terms(found, expected, **CLOSE)
    for one, other in zip(mine, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("kind", ["gemma2", "cohere", "t5"])
def test_models_of_hugging_face_that_do_more_with_their_logits_are_refused(kind):
    with pytest.raises(TrainingError, match="fused_head cannot be used with this model"):
        SupervisedTask(LanguageModelingLoss(fused_head=True))(hugging_face(kind), make_batch(), metrics=False)
