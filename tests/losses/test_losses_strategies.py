"""Every strategy against the plain formula in float64; micro-batches add up; masks, shifts and counts ahead."""

import pytest
import torch
import torch.nn.functional as F

from etude.config import lookup
from etude.core import DataBatch
from etude.core.errors import DataError, TrainingError
from etude.core.task import LossTerm
from etude.losses import (
    ClassificationLoss,
    LanguageModelingLoss,
    LossStrategy,
    SegmentationLoss,
    TextClassificationLoss,
    VisionClassificationLoss,
    as_strategy,
)

B, L, V = 3, 7, 11


def next_token_reference(logits, ids, counted):
    """Σ −log p(ids[t+1] | t) over the counted targets, token by token in float64."""
    log_probs = torch.log_softmax(logits.detach().double(), -1)
    total, count, right = 0.0, 0, 0
    for row in range(ids.shape[0]):
        for t in range(ids.shape[1] - 1):
            if counted[row, t + 1]:
                total -= log_probs[row, t, ids[row, t + 1]].item()
                right += int(logits[row, t].argmax() == ids[row, t + 1])
                count += 1
    return total, count, right


@pytest.fixture
def text():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, V, (B, L), generator=generator)
    logits = torch.randn(B, L, V, generator=generator, requires_grad=True)
    lengths = torch.tensor([7, 4, 1])
    mask = (torch.arange(L) < lengths[:, None]).long()
    return ids, logits, mask


def check(strategy, output, batch, expected):
    total, count, right = expected
    terms = strategy.terms(output, batch, metrics=True)
    assert terms["loss"].sum.item() == pytest.approx(total, rel=1e-6)
    assert float(terms["loss"].count) == float(terms["accuracy"].count) == count
    assert float(terms["accuracy"].sum) == right
    assert terms["loss"].weight == 1.0
    assert terms["accuracy"].weight == 0.0
    assert list(strategy.terms(output, batch, metrics=False)) == ["loss"]
    assert strategy.compute_loss(output, batch).item() == pytest.approx(total / count, rel=1e-6)


class TestLanguageModeling:
    def test_the_inputs_are_the_labels_where_there_are_none(self, text):
        ids, logits, _ = text
        expected = next_token_reference(logits, ids, torch.ones(B, L))
        for batch in (ids, (ids,), {"input_ids": ids}, DataBatch(ids, None), ids.int()):
            check(LanguageModelingLoss(), logits, batch, expected)
            assert LanguageModelingLoss().terms(logits, batch, metrics=False)["loss"].count == B * (L - 1)

    def test_padding_by_the_attention_mask_does_not_count(self, text):
        ids, logits, mask = text
        for given in (mask, mask.bool(), mask.float()):
            batch = {"input_ids": ids, "attention_mask": given}
            check(LanguageModelingLoss(), logits, batch, next_token_reference(logits, ids, mask))

    def test_ignored_labels_do_not_count(self, text):
        ids, logits, mask = text
        labels = ids.masked_fill(mask == 0, -100)
        expected = next_token_reference(logits, ids, mask)
        check(LanguageModelingLoss(), logits, {"input_ids": ids, "labels": labels}, expected)
        check(LanguageModelingLoss(), logits, (ids, labels), expected)
        labels = ids.masked_fill(mask == 0, 0)
        check(LanguageModelingLoss(ignore_index=0), logits, (ids, labels), expected)

    def test_own_input_ids_equal_to_the_ignored_index_do_not_count(self, text):
        ids, logits, mask = text
        padded = ids * mask
        check(LanguageModelingLoss(ignore_index=0), logits, padded, next_token_reference(logits, ids, mask))

    def test_a_next_token_batch_is_not_shifted_again(self, text):
        ids, logits, mask = text
        short = logits[:, :-1]
        batch = {"tokens": ids, "types": ids, "attn_mask": mask}
        check(LanguageModelingLoss(), short, batch, next_token_reference(logits, ids, mask))
        check(LanguageModelingLoss(), short, {"tokens": ids}, next_token_reference(logits, ids, torch.ones(B, L)))

    def test_without_shift_labels_line_up_with_the_logits(self, text):
        ids, logits, _ = text
        ready = F.pad(ids[:, 1:], (0, 1), value=-100)
        expected = next_token_reference(logits, ids, torch.ones(B, L))
        check(LanguageModelingLoss(shift=False), logits, (ids, ready), expected)

    def test_the_first_batch_tells_whether_labels_line_up(self, text):
        ids, logits, mask = text
        ready = F.pad(ids[:, 1:], (0, 1), value=-100)
        expected = next_token_reference(logits, ids, torch.ones(B, L))
        loss = LanguageModelingLoss()
        check(loss, logits, (ids, ready), expected)
        assert loss.shift is False
        assert LanguageModelingLoss(shift=True).terms(logits, (ids, ready), metrics=False)["loss"].count == B * (
            L - 2
        )
        loss = LanguageModelingLoss()
        empty = loss.terms(logits[:0], (ids[:0], ids[:0]), metrics=False)[
            "loss"
        ]  # a rank without samples learns nothing
        assert float(empty.count) == 0
        assert loss.shift is None
        check(
            loss,
            logits,
            {"input_ids": ids, "attention_mask": mask, "labels": ids},
            next_token_reference(logits, ids, mask),
        )
        assert loss.shift is True

    @pytest.mark.parametrize("first", ["nothing to predict", "one token each", "equal tokens"])
    @pytest.mark.parametrize("named", [True, False])
    def test_a_batch_that_does_not_tell_decides_nothing(self, text, first, named):
        ids, logits, _ = text
        ready = F.pad(ids[:, 1:], (0, 1), value=-100)
        silent = {
            "nothing to predict": (ids, torch.full_like(ids, -100)),
            "one token each": (ids[:, :1], torch.full_like(ids[:, :1], -100)),
            "equal tokens": (torch.full_like(ids, 3), F.pad(torch.full_like(ids[:, 1:], 3), (0, 1), value=-100)),
        }[first]
        for labels, expected in ((ready, False), (ids, True)):
            loss = LanguageModelingLoss() if named else as_strategy(None)
            loss.terms(logits[:, : silent[0].shape[1]], silent, metrics=False)
            check(loss, logits, (ids, labels), next_token_reference(logits, ids, torch.ones(B, L)))
            assert (loss if named else loss.chosen).shift is expected

    def test_the_mask_of_an_encoder_is_not_that_of_the_labels(self, text):
        ids, logits, mask = text
        output = {"logits": logits, "encoder_last_hidden_state": torch.zeros(B, L, 4)}
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
        term = LanguageModelingLoss(shift=False).terms(output, batch, metrics=False)["loss"]
        assert float(term.count) == B * L

    def test_label_smoothing_equals_torchs(self, text):
        ids, logits, mask = text
        labels = ids.masked_fill(mask == 0, -100)
        expected = F.cross_entropy(
            logits[:, :-1].reshape(-1, V).double(), labels[:, 1:].reshape(-1), reduction="sum", label_smoothing=0.1
        )
        term = LanguageModelingLoss(label_smoothing=0.1).terms(logits, (ids, labels), metrics=False)["loss"]
        assert term.sum.item() == pytest.approx(expected.item(), rel=1e-6)
        assert int(term.count) == int((labels[:, 1:] != -100).sum())

    def test_the_last_logit_has_no_gradient(self, text):
        ids, logits, _ = text
        (gradient,) = torch.autograd.grad(LanguageModelingLoss().compute_loss(logits, ids), logits)
        assert gradient[:, -1].eq(0).all()
        assert gradient[:, :-1].ne(0).all()

    def test_counts_ahead_equal_the_counts(self, text):
        ids, logits, mask = text
        for batch in (ids, {"input_ids": ids, "attention_mask": mask}, (ids, ids.masked_fill(mask == 0, -100))):
            strategy = LanguageModelingLoss()
            terms = strategy.terms(logits, batch, metrics=False)
            assert float(strategy.counts(batch)["loss"]) == float(terms["loss"].count)

    def test_micro_batches_add_up_to_the_batch(self, text):
        ids, logits, mask = text
        strategy = LanguageModelingLoss()
        whole = strategy.terms(logits, {"input_ids": ids, "attention_mask": mask}, metrics=True)
        parts = [
            strategy.terms(
                logits[i, None], {"input_ids": ids[i, None], "attention_mask": mask[i, None]}, metrics=True
            )
            for i in range(B)
        ]
        for name in ("loss", "accuracy"):
            assert sum(p[name].sum.item() for p in parts) == pytest.approx(whole[name].sum.item(), rel=1e-6)
            assert sum(float(p[name].count) for p in parts) == float(whole[name].count)
        big = torch.autograd.grad(whole["loss"].sum / whole["loss"].count, logits)[0]
        total = sum(part["loss"].sum for part in parts) / whole["loss"].count
        torch.testing.assert_close(torch.autograd.grad(total, logits)[0], big)

    def test_what_does_not_fit_is_named(self, text):
        ids, logits, mask = text
        with pytest.raises(TrainingError, match=r"found logits \(3, 6, 11\) and labels \(3, 7\)"):
            LanguageModelingLoss().terms(logits[:, :-1], ids, metrics=False)
        with pytest.raises(TrainingError, match=r"integer labels \(batch, length\), found torch.float32 \(3, 7\)"):
            LanguageModelingLoss().terms(logits, ids.float(), metrics=False)
        with pytest.raises(TrainingError, match=r"a mask of shape \(3, 6\) does not fit labels of shape \(3, 7\)"):
            LanguageModelingLoss().terms(logits, {"input_ids": ids, "attention_mask": mask[:, 1:]}, metrics=False)
        with pytest.raises(DataError, match="found 11, but the model's output has 11 classes"):
            LanguageModelingLoss().terms(logits, ids.clone().fill_(V), metrics=False)


class TestClassification:
    @pytest.fixture
    def images(self):
        generator = torch.Generator().manual_seed(4)
        return torch.randn(9, 5, generator=generator, requires_grad=True), torch.randint(5, (9,), generator=generator)

    def reference(self, logits, labels):
        log_probs = torch.log_softmax(logits.detach().double(), -1)
        total = -sum(log_probs[i, label].item() for i, label in enumerate(labels.tolist()) if label >= 0)
        right = sum(int(logits[i].argmax() == label) for i, label in enumerate(labels.tolist()))
        return total, int((labels >= 0).sum()), right

    def test_any_form_of_batch_and_output(self, images):
        logits, labels = images
        expected = self.reference(logits, labels)
        for batch in ((logits, labels), DataBatch(logits, labels), {"x": logits, "label": labels}, [labels, labels]):
            check(ClassificationLoss(), logits, batch, expected)
        for output in ((logits,), (logits, torch.tensor(3.0)), {"logits": logits}):
            check(ClassificationLoss(), output, (logits, labels), expected)

    def test_the_count_is_a_number_and_known_ahead(self, images):
        logits, labels = images
        terms = ClassificationLoss().terms(logits, (logits, labels), metrics=False)
        assert terms["loss"].count == 9
        assert type(terms["loss"].count) is int
        assert ClassificationLoss().counts((logits, labels)) == {"loss": 9}

    def test_ignored_labels(self, images):
        logits, labels = images
        labels[:3] = -100
        strategy = ClassificationLoss(ignore_index=-100)
        check(strategy, logits, (logits, labels), self.reference(logits, labels))
        assert int(strategy.counts((logits, labels))["loss"]) == 6
        with pytest.raises(DataError, match=r"found -100.*set ignore_index: -100"):
            ClassificationLoss().terms(logits, (logits, labels), metrics=False)

    def test_a_byte_that_wraps_to_the_ignored_label_counts(self):
        labels = torch.tensor([156, 3], dtype=torch.uint8)  # 156 is -100 in eight bits
        logits = F.one_hot(labels.long(), 200).float()
        strategy = ClassificationLoss(ignore_index=-100, class_weights=[1.0] * 200)
        terms = strategy.terms(logits, (None, labels), metrics=True)
        counts = (
            terms["loss"].count,
            terms["accuracy"].count,
            terms["accuracy"].sum,
            strategy.counts((None, labels))["loss"],
        )
        assert [float(count) for count in counts] == [2, 2, 2, 2]

    def test_class_weights_divide_the_loss_but_not_the_accuracy(self, images):
        logits, labels = images
        weights = [0.5, 1.0, 2.0, 3.0, 4.0]
        strategy = ClassificationLoss(class_weights=weights, label_smoothing=0.1)
        terms = strategy.terms(logits, (logits, labels), metrics=True)
        exact = F.cross_entropy(logits.double(), labels, torch.tensor(weights).double(), label_smoothing=0.1)
        assert strategy.compute_loss(logits, (logits, labels)).item() == pytest.approx(exact.item(), rel=1e-6)
        assert float(terms["loss"].count) == pytest.approx(sum(weights[label] for label in labels))
        assert float(strategy.counts((logits, labels))["loss"]) == pytest.approx(float(terms["loss"].count))
        assert float(terms["accuracy"].count) == 9

    def test_soft_labels(self, images):
        logits, _ = images
        soft = torch.softmax(torch.randn(9, 5), -1)
        terms = ClassificationLoss().terms(logits, (logits, soft), metrics=True)
        exact = -(soft.double() * torch.log_softmax(logits.double(), -1)).sum()
        assert terms["loss"].sum.item() == pytest.approx(exact.item(), rel=1e-6)
        assert terms["loss"].count == 9
        assert float(terms["accuracy"].sum) == float((logits.argmax(1) == soft.argmax(1)).sum())
        assert ClassificationLoss().counts((logits, soft)) is None

    def test_tokens_with_a_class_each(self, text):
        ids, logits, _ = text
        log_probs = torch.log_softmax(logits.detach().double(), -1)
        total = -log_probs.gather(-1, ids[..., None]).sum().item()
        check(ClassificationLoss(), logits, (ids, ids), (total, B * L, int((logits.argmax(-1) == ids).sum())))

    def test_labels_that_are_missing_or_misshapen(self, images):
        logits, labels = images
        with pytest.raises(TrainingError, match="ClassificationLoss needs a tensor of labels, the batch has none"):
            ClassificationLoss().terms(logits, logits, metrics=False)
        with pytest.raises(TrainingError, match="the batch has a list"):
            ClassificationLoss().terms(logits, (logits, labels.tolist()), metrics=False)
        with pytest.raises(TrainingError, match=r"labels of shape \(9, 1\).*squeeze"):
            ClassificationLoss().terms(logits, (logits, labels[:, None]), metrics=False)

    def test_the_names_of_the_documents(self):
        for name in ("cross_entropy", "text_classification", "vision_classification"):
            assert lookup("loss", name).factory is ClassificationLoss
        assert TextClassificationLoss is VisionClassificationLoss is ClassificationLoss
        assert lookup("loss", "segmentation").factory is SegmentationLoss
        assert lookup("loss", "language_modeling").factory is LanguageModelingLoss


class TestSegmentation:
    @pytest.mark.parametrize("shape", [(2, 4, 3, 5), (2, 3, 3, 3), (1, 6, 1, 1), (2, 3, 2, 2, 2)])
    @pytest.mark.parametrize("ignore_index", [-100, 255, 0])
    def test_against_pixel_by_pixel(self, shape, ignore_index):
        generator = torch.Generator().manual_seed(5)
        logits = torch.randn(shape, generator=generator)
        labels = torch.randint(shape[1], shape[:1] + shape[2:], generator=generator)
        labels[0] = ignore_index
        rows, flat = logits.movedim(1, -1).reshape(-1, shape[1]), labels.reshape(-1)
        log_probs = torch.log_softmax(rows.double(), -1)
        kept = [i for i, label in enumerate(flat.tolist()) if label != ignore_index]
        total = -sum(log_probs[i, flat[i]].item() for i in kept)
        right = sum(int(rows[i].argmax() == flat[i]) for i in kept)
        terms = SegmentationLoss(ignore_index=ignore_index).terms(
            logits, (logits, labels.to(torch.int16)), metrics=True
        )
        assert terms["loss"].sum.item() == pytest.approx(total, rel=1e-6)
        assert int(terms["loss"].count) == len(kept)
        assert int(terms["accuracy"].sum) == right

    def test_labels_with_a_channel_are_refused(self):
        with pytest.raises(TrainingError, match=r"labels of shape \(2, 1, 4, 4\).*expected \(2, 4, 4\)"):
            SegmentationLoss().terms(
                torch.zeros(2, 3, 4, 4), (None, torch.zeros(2, 1, 4, 4, dtype=torch.long)), metrics=False
            )


def test_a_strategy_of_ones_own_needs_terms_only():
    class TwoTerms(LossStrategy):
        def terms(self, output, batch, *, metrics):
            error = (output - batch[1]).abs()
            return {"l1": LossTerm(error.sum(), 4), "l2": LossTerm(error.square().sum(), torch.tensor(2), 0.5)}

    batch = (None, torch.zeros(4))
    assert TwoTerms().compute_loss(torch.full((4,), 3.0), batch).item() == 12 / 4 + 0.5 * 36 / 2
    assert TwoTerms().counts(batch) is None
    with pytest.raises(TypeError, match="abstract"):
        LossStrategy()
