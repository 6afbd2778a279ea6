"""The loss of several tasks: Σ weight·loss against torch and numbers by hand, what is inferred, errors in words."""

import math

import pytest
import torch
import torch.nn.functional as F

import etude
from etude.core.errors import ConfigError, TrainingError
from etude.losses import ClassificationLoss, LossStrategy, MultiLabelLoss
from etude.multitask import TaskLosses, default_weights, multi_task_loss, multi_task_terms
from etude.multitask.curriculum import active_tasks, current_phase, loss_weights

NAN = math.nan


@pytest.fixture
def tasks():
    torch.manual_seed(0)
    return {
        "code": (torch.randn(2, 5, 7, requires_grad=True), torch.randint(7, (2, 5))),
        "quality": (torch.randn(2, 3, requires_grad=True), torch.randint(2, (2, 3)).float()),
        "clear": (torch.randn(2, 1, requires_grad=True), torch.randint(2, (2,))),
        "kind": (torch.randn(2, 4, requires_grad=True), torch.randint(4, (2,))),
        "pixels": (torch.randn(2, 3, 4, 6, requires_grad=True), torch.randint(3, (2, 4, 6))),
    }


def references(tasks):
    code, quality, clear, kind, pixels = tasks.values()
    return {
        "code": F.cross_entropy(code[0].flatten(0, 1), code[1].flatten()),
        "quality": F.binary_cross_entropy_with_logits(*quality),
        "clear": F.binary_cross_entropy_with_logits(clear[0][:, 0], clear[1].float()),
        "kind": F.cross_entropy(*kind),
        "pixels": F.cross_entropy(*pixels),
    }


WEIGHTS = {"code": 1.0, "quality": 0.5, "clear": 0.3, "kind": 2.0, "pixels": 0.25}


def test_total_losses_and_gradients_are_those_of_torch(tasks):
    expected = references(tasks)
    result = multi_task_loss(tasks, WEIGHTS)
    assert isinstance(result, TaskLosses)
    total, each = result
    assert list(each) == list(tasks)
    for task, loss in each.items():
        torch.testing.assert_close(loss, expected[task].detach())
        assert not loss.requires_grad
    by_hand = sum(weight * expected[task] for task, weight in WEIGHTS.items())
    torch.testing.assert_close(total, by_hand)
    logits = [prediction for prediction, _ in tasks.values()]
    for ours, theirs in zip(torch.autograd.grad(total, logits), torch.autograd.grad(by_hand, logits), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_each_task_is_divided_by_its_own_count():
    """A rare task is not drowned by the padding of another, nor by samples without its label."""
    rare = torch.full((8, 3), NAN)
    rare[5] = torch.tensor([1.0, 0.0, 1.0])
    code = torch.full((8, 6), -100)
    code[0, 0] = 2
    logits = torch.zeros(8, 6, 4)
    logits[0, 0, 2] = math.log(3.0)  # p = 3/6
    terms = multi_task_terms({"code": (logits, code), "rare": (torch.zeros(8, 3), rare)}, {"code": 1, "rare": 0.1})
    assert [float(term.count) for term in terms.values()] == [1, 3]
    assert [term.weight for term in terms.values()] == [1, 0.1]
    total, each = multi_task_loss(
        {"code": (logits, code), "rare": (torch.zeros(8, 3), rare)}, {"code": 1, "rare": 0.1}
    )
    assert each["code"].item() == pytest.approx(math.log(2))
    assert each["rare"].item() == pytest.approx(math.log(2))
    assert total.item() == pytest.approx(1.1 * math.log(2))


def test_micro_batches_add_up_task_by_task(tasks):
    tasks["quality"][1][0] = NAN  # all missing in the first micro-batch
    tasks["kind"][1][1] = -100
    whole = multi_task_terms(tasks, WEIGHTS)
    parts = [
        multi_task_terms({t: (p[i : i + 1], y[i : i + 1]) for t, (p, y) in tasks.items()}, WEIGHTS) for i in (0, 1)
    ]
    for task, term in whole.items():
        torch.testing.assert_close(parts[0][task].sum + parts[1][task].sum, term.sum)
        assert float(parts[0][task].count) + float(parts[1][task].count) == float(term.count)


@pytest.mark.parametrize("missing", [torch.full((2, 3), NAN), torch.full((2, 3), -100), torch.full((2, 3), -100.0)])
def test_a_task_whose_labels_are_all_missing_costs_nothing(tasks, missing):
    tasks["quality"] = (tasks["quality"][0], missing)
    total, each = multi_task_loss(tasks, WEIGHTS)
    assert each["quality"].item() == 0
    assert float(multi_task_terms(tasks, WEIGHTS)["quality"].count) == 0
    expected = references({**tasks, "quality": (torch.zeros(1), torch.zeros(1))})
    by_hand = sum(weight * expected[task].item() for task, weight in WEIGHTS.items() if task != "quality")
    assert total.item() == pytest.approx(by_hand, rel=1e-6)
    (gradient,) = torch.autograd.grad(total, tasks["quality"][0])
    assert gradient.abs().sum() == 0


def test_a_weight_of_zero_leaves_a_task_out_of_the_total_even_if_it_is_infinite(tasks):
    tasks["kind"] = (torch.tensor([[-math.inf, 0.0]], requires_grad=True), torch.tensor([0]))
    total, each = multi_task_loss(tasks, {**WEIGHTS, "kind": 0})
    assert each["kind"].item() == math.inf
    assert math.isfinite(total.item())
    assert torch.autograd.grad(total, tasks["kind"][0], allow_unused=True) == (None,)
    alone, _ = multi_task_loss({"kind": tasks["kind"]}, {"kind": 0.0})
    assert alone.item() == 0


def test_losses_by_name_strategy_and_function(tasks):
    prediction, target = torch.randn(4, 3), torch.rand(4, 3)
    soft = target / target.sum(-1, keepdim=True)

    def loss(target, given):
        return multi_task_loss({"t": (prediction, target)}, {"t": 1.0}, {"t": given}).loss

    torch.testing.assert_close(loss(target, F.mse_loss), F.mse_loss(prediction, target))
    torch.testing.assert_close(loss(target, torch.nn.L1Loss()), F.l1_loss(prediction, target))
    torch.testing.assert_close(loss(soft, "cross_entropy"), F.cross_entropy(prediction, soft))
    bce = F.binary_cross_entropy_with_logits
    for name in ("multi_label", "binary_cross_entropy"):
        torch.testing.assert_close(loss(target, name), bce(prediction, target))
    weights = torch.tensor([1.0, 0.0, 3.0])
    weighed = (bce(prediction, target, reduction="none") * weights).sum() / (4 * weights.sum())
    torch.testing.assert_close(loss(target, MultiLabelLoss(label_weights=weights.tolist())), weighed)
    smooth = F.cross_entropy(prediction, torch.tensor([0, 1, 2, 0]), label_smoothing=0.1)
    torch.testing.assert_close(loss(torch.tensor([0, 1, 2, 0]), ClassificationLoss(label_smoothing=0.1)), smooth)


def test_predictions_may_be_any_output_with_logits(tasks):
    prediction, target = tasks["kind"]
    for output in ({"logits": prediction}, (prediction, torch.tensor(1.0))):
        found = multi_task_loss({"kind": (output, target)}, {"kind": 1.0}).loss
        torch.testing.assert_close(found, F.cross_entropy(prediction, target))


def test_weights_that_are_learned_get_a_gradient(tasks):
    weight = torch.tensor(0.5, requires_grad=True)
    total, each = multi_task_loss(tasks, {**WEIGHTS, "kind": weight})
    torch.testing.assert_close(torch.autograd.grad(total, weight)[0], each["kind"])


def test_default_weights_are_as_documented_and_a_new_dictionary_each_time():
    weights = default_weights()
    assert weights == {
        "code_generation": 1.0,
        "test_generation": 0.8,
        "quality": 0.5,
        "security": 0.5,
        "clarification": 0.3,
        "explanation": 0.3,
    }
    for task in weights:
        assert task in default_weights.__doc__
    weights["quality"] = 9.0
    assert default_weights()["quality"] == 0.5


def test_default_weights_fit_all_tasks():
    tasks = {task: (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)) for task in default_weights()}
    assert multi_task_loss(tasks, default_weights()).loss.item() == pytest.approx(3.4 * math.log(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": -0.1}, "the weight of the task 'kind' is -0.1; .* at least 0"),
        ({"kind": NAN}, "the weight of the task 'kind' is nan"),
        ({"kind": math.inf}, "the weight of the task 'kind' is inf"),
        ({"kind": torch.tensor(NAN)}, "the weight of the task 'kind' is nan"),
    ],
)
def test_weights_that_cannot_be(tasks, change, message):
    with pytest.raises(ConfigError, match=message):
        multi_task_loss(tasks, {**WEIGHTS, **change})


def test_a_task_without_a_weight_has_the_weight_1(tasks):
    some = {name: weight for name, weight in WEIGHTS.items() if name not in ("clear", "pixels")}
    full = multi_task_loss(tasks, {**some, "clear": 1.0, "pixels": 1.0})
    torch.testing.assert_close(multi_task_loss(tasks, some).loss, full.loss)


def test_a_misspelt_weight_and_no_tasks(tasks):
    misspelt = {"qualty" if name == "quality" else name: weight for name, weight in WEIGHTS.items()}
    with pytest.raises(ConfigError, match=r"'qualty'.*'quality'"):
        multi_task_loss(tasks, misspelt)
    with pytest.raises(TrainingError, match="there are no tasks"):
        multi_task_loss({}, {})


def test_weights_and_losses_of_tasks_that_are_not_active_change_nothing(tasks):
    active = {name: tasks[name] for name in ("kind", "code")}
    total, each = multi_task_loss(active, WEIGHTS, {"kind": "cross_entropy", "quality": "multi_label"})
    expected = references(tasks)
    torch.testing.assert_close(total, 2.0 * expected["kind"] + expected["code"])
    assert list(each) == ["kind", "code"]


@pytest.mark.parametrize("epoch", [1, 5, 10, 11, 13, 16, 30, 31, 50, 51, 60])
def test_curriculum_weights_and_loss_compose(epoch):
    """As a loop by hand would put them together: phase, active tasks, their weights, the loss of what the heads say."""
    names = active_tasks(current_phase(epoch))
    heads = {name: torch.randn(2, 4, requires_grad=True) for name in names}
    outputs = {name: (heads[name], torch.tensor([0, 3])) for name in names}
    means = {name: F.cross_entropy(heads[name], torch.tensor([0, 3])) for name in names}
    for weights in (loss_weights(epoch), loss_weights(epoch, default_weights()), default_weights()):
        total, each = multi_task_loss(outputs, weights)
        torch.testing.assert_close(total, sum(weights.get(name, 1.0) * means[name] for name in names))
        assert tuple(each) == names
    plain, weighed = loss_weights(epoch), loss_weights(epoch, default_weights())
    assert tuple(plain) == tuple(weighed) == names == active_tasks(epoch)
    assert weighed == {name: pytest.approx(default_weights().get(name, 1.0) * plain[name]) for name in names}


def test_losses_that_do_not_fit_name_the_task(tasks):
    with pytest.raises(
        ConfigError, match=r"task 'kind': unknown loss 'cross_entropi'; did you mean 'cross_entropy'\?"
    ):
        multi_task_loss(tasks, WEIGHTS, {"kind": "cross_entropi"})
    with pytest.raises(ConfigError, match="the losses name a task 'sort' that is not there"):
        multi_task_loss(tasks, WEIGHTS, {"sort": "cross_entropy"})
    tasks["kind"] = (torch.zeros(2, 4), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(
        TrainingError, match=r"task 'kind': no loss fits an output of shape \(2, 4\) with int64 labels"
    ):
        multi_task_loss(tasks, WEIGHTS)
    tasks["kind"] = (torch.zeros(2, 4), torch.tensor([1, 4]))
    with pytest.raises(etude.EtudeError, match="task 'kind': labels out of range: found 4"):
        multi_task_loss(tasks, WEIGHTS)


def test_a_strategy_of_several_terms_is_refused():
    class Two(LossStrategy):
        def terms(self, output, batch, *, metrics):
            term = ClassificationLoss().terms(output, batch, metrics=metrics)["loss"]
            return {"a": term, "b": term}

    with pytest.raises(TrainingError, match=r"task 't': its loss has 2 terms \(a, b\)"):
        multi_task_loss({"t": (torch.zeros(1, 2), torch.tensor([0]))}, {"t": 1.0}, {"t": Two()})


def test_exported():
    for name in ("multi_task_loss", "default_weights", "multi_label_bce", "binary_cross_entropy"):
        assert callable(getattr(etude, name))


def test_a_task_that_is_no_pair_is_named() -> None:
    with pytest.raises(TrainingError, match="'quality'"):
        multi_task_loss({"quality": torch.zeros(())}, {"quality": 1.0})
