"""Heads compute what their formulas say, of real positions alone, and make mistakes plain."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from etude.config import lookup
from etude.config.registry import names
from etude.core.errors import ConfigError, TrainingError
from etude.core.model import HeadOutput
from etude.losses import BinaryLoss
from etude.models.features import Features, feature_dim
from etude.multitask.heads import (
    BinaryHead,
    LanguageModelHead,
    LinearHead,
    SequenceClassifier,
    TokenClassifier,
    pooled,
)
from etude.multitask.model import positions_of

WIDTH = 6
POOLINGS = ("mean", "last", "first", "max")


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def enlarged(head):
    """Return the head in float64 with weights and biases large enough for each to matter."""
    head.double()
    with torch.no_grad():
        for place, parameter in enumerate(head.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=place + 10))
    return head


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def by_a_loop(hidden, mask, pooling):
    """Pool one sequence after the other, looking at its real positions only."""
    rows = []
    for row, real in zip(hidden, mask, strict=True):
        seen = [vector for vector, here in zip(row, real, strict=True) if here]
        match pooling:
            case "mean":
                rows.append(sum(seen) / len(seen))
            case "max":
                rows.append(torch.stack([max(vector[d] for vector in seen) for d in range(row.shape[1])]))
            case "first":
                rows.append(seen[0])
            case "last":
                rows.append(seen[-1])
    return torch.stack(rows)


def test_every_head_is_a_component_that_takes_the_width():
    assert names("head") == ["binary", "language_model", "linear", "sequence_classifier", "token_classifier"]
    assert lookup("head", "sequence_classifier").factory is SequenceClassifier


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(POOLINGS), st.integers(1, 4), st.integers(1, 7), st.booleans())
def test_pooling_is_that_of_the_real_positions(data, pooling, rows, length, as_bool):
    row = st.lists(st.booleans(), min_size=length, max_size=length).filter(any)
    mask = torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows)))
    hidden = draw(rows, length, WIDTH, seed=length)
    dirty = torch.where(mask[..., None], hidden, torch.nan)  # padding must not even be multiplied by 0
    found = pooled(Features(dirty, mask if as_bool else mask.long()), pooling)
    torch.testing.assert_close(found, by_a_loop(hidden, mask, pooling))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_without_a_mask_all_positions_are_real(pooling):
    hidden = draw(3, 5, WIDTH)
    torch.testing.assert_close(
        pooled(Features(hidden), pooling), by_a_loop(hidden, torch.ones(3, 5, dtype=torch.bool), pooling)
    )


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_row_of_padding_is_finite_with_finite_gradients_and_disturbs_no_other(pooling):
    hidden, mask = draw(2, 4, WIDTH).requires_grad_(), torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0]])
    vectors = pooled(Features(hidden, mask), pooling)
    vectors.square().sum().backward()
    assert vectors.isfinite().all()
    assert hidden.grad.isfinite().all()
    torch.testing.assert_close(vectors[1:], by_a_loop(hidden[1:], mask[1:].bool(), pooling))
    assert (hidden.grad[1, 2:] == 0).all()


def test_the_mean_of_many_positions_in_half_precision_divides_by_their_exact_number():
    hidden, mask = torch.ones(1, 700, 2, dtype=torch.bfloat16), torch.ones(1, 700)
    mask[0, 601:] = 0  # 601 is no bfloat16
    found = pooled(Features(hidden, mask), "mean")
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, torch.ones(1, 2, dtype=torch.bfloat16), rtol=0, atol=2**-8)


@pytest.mark.parametrize("hidden_width", [None, 9])
def test_classifiers_are_their_formulas(hidden_width):
    tokens, sequences = (
        enlarged(kind(4, hidden=hidden_width, in_features=WIDTH)) for kind in (TokenClassifier, SequenceClassifier)
    )
    hidden, mask = draw(2, 5, WIDTH), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    for head, given_features in ((tokens, hidden), (sequences, by_a_loop(hidden, mask, "mean"))):
        *first, weight, bias = head.parameters()
        x = given_features if not first else gelu(given_features @ first[0].T + first[1])
        torch.testing.assert_close(head(Features(hidden, mask)), x @ weight.T + bias)


def test_features_of_one_vector_need_no_pooling():
    head, vectors = enlarged(SequenceClassifier(4, pooling="last", in_features=WIDTH)), draw(3, WIDTH)
    weight, bias = head.parameters()
    torch.testing.assert_close(head(Features(vectors)), vectors @ weight.T + bias)


def test_linear_and_binary_heads_are_linear():
    hidden = draw(2, 5, WIDTH)
    linear, binary = enlarged(LinearHead(3, in_features=WIDTH)), enlarged(BinaryHead(in_features=WIDTH))
    weight, bias = linear.parameters()
    torch.testing.assert_close(linear(Features(hidden)), hidden @ weight.T + bias)
    weight, bias = binary.parameters()
    logits = binary(Features(hidden))
    torch.testing.assert_close(logits, hidden.mean(1) @ weight.T + bias)
    labels = torch.tensor([1, 0])
    term = BinaryLoss().terms(logits, {"labels": labels}, metrics=False)["loss"]
    expected = nn.functional.binary_cross_entropy_with_logits(logits[:, 0], labels.double(), reduction="sum")
    torch.testing.assert_close(term.sum, expected)


def test_dropout_works_in_training_alone():
    head, features = SequenceClassifier(4, hidden=64, dropout=0.5, in_features=WIDTH), Features(torch.ones(2, WIDTH))
    assert not head(features).equal(head(features))
    head.eval()
    assert head(features).equal(head(features))
    assert sum(isinstance(part, nn.Dropout) for part in head.modules()) == 2


def test_weights_start_small_from_the_global_generator_and_biases_at_zero():
    torch.manual_seed(3)
    one = SequenceClassifier(50, hidden=400, in_features=300)
    torch.manual_seed(3)
    two = SequenceClassifier(50, hidden=400, in_features=300)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert a.equal(b)
        if a.dim() == 1:
            assert (a == 0).all()
        else:
            assert a.std().item() == pytest.approx(0.02, rel=0.05)


def test_heads_follow_the_features_into_another_dtype_unless_autocast_does():
    head = TokenClassifier(4, in_features=WIDTH)
    assert head(Features(torch.ones(2, 5, WIDTH, dtype=torch.bfloat16))).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head(Features(torch.ones(2, 5, WIDTH))).dtype is torch.bfloat16


def test_a_language_model_head_hands_on_the_output_layer():
    layer, hidden = nn.Linear(WIDTH, 11), torch.randn(2, 5, WIDTH)
    head = LanguageModelHead()
    head.attach(layer, WIDTH)
    output = head(Features(hidden, output=layer, softcap=2.0))
    assert isinstance(output, HeadOutput)
    assert output.weight is layer.weight
    assert output.bias is layer.bias
    torch.testing.assert_close(output.logits, 2 * torch.tanh(layer(hidden) / 2))
    assert not list(head.parameters())


def test_a_language_model_head_has_its_own_layer_where_there_is_none_or_on_request():
    layer, hidden = nn.Linear(WIDTH, 11), torch.randn(2, 5, WIDTH)
    untied = LanguageModelHead(vocab_size=7, tied=False, in_features=WIDTH)
    untied.attach(layer, WIDTH)
    output = untied(Features(hidden, output=layer, softcap=2.0))
    torch.testing.assert_close(output.logits, hidden @ untied.layer.weight.T)  # the trunk's soft cap is the trunk's
    lonely = LanguageModelHead(vocab_size=7, bias=True)
    lonely.attach(None, WIDTH)
    assert lonely(Features(hidden)).shape == (2, 5, 7)
    assert [name for name, _ in lonely.named_parameters()] == ["layer.weight", "layer.bias"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenClassifier(3), "head token_classifier: .* set in_features"),
        (lambda: SequenceClassifier(3), "head sequence_classifier: .* set in_features"),
        (lambda: BinaryHead(), "head binary: .* set in_features"),
        (lambda: LinearHead(3), "head linear: .* set in_features"),
        (lambda: LanguageModelHead(tied=False), "tied: false .* set vocab_size"),
        (lambda: LanguageModelHead(9, tied=False), "head language_model: .* set in_features"),
        (lambda: LanguageModelHead().attach(None, 4), "a trunk without an output layer .* set vocab_size"),
    ],
)
def test_what_a_head_lacks_is_said_in_one_line(make, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_errors_of_features_that_do_not_fit():
    with pytest.raises(TrainingError, match="the trunk has no output layer"):
        LanguageModelHead()(Features(torch.ones(2, 3, WIDTH)))
    with pytest.raises(TrainingError, match=r"a mask of shape \(2, 9\) .* features of shape \(2, 3, 6\)"):
        pooled(Features(torch.ones(2, 3, WIDTH), mask=torch.ones(2, 9)), "mean")


def test_mask_and_documents_come_from_the_batch_as_the_model_sees_it():
    ids, mask, documents = (
        torch.ones(2, 4).long(),
        torch.tensor([[1, 1, 0, 0]] * 2),
        torch.tensor([[0, 1, 1, -1]] * 2),
    )
    for key in ("attention_mask", "attn_mask"):
        assert positions_of({"input_ids": ids, key: mask}) == (mask, None)
    found, of = positions_of({"input_ids": ids, "document_ids": documents})
    assert found.equal(documents >= 0)
    assert of is documents
    square = torch.ones(2, 1, 4, 4)
    assert positions_of({"input_ids": ids, "attention_mask": square}) == (None, None)
    found, _ = positions_of({"tokens": ids, "attn_mask": mask})  # the last token has no next one
    assert found.equal(mask[:, :-1])
    assert positions_of((ids, mask)) == (None, None)


def test_a_plain_module_does_not_tell_its_width():
    assert feature_dim(nn.Linear(3, 4)) is None
