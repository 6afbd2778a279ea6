"""Torch's losses become sums and counts whose quotient is torch's own mean; other functions are means of samples."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etude.config import lookup
from etude.core.errors import ConfigError, DataError, TrainingError
from etude.losses import ClassificationLoss, FunctionLoss, as_strategy, mean_of
from etude.losses.wrapped import TORCH_FUNCTIONS, TORCH_MODULES

N, C = 10, 4
G = torch.Generator().manual_seed(0)
LOGITS = torch.randn(N, C, generator=G, dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 3, -100, 1, 1, -100, 0, 2])
REAL = torch.randn(N, C, generator=G, dtype=torch.float64)
UNIT = torch.rand(N, C, generator=G, dtype=torch.float64)
WEIGHT = torch.rand(C, generator=G, dtype=torch.float64) + 0.1
LOG_PROBS = torch.log_softmax(LOGITS, 1)

CASES = [
    (nn.CrossEntropyLoss(), LOGITS, LABELS),
    (nn.CrossEntropyLoss(WEIGHT), LOGITS, LABELS),
    (nn.CrossEntropyLoss(WEIGHT, ignore_index=1, label_smoothing=0.2), LOGITS, LABELS.clamp_min(0)),
    (nn.CrossEntropyLoss(label_smoothing=0.2), LOGITS, LABELS),
    (nn.CrossEntropyLoss(), LOGITS, torch.softmax(REAL, 1)),
    (nn.NLLLoss(), LOG_PROBS, LABELS),
    (nn.NLLLoss(WEIGHT, ignore_index=2), LOG_PROBS, LABELS.clamp_min(0)),
    (nn.MSELoss(), LOGITS, REAL),
    (nn.L1Loss(), LOGITS, REAL),
    (nn.SmoothL1Loss(beta=0.3), LOGITS, REAL),
    (nn.HuberLoss(delta=0.4), LOGITS, REAL),
    (nn.BCEWithLogitsLoss(), LOGITS, UNIT),
    (nn.BCEWithLogitsLoss(weight=WEIGHT, pos_weight=WEIGHT + 1), LOGITS, UNIT.round()),
    (nn.BCELoss(), torch.sigmoid(LOGITS), UNIT),
    (nn.BCELoss(WEIGHT), torch.sigmoid(LOGITS), UNIT),
    (F.cross_entropy, LOGITS, LABELS),
    (partial(F.cross_entropy, label_smoothing=0.1, weight=WEIGHT), LOGITS, LABELS),
    (F.nll_loss, LOG_PROBS, LABELS),
    (F.mse_loss, LOGITS, REAL),
    (F.l1_loss, LOGITS, REAL),
    (F.huber_loss, LOGITS, REAL),
    (F.smooth_l1_loss, LOGITS, REAL),
    (F.binary_cross_entropy_with_logits, LOGITS, UNIT),
    (F.binary_cross_entropy, torch.sigmoid(LOGITS), UNIT),
]


@pytest.mark.parametrize(("function", "predictions", "labels"), CASES)
def test_the_mean_of_ragged_parts_is_torchs_mean_of_the_whole(function, predictions, labels):
    leaf = predictions.clone().requires_grad_()
    strategy = FunctionLoss(function)
    parts = [
        strategy.terms(leaf[start:end], (None, labels[start:end]), metrics=False)["loss"]
        for start, end in ((0, 1), (1, 5), (5, 10))
    ]
    mean = sum(part.sum for part in parts) / sum(part.count for part in parts)
    expected = function(leaf, labels)
    torch.testing.assert_close(mean, expected)
    torch.testing.assert_close(torch.autograd.grad(mean, leaf)[0], torch.autograd.grad(expected, leaf)[0])


@pytest.mark.parametrize("shape", [(2, C, 3), (2, C, 3, 5)])
def test_torchs_layout_with_classes_in_dimension_one(shape):
    logits = torch.randn(shape, dtype=torch.float64)
    labels = torch.randint(C, (shape[0], *shape[2:]))
    labels[0, 0] = -100
    for function, given in ((nn.CrossEntropyLoss(), logits), (nn.NLLLoss(), torch.log_softmax(logits, 1))):
        terms = FunctionLoss(function).terms(given, (None, labels), metrics=True)
        torch.testing.assert_close(mean_of(terms["loss"]), function(given, labels))
        assert int(terms["accuracy"].sum) == int((logits.argmax(1) == labels).sum())
        assert int(terms["accuracy"].count) == int((labels >= 0).sum())


def test_classes_last_are_accepted_where_torch_would_not():
    logits, labels = torch.randn(2, 5, C, dtype=torch.float64), torch.randint(C, (2, 5))
    for function, given in ((nn.CrossEntropyLoss(), logits), (nn.NLLLoss(), torch.log_softmax(logits, -1))):
        terms = FunctionLoss(function).terms(given, (None, labels), metrics=True)
        expected = F.cross_entropy(logits.view(10, C), labels.view(10))
        torch.testing.assert_close(mean_of(terms["loss"]), expected)
        assert int(terms["accuracy"].sum) == int((logits.argmax(-1) == labels).sum())


@pytest.mark.parametrize(
    "function",
    [
        *(module(reduction="sum") for module in TORCH_MODULES),
        *(partial(function, reduction="sum") for function in TORCH_FUNCTIONS),
        nn.KLDivLoss(reduction="sum"),  # not one of the losses that are computed as sums
        partial(partial(F.kl_div, reduction="sum"), log_target=True),
        type("Own", (nn.MSELoss,), {})(reduction="sum"),
    ],
)
def test_a_sum_is_refused(function):
    """It would be divided all the same: by the count of the step, or with accumulation by the micro-batches."""
    with pytest.raises(ConfigError, match=r'reduction="sum".*reduction="mean"') as caught:
        FunctionLoss(function)
    assert "\n" not in str(caught.value)
    if isinstance(function, partial):
        FunctionLoss(partial(function, reduction="mean"))


@pytest.mark.parametrize(
    ("loss", "known"),
    [
        (nn.CrossEntropyLoss(), True),
        (nn.CrossEntropyLoss(ignore_index=2), True),
        (F.nll_loss, True),
        (partial(F.cross_entropy, label_smoothing=0.0), True),
        (ClassificationLoss(), True),
        (nn.CrossEntropyLoss(label_smoothing=0.1), False),
        (nn.CrossEntropyLoss(WEIGHT), False),
        (ClassificationLoss(label_smoothing=0.1), False),
        (ClassificationLoss(class_weights=[1.0] * C), False),
        (nn.MSELoss(), False),
        (lambda p, y: (p - y).mean(), False),
    ],
)
def test_only_a_plain_cross_entropy_is_one(loss, known):
    assert as_strategy(loss).cross_entropy({"loss": 2.0}) == (2.0 if known else None)


def test_no_reduction_means_the_mean_over_what_counts():
    strategy = FunctionLoss(nn.CrossEntropyLoss(reduction="none"))
    torch.testing.assert_close(strategy.compute_loss(LOGITS, (None, LABELS)), F.cross_entropy(LOGITS, LABELS))
    strategy = FunctionLoss(lambda p, y: (p - y).abs().sum(1))
    torch.testing.assert_close(strategy.compute_loss(LOGITS, (None, REAL)), (LOGITS - REAL).abs().sum(1).mean())


def test_any_other_scalar_is_a_mean_over_samples():
    def cosine(predictions, labels):
        return 1 - F.cosine_similarity(predictions, labels).mean()

    strategy = FunctionLoss(cosine)
    parts = [strategy.terms(LOGITS[a:b], (None, REAL[a:b]), metrics=True) for a, b in ((0, 3), (3, 10))]
    assert [part["loss"].count for part in parts] == [3, 7]
    assert all(list(part) == ["loss"] for part in parts)
    torch.testing.assert_close(sum(part["loss"].sum for part in parts) / N, cosine(LOGITS, REAL))


def test_a_subclass_is_not_taken_for_its_base():
    class Doubled(nn.MSELoss):
        def forward(self, input, target):
            return 2 * super().forward(input, target)

    strategy = FunctionLoss(Doubled())
    torch.testing.assert_close(strategy.compute_loss(LOGITS, (None, REAL)), 2 * F.mse_loss(LOGITS, REAL))


def test_a_partial_with_options_not_known_here_is_called_as_it_is():
    strategy = FunctionLoss(partial(F.mse_loss, weight=UNIT))
    torch.testing.assert_close(strategy.compute_loss(LOGITS, (None, REAL)), F.mse_loss(LOGITS, REAL, weight=UNIT))


def test_a_callable_that_cannot_be_hashed():
    class Loss:
        __hash__ = None

        def __call__(self, predictions, labels):
            return (predictions - labels).square().mean()

    torch.testing.assert_close(FunctionLoss(Loss()).compute_loss(LOGITS, (None, REAL)), F.mse_loss(LOGITS, REAL))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_elements_in_half_precision_are_summed_in_float32(dtype):
    predictions, labels = torch.randn(1000, 30).to(dtype), torch.randn(1000, 30)
    term = FunctionLoss(nn.MSELoss()).terms(predictions, (None, labels), metrics=False)["loss"]
    assert term.sum.dtype == torch.float32
    exact = (predictions.double() - labels.double()).square().sum().item()
    assert term.sum.item() == pytest.approx(exact, rel=1e-5)
    assert term.count == 30_000


@pytest.mark.parametrize("labels", [torch.tensor([[1], [0]]), torch.tensor([[1.0], [0.0]], dtype=torch.float64)])
def test_labels_take_the_type_of_the_predictions(labels):
    predictions = torch.tensor([[0.3], [-2.0]], requires_grad=True)
    loss = FunctionLoss(nn.BCEWithLogitsLoss()).compute_loss(predictions, (None, labels))
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.binary_cross_entropy_with_logits(predictions, labels.float()))


def test_shapes_are_not_broadcast():
    with pytest.raises(TrainingError, match=r"labels of shape \(5,\).*\(5, 1\): MSELoss compares.*reshape"):
        FunctionLoss(nn.MSELoss()).terms(torch.zeros(5, 1), (None, torch.zeros(5)), metrics=False)
    labels = torch.zeros(2, 1, 3, 3, dtype=torch.long)
    with pytest.raises(TrainingError, match=r"labels of shape \(2, 1, 3, 3\).*expected \(2, 3, 3\)"):
        FunctionLoss(F.cross_entropy).terms(torch.zeros(2, 4, 3, 3), (None, labels), metrics=False)


@pytest.mark.parametrize("function", [nn.CrossEntropyLoss(), nn.NLLLoss()])
def test_labels_out_of_range(function):
    with pytest.raises(DataError, match="found 4, but the model's output has 4 classes"):
        FunctionLoss(function).terms(LOGITS, (None, torch.full((N,), 4)), metrics=False)


def test_mistakes_are_explained():
    with pytest.raises(ConfigError, match="found a str"):
        as_strategy("cross_entropy")
    with pytest.raises(TrainingError, match="needs a tensor of labels, the batch has none"):
        FunctionLoss(nn.MSELoss()).terms(LOGITS, LOGITS, metrics=False)

    def plain(predictions, labels):
        return (predictions - labels).square().mean().item()

    with pytest.raises(TrainingError, match="the loss plain returned a float; it must return a tensor"):
        FunctionLoss(plain).terms(LOGITS, (None, REAL), metrics=False)


def test_weights_are_moved_to_the_model_once():
    strategy = FunctionLoss(nn.CrossEntropyLoss(WEIGHT))
    logits, labels = LOGITS.to("meta"), LABELS.to("meta")
    strategy.terms(logits, (None, labels), metrics=False)
    moved = strategy._options["weight"]
    assert moved.device.type == "meta"
    strategy.terms(logits, (None, labels), metrics=False)
    assert strategy._options["weight"] is moved


@pytest.mark.parametrize(
    ("name", "options", "function"),
    [("mse", {}, F.mse_loss), ("l1", {}, F.l1_loss), ("huber", {"delta": 0.5}, partial(F.huber_loss, delta=0.5))],
)
def test_regressions_by_name(name, options, function):
    strategy = lookup("loss", name).factory(**options)
    torch.testing.assert_close(strategy.compute_loss(LOGITS, (None, REAL)), function(LOGITS, REAL))


def test_a_function_of_the_batch_is_given_it_whole_with_the_output_as_it_is():
    seen = []

    def distance(output, batch):
        seen.append((output, batch))
        return (output["mean"] - batch["x"]).square().mean()

    batch = {"x": torch.tensor([1.0, 3.0])}
    output = {"mean": torch.zeros(2)}
    term = FunctionLoss(distance).terms(output, batch, metrics=True)["loss"]
    assert seen[0][0] is output
    assert seen[0][1] is batch
    assert (float(term.sum), term.count) == (10.0, 2)
    assert FunctionLoss(distance).counts(batch) is None


@pytest.mark.parametrize(("function", "used"), [(lambda o, b: o + b.y, "y"), (lambda o, b: o.hidden, "hidden")])
def test_a_function_that_takes_labels_for_the_batch_is_told_its_name(function, used):
    with pytest.raises(TrainingError, match=rf"`\.{used}`.*`batch`"):
        FunctionLoss(function).terms(torch.zeros(2, 3), (torch.zeros(2, 3), torch.zeros(2)), metrics=False)


def test_other_missing_attributes_keep_their_error():
    with pytest.raises(AttributeError, match="mean_of_all"):
        FunctionLoss(lambda o, y: torch.ones(2).mean_of_all).terms(torch.zeros(2), (0, torch.zeros(2)), metrics=False)
