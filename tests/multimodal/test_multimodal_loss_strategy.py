"""The meaningful loss as a strategy: its terms, counts and derived numbers for batches of every form."""

import copy
import math

import pytest
import torch
from loss_strategy_parts import BOOKS, VOCAB, Model, batches, by_hand, objective, run, tokens_of

from etude.losses import LanguageModelingLoss, SupervisedTask
from etude.multimodal.loss import MeaningfulLoss


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


def test_a_strategy_can_be_copied():
    batch = batches()["tokens"][0]
    loss = MeaningfulLoss(VOCAB, BOOKS, sample_k=None, fused_head=False)
    model = Model()
    expected = run(loss, model, batch)
    found = run(copy.deepcopy(loss), model, batch)
    assert all(torch.equal(found[name].sum, term.sum) for name, term in expected.items())


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
